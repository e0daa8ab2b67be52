"""Runs a load benchmark, from the endpoint's start to the report."""

import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO, NoReturn

from runners.jobs.artefacts import publish_report
from runners.jobs.corpus import TokenIds
from runners.jobs.evaluation import text_ids
from runners.jobs.events import EVENT_FD_VARIABLE, Stages
from runners.jobs.load.client import Target, new_client, send_request
from runners.jobs.load.figures import Prompt, Repetition, repetition, row_of
from runners.jobs.loading import load_tokenizer
from runners.jobs.model_files import opened_model
from runners.jobs.ratios import die_as
from runners.jobs.runtime import HOST_DIR_VARIABLE, BadInputError, Job, MissingModelError
from runners.jobspec import START_SECONDS, ArtefactModel, BenchmarkSpec, FolderModel, ServeSpec
from runners.jobspec.benchmark import (
    LOAD_ARTEFACT,
    MEANS,
    ClosedLoop,
    LoadOptions,
    LoadReport,
    LoadRow,
)
from runners.jobspec.serve import key_hash
from runners.messages import EndpointBody, MetricPoint

# Runs the endpoint under load: a serving job as a child process on the loopback.


STOP_SECONDS = 60.0
LOST_SECONDS = 180.0  # an endpoint whose job has ended stops by itself


class OwnEndpoint:
    """One endpoint process and its reported events."""

    def __init__(self, job: Job, spec: ServeSpec) -> None:
        self._job = job
        self.measured: dict[str, float] = {}
        self.address: EndpointBody | None = None
        self._has_reported = threading.Event()  # its address arrived, or its event stream ended
        self._process, pipe = _start_process(job, spec)
        self._reader = threading.Thread(target=self._read_events, args=(pipe,), daemon=True)
        self._reader.start()

    def is_alive(self) -> bool:
        """Return whether its process runs."""
        return self._process.poll() is None

    def wait_until_ready(self) -> EndpointBody:
        """Return its address; if it fails to start, end this process in the same way.

        Raises:
            TimeoutError: the endpoint neither became ready nor ended.
        """
        if not self._has_reported.wait(START_SECONDS):
            self.kill()
            raise TimeoutError(f"the endpoint did not come up within {START_SECONDS:g} s")
        if self.address is None:
            self.die_with_it("the endpoint to be measured did not come up")
        return self.address

    def stop(self) -> None:
        """Terminate it and wait for its result."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()
        self._reader.join(STOP_SECONDS)

    def kill(self) -> None:
        """Kill it if it still runs."""
        if self.is_alive():
            self._process.kill()
        self._process.wait()

    def die_with_it(self, why: str) -> NoReturn:
        """Print the reason and end this process with the endpoint's signal or exit code."""
        code = self._process.wait(STOP_SECONDS)  # its pipe closes shortly before it ends
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        sys.stderr.write(f"ENDPOINT_ENDED: {why}: it ended by {how}\n")
        self._job.emitter.close()
        die_as(code)

    def _read_events(self, pipe: BinaryIO) -> None:
        """Read its events until its end; its metrics become the job's."""
        with pipe:
            for line in pipe:
                event = json.loads(line)
                self._handle_event(event["kind"], event["body"])
        self._has_reported.set()

    def _handle_event(self, kind: str, body: dict[str, Any]) -> None:
        if kind == "endpoint":
            self.address = EndpointBody.model_validate(body)
            self._has_reported.set()
        elif kind == "metric":
            point = MetricPoint.model_validate(body)
            self._job.emitter.metric(point.values, source=point.source)
        elif kind == "result":
            self.measured = body["measured"]


@contextlib.contextmanager
def own_endpoint(job: Job, spec: ServeSpec) -> Iterator[OwnEndpoint]:
    """Run an endpoint while the block runs, and kill it afterwards."""
    endpoint = OwnEndpoint(job, spec)
    try:
        yield endpoint
    finally:
        endpoint.kill()


def _start_process(job: Job, spec: ServeSpec) -> tuple[subprocess.Popen[bytes], BinaryIO]:
    folder = job.scratch_dir() / "endpoint"
    folder.mkdir(exist_ok=True)
    spec = spec.model_copy(update={"idle_stop_seconds": LOST_SECONDS})
    request = job.request.model_copy(update={"spec": spec})
    (folder / "spec.json").write_text(request.model_dump_json())
    read_fd, write_fd = os.pipe()
    variables = {EVENT_FD_VARIABLE: str(write_fd), HOST_DIR_VARIABLE: str(job.host_dir)}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "runners.jobs.serve", str(folder)],
            env=os.environ | variables,
            pass_fds=[write_fd],
            stdin=subprocess.DEVNULL,
        )
    finally:
        os.close(write_fd)
    return process, os.fdopen(read_fd, "rb")


LOADING = "Starting the endpoint"
WARMING = "Warming up"
SHARE_LOADING, SHARE_WARMING, SHARE_POINT = 2.0, 0.5, 2.0
WORDS = {  # plural, singular
    "closed": ("clients", "client"),
    "open": ("requests a second", "request a second"),
    "burst": ("requests at once", "request"),
}


def measure_under_load(job: Job, spec: BenchmarkSpec, options: LoadOptions) -> None:
    """Start an endpoint of the model, sweep over the points, and publish report and result."""
    sweep = Sweep(job, spec, options)
    with own_endpoint(job, serve_spec_of(spec, options, sweep.key)) as endpoint:
        report = asyncio.run(sweep.run(endpoint))
        endpoint.stop()
    publish_report(job, LOAD_ARTEFACT, report.model_dump(mode="json"))
    point = options.main_point(spec.batch_size)
    main = next(row for row in report.rows if row.point == point)
    own = {name: endpoint.measured[name] for name in OWN_FIGURES if name in endpoint.measured}
    job.emitter.result(main.measured | own, _notes(report, main))


OWN_FIGURES = ("peak_memory_bytes",)


def serve_spec_of(spec: BenchmarkSpec, options: LoadOptions, key: str) -> ServeSpec:
    """Return the endpoint's spec, with capacity for the largest number of concurrent requests.

    Its ``key`` exists only in this process, so that no other client affects the figures.
    """
    places, longest = options.places(spec.batch_size), spec.prompt_tokens + spec.output_tokens
    return ServeSpec(
        model=spec.model,
        weight_dtype=spec.weight_dtype,
        max_concurrency=places,
        queue_limit=100_000,
        key_hashes=(key_hash(key),),
        max_length=longest,
        kv_cache_tokens=places * longest,
        seed=spec.seed,
    )


class Sweep:
    """Measures every point in turn against one endpoint."""

    def __init__(self, job: Job, spec: BenchmarkSpec, options: LoadOptions) -> None:
        self.job = job
        self.spec = spec
        self.options = options
        self.text = _held_out_ids(job, spec)
        self.key = secrets.token_urlsafe(32)
        points = {self._name(point): SHARE_POINT for point in options.arrivals.points}
        shares = {LOADING: SHARE_LOADING, WARMING: SHARE_WARMING, **points}
        self.stages = Stages(job.emitter, shares)

    def _name(self, point: float) -> str:
        words = WORDS[self.options.arrivals.kind][point == 1]
        return f"Under load: {point:g} {words}"

    async def run(self, endpoint: OwnEndpoint) -> LoadReport:
        """Return the rows of all points; if the endpoint ends, end this process likewise."""
        self.stages.begin(LOADING)
        address = endpoint.wait_until_ready()
        target = Target(
            f"http://{address.host}:{address.port}/v1",
            address.model,
            self.spec.output_tokens,
            self.options.request_timeout_seconds,
            self.key,
        )
        self.stages.begin(WARMING)
        await self._warm_up(endpoint, target)
        rows = [await self._point(endpoint, target, each) for each in self.options.arrivals.points]
        return LoadReport(
            arrivals=self.options.arrivals.kind,
            prompt_tokens=self.spec.prompt_tokens,
            output_tokens=self.spec.output_tokens,
            places=self.options.places(self.spec.batch_size),
            seed=self.spec.seed,
            rows=tuple(rows),
        )

    async def _warm_up(self, endpoint: OwnEndpoint, target: Target) -> None:
        count = self.options.warm_up_requests
        if count:
            arrivals = ClosedLoop(concurrency=(min(count, self.spec.batch_size),))
            options = self.options.model_copy(update={"arrivals": arrivals})
            await self._repetition(endpoint, target, options, arrivals.points[0], count)

    async def _point(self, endpoint: OwnEndpoint, target: Target, point: float) -> LoadRow:
        self.stages.begin(self._name(point))
        repetitions: list[Repetition] = []
        for at in range(1, self.options.repetitions + 1):
            count = self.options.requests_at(point)
            seed = f"{self.spec.seed}/{point:g}/{at}"
            repetitions.append(
                await self._repetition(endpoint, target, self.options, point, count, seed)
            )
            self.stages.advance(at / self.options.repetitions)
        row = row_of(self.options, point, repetitions, self.spec.output_tokens)
        rate, failed = row.measured["tokens_per_second"], row.failed
        summary = f"{row.requests} requests, {failed} failed, {rate:.1f} tokens/s"
        self.job.emitter.log(f"{self._name(point)}: {summary}")
        return row

    async def _repetition(
        self,
        endpoint: OwnEndpoint,
        target: Target,
        options: LoadOptions,
        point: float,
        count: int,
        seed: str = "warm-up",
    ) -> Repetition:
        prompts = self._prompts(count, seed)
        async with new_client() as client:
            result = await repetition(
                options.arrivals,
                point,
                prompts,
                partial(send_request, client, target),
                endpoint.is_alive,
                seed,
            )
        if not endpoint.is_alive():
            endpoint.die_with_it(_endpoint_ended_message(result))
        if all(each.error for each in result.answered):
            first = result.answered[0].error
            raise BadInputError(f"the endpoint answered none of {count} requests: {first}")
        return result

    def _prompts(self, count: int, seed: str) -> Sequence[Prompt]:
        """Return random excerpts of the held-out text, of equal length, drawn with the seed."""
        length = self.spec.prompt_tokens
        source = random.Random(seed)  # noqa: S311 - the same prompts again, no secret
        last = len(self.text) - length
        begins = [source.randrange(last) for _ in range(count)]
        return [self.text[begin : begin + length].tolist() for begin in begins]


def _held_out_ids(job: Job, spec: BenchmarkSpec) -> TokenIds:
    """Return the held-out text as tokens of the model.

    Raises:
        MissingModelError: the model has no tokenizer.
        BadInputError: the text is shorter than one prompt.
    """
    model, tokenizer = spec.model, None
    if isinstance(model, FolderModel | ArtefactModel):
        tokenizer = load_tokenizer(opened_model(model, job.host_dir))
    if tokenizer is None:
        msg = "the model has no tokenizer.json, which load on an endpoint needs; choose another"
        raise MissingModelError(msg)
    ids = text_ids(job, tokenizer)
    if len(ids) <= spec.prompt_tokens:
        msg = (
            f"prompt_tokens is {spec.prompt_tokens}, but the host's own text has only "
            f"{len(ids)} tokens; ask with shorter prompts"
        )
        raise BadInputError(msg)
    return ids


def _endpoint_ended_message(repetition_result: Repetition) -> str:
    """Return a message with the clients' errors when the endpoint ended."""
    cut = [each for each in repetition_result.answered if each.error]
    words = ", ".join(sorted({each.error for each in cut})) or "no error reported"
    took = max((each.last for each in cut), default=0.0) - min((c.last for c in cut), default=0.0)
    return (
        f"the endpoint ended under load; each of {len(cut)} clients got an error ({words}), the "
        f"last {took:.1f} s after the first"
    )


def _notes(report: LoadReport, main: LoadRow) -> dict[str, str]:
    kind = WORDS[report.arrivals][main.point == 1]
    how = (
        f"mean over {main.requests} requests with {main.point:g} {kind}, {report.prompt_tokens} "
        f"prompt and {report.output_tokens} output tokens, from when each was due"
    )
    names = [name for name in main.measured if name in MEANS]
    beware = "; ".join(main.notes)
    return {**dict.fromkeys(names, how), **({"load": beware} if beware else {})}
