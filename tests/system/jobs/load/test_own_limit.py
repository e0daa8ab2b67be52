"""A search finds the limit of Slipway's own engine that a sweep over every level shows."""

import asyncio
import statistics
import sys
from collections.abc import Iterable

import pytest

from runners.jobs.load.job import OwnEndpoint, Sweep, own_endpoint, serve_spec_of
from runners.jobs.runtime import Job
from runners.jobspec import BenchmarkSpec
from runners.jobspec.compress import (
    MAX_POINTS,
    ClosedLoop,
    LoadOptions,
    LoadReport,
    LoadRow,
    LoadSearch,
)

FIGURE = "latency_p95_seconds"
HIGHEST, GOAL = 20, 12  # clients; the target is about what a request takes with so many
LEVELS = range(8, 18)  # of a sweep: below, a request takes much less than the target
WITHIN = 0.1
FIELDS = {"weight_dtype": "fp32", "batch_size": 4, "prompt_tokens": 16, "output_tokens": 8}


class Measuring:
    """Levels of one endpoint, each measured as the search measures it."""

    def __init__(self, job: Job, spec: BenchmarkSpec, endpoint: OwnEndpoint, key: str) -> None:
        self._job, self._spec, self._endpoint, self._key = job, spec, endpoint, key

    def report(self, first: int, seconds: float, max_points: int) -> LoadReport:
        search = LoadSearch(targets={FIGURE: seconds}, highest=HIGHEST, max_points=max_points)
        arrivals = ClosedLoop(concurrency=(first,))
        load = self._spec.load.model_copy(update={"arrivals": arrivals, "search": search})
        sweep = Sweep(self._job, self._spec, load)
        sweep.key = self._key
        return asyncio.run(sweep.run(self._endpoint))

    def row(self, level: int, seconds: float) -> LoadRow:
        return self.report(level, seconds, max_points=1).rows[0]

    def sweep(self, seconds: float) -> list[LoadRow]:
        rows = [self.row(each, seconds) for each in LEVELS]
        taken = {f"{row.point:g}": round(row.measured[FIGURE] / seconds, 3) for row in rows}
        sys.stderr.write(f"of the target {seconds:.3g} s: {taken}\n")
        return rows


def limit_of(rows: Iterable[LoadRow]) -> float:
    """Return the level that agrees with most verdicts: met up to it, missed above it."""
    known = [(row.point, row.is_met) for row in rows]
    agreeing = {
        level: sum(is_met == (point <= level) for point, is_met in known) for level, _ in known
    }
    most = max(agreeing.values())
    return statistics.median(level for level, count in agreeing.items() if count == most)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_search_finds_the_limit_of_the_own_engine_as_a_sweep_over_every_level_does(
    host, trained_model
):
    search = LoadSearch(targets={FIGURE: 60.0}, highest=HIGHEST)
    arrivals = ClosedLoop(concurrency=(HIGHEST,))
    load = LoadOptions(arrivals=arrivals, requests_per_repetition=48, search=search)
    spec = BenchmarkSpec(model=trained_model, load=load, **FIELDS)
    sweeps: list[float] = []
    reports: list[LoadReport] = []

    def work(job: Job) -> None:
        key = Sweep(job, spec, load).key
        with own_endpoint(job, serve_spec_of(spec, load, key)) as endpoint:
            measuring = Measuring(job, spec, endpoint, key)
            seconds = statistics.median(
                measuring.row(GOAL, 60.0).measured[FIGURE] for _ in range(3)
            )
            sweeps.append(limit_of(measuring.sweep(seconds)))
            reports.append(measuring.report(4, seconds, MAX_POINTS))
            sweeps.append(limit_of(measuring.sweep(seconds)))

    host.run_here("own-limit", spec, work)

    (report,) = reports
    tried = [(row.point, row.repetitions // load.repetitions, row.is_met) for row in report.rows]
    said = f"sweeps {sweeps}, search {report.limit}, levels {tried}"
    sys.stderr.write(f"{said}\n")
    assert sum(times for _, times, _ in tried) <= MAX_POINTS, said
    assert report.limit.ending == "found", said
    if max(sweeps) > (1 + WITHIN) * min(sweeps):
        pytest.skip(f"other programs disturb this machine, its sweeps disagree: {said}")
    low, high = (1 - WITHIN) * min(sweeps), (1 + WITHIN) * max(sweeps)
    assert low <= report.limit.met <= high, said
