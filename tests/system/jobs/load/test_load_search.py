"""A search over HTTP finds the limit of a server whose limit is known; as a job it is a result."""

import asyncio

import pytest

from runners.jobs.load import benchmark
from runners.jobs.load.job import Sweep
from runners.jobspec import BenchmarkSpec
from runners.jobspec.compress import ClosedLoop, LoadOptions, LoadReport, LoadSearch
from runners.shared.messages import EndpointBody
from tests.system.jobs.load.replies import WHOLE

SMALL = {"weight_dtype": "fp32", "batch_size": 4, "prompt_tokens": 16, "output_tokens": 2}
SECONDS_EACH, KNOWN = 0.008, 12  # of a request in service, and how many of them are in time


class Shared:
    """An endpoint that divides its time among the requests in flight."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.address: EndpointBody | None = None

    def is_alive(self) -> bool:
        return True

    def wait_until_ready(self) -> EndpointBody:
        assert self.address is not None
        return self.address

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
        self.in_flight += 1
        await asyncio.sleep(SECONDS_EACH * self.in_flight)
        writer.write(WHOLE)
        await writer.drain()
        self.in_flight -= 1
        writer.close()

    async def measured_by(self, sweep: Sweep) -> LoadReport:
        async with await asyncio.start_server(self.serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            self.address = EndpointBody(host="127.0.0.1", port=port, model="m", has_keys=True)
            return await sweep.run(self)


def options(search: LoadSearch, requests: int) -> LoadOptions:
    arrivals = ClosedLoop(concurrency=(4,))
    return LoadOptions(arrivals=arrivals, requests_per_repetition=requests, search=search)


@pytest.fixture
def searched(host, trained_model):
    """Return the report of a search on a server that divides its time."""

    def search(name: str, load: LoadOptions) -> LoadReport:
        spec = BenchmarkSpec(model=trained_model, load=load, **SMALL)
        reports = []

        def work(job) -> None:
            reports.append(asyncio.run(Shared().measured_by(Sweep(job, spec, load))))

        host.run_here(name, spec, work)
        return reports[0]

    return search


@pytest.mark.slow
def test_a_search_finds_the_known_limit_of_a_server_within_a_tenth(searched):
    target = {"ttft_p95_seconds": SECONDS_EACH * (KNOWN + 0.5)}
    load = options(LoadSearch(targets=target, highest=64.0), requests=32)

    report = searched("load-search-known", load)

    found = [(row.point, row.measured["ttft_p95_seconds"], row.is_met) for row in report.rows]
    assert sum(row.repetitions for row in report.rows) <= 12 * load.repetitions, found
    assert report.limit.ending == "found", found
    assert abs(report.limit.met - KNOWN) <= 0.1 * KNOWN, found


def test_no_level_begins_that_would_end_after_the_time_limit(searched):
    targets = {"ttft_p95_seconds": 60.0, "tpot_p95_seconds": 1e-9}
    search = LoadSearch(targets=targets, highest=64.0, max_seconds=0.01)

    report = searched("load-search-late", options(search, requests=4))

    (row,) = report.rows
    assert (row.point, row.is_met) == (4, False)
    assert any("TPOT p95 is" in note and "and the target 1e-09 s" in note for note in row.notes)
    assert (report.limit.met, report.limit.missed, report.limit.ending) == (None, 4, "seconds")


def test_a_search_is_a_job_whose_result_is_the_limit(host, trained_model):
    quick = options(LoadSearch(targets={"ttft_p95_seconds": 60.0}, highest=8.0), requests=8)
    spec = BenchmarkSpec(model=trained_model, load=quick, **SMALL)

    run = host.run_here("load-search", spec, benchmark.work)

    report = LoadReport.model_validate(run.bodies("artefact")[0]["facts"])
    assert [(row.point, row.is_met, row.requests) for row in report.rows] == [
        (4, True, 48), (8, True, 96),
    ]  # fmt: skip
    assert (report.limit.met, report.limit.missed, report.limit.ending) == (8, None, "highest")
    assert run.measured["slo_max_concurrency"] == 8
    assert run.measured["ttft_seconds"] == report.rows[0].measured["ttft_seconds"]
    words = run.bodies("result")[0]["notes"]["slo_max_concurrency"]
    assert words.startswith("The targets are met at every level that was tried, up to 8 clients")
    assert {"name": "Under load: 8 clients"} in run.bodies("phase")
    assert run.bodies("progress")[-1]["done"] == pytest.approx(100.0)
