"""Load on an endpoint: requests at a rate, their latencies and figures."""

import asyncio
import contextlib
import json
import math
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import BinaryIO, NamedTuple, NoReturn

from runners.jobs.corpus import TokenIds
from runners.jobs.evaluation import text_ids
from runners.jobs.events import EVENT_FD_VARIABLE, Stages
from runners.jobs.loading import load_tokenizer
from runners.jobs.model_files import opened_model
from runners.jobs.ratios import die_as
from runners.jobs.runtime import (
    HOST_DIR_VARIABLE,
    BadInputError,
    Job,
    MissingModelError,
    publish_report,
)
from runners.jobspec import ArtefactModel, BenchmarkSpec, FolderModel, ServeSpec
from runners.jobspec.compress import (
    DISTRIBUTED,
    LIMIT_FIGURES,
    LOAD_ARTEFACT,
    MEANS,
    PERCENTILES,
    ClosedLoop,
    LoadLimit,
    LoadOptions,
    LoadReport,
    LoadRow,
    LoadSearch,
    OpenLoop,
)
from runners.jobspec.serve import key_hash
from runners.shared.load_generator import (
    Prompt,
    Repetition,
    RequestOutcome,
    Target,
    generator_lag_warnings,
    new_client,
    overload_warnings,
    percentile,
    repetition,
    sample_size_warnings,
    send_request,
    short_answer_warnings,
    values_of,
)
from runners.shared.load_search import (
    LevelSearch,
    excess_of,
    limit_of,
    limit_words,
    missed_targets,
)
from runners.shared.messages import EndpointBody, MetricPoint
from runners.shared.timing import (
    BENCHMARKED_ENDPOINT_START_SECONDS,
    BENCHMARKED_ENDPOINT_STOP_SECONDS,
)

# ---------------------------------------------------------------------------
# A report row from client timings: means with intervals, percentiles, caveats.
# ---------------------------------------------------------------------------


# Quantiles for an 80 % interval: Student's t with 1, 2 ... 10 degrees of freedom, and the normal.
STUDENT_80 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372)
NORMAL_80 = 1.282
MAX_HALF_WIDTH_RATIO = 0.2  # half-width relative to the mean
FIGURE_WORDS = {
    "tokens_per_second": "tokens a second",
    "requests_per_second": "requests a second",
    "ttft_seconds": "time to first token",
    "tpot_seconds": "time per token",
    "latency_seconds": "whole answer",
}


def row_of(
    options: LoadOptions, point: float, repetitions: Sequence[Repetition], output_tokens: int
) -> LoadRow:
    """Return one point's row from its repetitions."""
    answered = [each for one in repetitions for each in one.answered]
    means = [_means(each) for each in repetitions]
    names = [name for name in means[0] if all(name in each for each in means)]
    measured = {name: statistics.fmean(each[name] for each in means) for name in names}
    interval = {name: _interval([each[name] for each in means]) for name in names}
    measured |= _percentiles(answered)
    known = {name: ends for name, ends in interval.items() if ends is not None}
    spread = {name: known[name] for name in known if name in FIGURE_WORDS}
    known |= _percentile_intervals(repetitions)
    errors = Counter(each.error for each in answered if each.error)
    return LoadRow(
        point=point,
        requests=len(answered),
        failed=errors.total(),
        repetitions=len(repetitions),
        duration_seconds=sum(each.seconds for each in repetitions),
        measured=measured,
        interval=known,
        errors=dict(errors),
        notes=tuple(
            chain(
                _failure_warnings(answered),
                sample_size_warnings(answered),
                _spread_warnings(measured, spread, len(repetitions)),
                generator_lag_warnings(repetitions, measured.get("ttft_seconds", 0.0)),
                short_answer_warnings(answered, output_tokens),
                _overload_warnings(options, point, measured),
                _edge_effect_warnings(options, point),
            )
        ),
    )


# Figures


def _means(repetition: Repetition) -> dict[str, float]:
    """Return a repetition's means under the planner's names, without unmeasured ones."""
    complete = [each for each in repetition.answered if not each.error]
    seconds = max(repetition.seconds, 1e-9)
    figures = {
        "tokens_per_second": sum(each.output_tokens for each in complete) / seconds,
        "requests_per_second": len(complete) / seconds,
    }
    means = {f"{name}_seconds": values_of(complete, name) for name in DISTRIBUTED}
    return figures | {name: statistics.fmean(values) for name, values in means.items() if values}


class RepetitionFigures(NamedTuple):
    """The means and percentiles of one repetition, and its failed requests."""

    measured: dict[str, float]
    failed: int


def figures_of(repetition: Repetition) -> RepetitionFigures:
    """Return the figures of one repetition."""
    failed = sum(bool(each.error) for each in repetition.answered)
    return RepetitionFigures(_means(repetition) | _percentiles(repetition.answered), failed)


def _percentiles(answered: Sequence[RequestOutcome]) -> dict[str, float]:
    return {
        f"{name}_p{percent}_seconds": percentile(values, percent)
        for name in DISTRIBUTED
        if (values := values_of(answered, name))
        for percent in PERCENTILES
    }


def _percentile_intervals(repetitions: Sequence[Repetition]) -> dict[str, tuple[float, float]]:
    """Return the 80 % interval of each percentile over the repetitions."""
    by_repetition = [_percentiles(one.answered) for one in repetitions]
    names = [
        name
        for name in by_repetition[0]
        if all(name in percentiles for percentiles in by_repetition)
    ]
    ends = {
        name: _interval([percentiles[name] for percentiles in by_repetition]) for name in names
    }
    return {name: interval for name, interval in ends.items() if interval is not None}


def _interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 80 % interval of the mean over repetitions, or None for a single one."""
    freedom = len(values) - 1
    if freedom < 1:
        return None
    factor = STUDENT_80[freedom - 1] if freedom <= len(STUDENT_80) else NORMAL_80
    half = factor * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


# Caveats


def _failure_warnings(answered: Sequence[RequestOutcome]) -> Iterable[str]:
    errors = Counter(each.error for each in answered if each.error)
    if errors:
        summary = ", ".join(f"{words} ({count})" for words, count in errors.most_common(3))
        share = f"{errors.total()} of {len(answered)} requests failed"
        yield f"{share}, and no figure has them: {summary}"


def _spread_warnings(
    measured: dict[str, float], interval: dict[str, tuple[float, float]], count: int
) -> Iterable[str]:
    if count == 1:
        yield "one repetition has no interval"
    wide = [
        name
        for name, (low, high) in interval.items()
        if high - low > 2 * MAX_HALF_WIDTH_RATIO * abs(measured[name])
    ]
    if wide:
        summary = ", ".join(FIGURE_WORDS[name] for name in wide)
        yield f"repetitions differ by more than {MAX_HALF_WIDTH_RATIO:.0%} in {summary}"


def _overload_warnings(
    options: LoadOptions, point: float, measured: dict[str, float]
) -> Iterable[str]:
    if options.arrivals.kind == "open":
        yield from overload_warnings(measured["requests_per_second"], point)


def _edge_effect_warnings(options: LoadOptions, point: float) -> Iterable[str]:
    if options.arrivals.kind == "closed" and options.requests_at(point) < 2 * point:
        yield "fewer than two requests a client: the start and the end weigh in it"


# ---------------------------------------------------------------------------
# Runs a load benchmark, from the endpoint's start to the report.
# ---------------------------------------------------------------------------


# Runs the endpoint under load: a serving job as a child process on the loopback.


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
        limit = BENCHMARKED_ENDPOINT_START_SECONDS
        if not self._has_reported.wait(limit):
            self.kill()
            raise TimeoutError(f"the endpoint did not come up within {limit:g} s")
        if self.address is None:
            self.die_with_it("the endpoint to be measured did not come up")
        return self.address

    def stop(self) -> None:
        """Terminate it and wait for its result."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(BENCHMARKED_ENDPOINT_STOP_SECONDS)
        self.kill()
        self._reader.join(BENCHMARKED_ENDPOINT_STOP_SECONDS)

    def kill(self) -> None:
        """Kill it if it still runs."""
        if self.is_alive():
            self._process.kill()
        self._process.wait()

    def die_with_it(self, why: str) -> NoReturn:
        """Print the reason and end this process with the endpoint's signal or exit code."""
        # Its pipe closes shortly before it ends.
        code = self._process.wait(BENCHMARKED_ENDPOINT_STOP_SECONDS)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        sys.stderr.write(f"ENDPOINT_ENDED: {why}: it ended by {how}\n")
        self._job.emitter.close()
        die_as(code)

    def _read_events(self, pipe: BinaryIO) -> None:
        """Read its events until its end; its metrics become the job's."""
        with pipe:
            for line in pipe:
                event = json.loads(line)
                kind, body = event["kind"], event["body"]
                if kind == "endpoint":
                    self.address = EndpointBody.model_validate(body)
                    self._has_reported.set()
                elif kind == "metric":
                    point = MetricPoint.model_validate(body)
                    self._job.emitter.metric(point.values, source=point.source)
                elif kind == "result":
                    self.measured = body["measured"]
        self._has_reported.set()


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
SEARCHING = "Searching for the highest load"
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
    job.emitter.result(main.measured | own | _limit_figure(report), _notes(report, main))


OWN_FIGURES = ("peak_memory_bytes",)


def _limit_figure(report: LoadReport) -> dict[str, float]:
    """Return the highest level that met a search's targets under the planner's name, if any."""
    limit = report.limit
    if limit is None or limit.met is None:
        return {}
    return {LIMIT_FIGURES[report.arrivals]: limit.met}


def serve_spec_of(spec: BenchmarkSpec, options: LoadOptions, key: str) -> ServeSpec:
    """Return the endpoint's spec, with capacity for the largest number of concurrent requests.

    Its ``key`` exists only in this process, so that no other client affects the figures.
    """
    places, longest = options.places(spec.batch_size), spec.prompt_tokens + spec.output_tokens
    step = {"max_batch_tokens": spec.max_batch_tokens} if spec.max_batch_tokens else {}
    return ServeSpec(
        **step,
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
    """Measures every point in turn against one endpoint, or those that a search chooses."""

    def __init__(self, job: Job, spec: BenchmarkSpec, options: LoadOptions) -> None:
        self.job = job
        self.spec = spec
        self.options = options
        self.text = _held_out_ids(job, spec)
        self.key = secrets.token_urlsafe(32)
        points = {self._name(point): SHARE_POINT for point in options.arrivals.points}
        if options.search:
            points = {SEARCHING: SHARE_POINT * options.search.max_points}
        shares = {LOADING: SHARE_LOADING, WARMING: SHARE_WARMING, **points}
        self.has_answers = False
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
        limit: LoadLimit | None = None
        if self.options.search:
            rows, limit = await self._search(endpoint, target, self.options.search)
        else:
            rows = [await self._given(endpoint, target, p) for p in self.options.arrivals.points]
        return LoadReport(
            arrivals=self.options.arrivals.kind,
            prompt_tokens=self.spec.prompt_tokens,
            output_tokens=self.spec.output_tokens,
            places=self.options.places(self.spec.batch_size),
            seed=self.spec.seed,
            rows=tuple(rows),
            limit=limit,
        )

    async def _warm_up(self, endpoint: OwnEndpoint, target: Target) -> None:
        count = self.options.warm_up_requests
        if count:
            arrivals = ClosedLoop(concurrency=(min(count, self.spec.batch_size),))
            options = self.options.model_copy(update={"arrivals": arrivals})
            await self._repetition(endpoint, target, options, arrivals.points[0], count)

    async def _given(self, endpoint: OwnEndpoint, target: Target, point: float) -> LoadRow:
        self.stages.begin(self._name(point))
        return await self._point(endpoint, target, point, [], self.stages.advance)

    async def _search(
        self, endpoint: OwnEndpoint, target: Target, options: LoadSearch
    ) -> tuple[list[LoadRow], LoadLimit]:
        """Return the rows of the levels that a search measured, rising, and its limit."""
        arrivals, began = self.options.arrivals, time.monotonic()
        search = LevelSearch(
            arrivals.points[0],
            highest=options.highest,
            is_whole=isinstance(arrivals, ClosedLoop),
            max_points=options.max_points,
        )
        repetitions: dict[float, list[Repetition]] = {}
        rows: dict[float, LoadRow] = {}
        self.stages.begin(SEARCHING)

        def advance(share: float) -> None:
            self.stages.advance((search.num_points + share) / options.max_points)

        while (level := search.next_level()) is not None:
            left = options.max_seconds - (time.monotonic() - began)
            if rows and _expected_seconds(self.options, level, rows.values()) > left:
                break
            self.job.emitter.phase(self._name(level))
            known = repetitions.setdefault(level, [])
            row = await self._point(endpoint, target, level, known, advance)
            figures = [figures_of(each) for each in known]
            is_met = search.record(level, [excess_of(options.targets, *each) for each in figures])
            notes = missed_targets(options.targets, [each.measured for each in figures])
            rows[level] = row.model_copy(update={"is_met": is_met, "notes": (*row.notes, *notes)})
        self.stages.advance(1.0)
        return [rows[each] for each in sorted(rows)], limit_of(search, options.targets)

    async def _point(
        self,
        endpoint: OwnEndpoint,
        target: Target,
        point: float,
        repetitions: list[Repetition],
        advance: Callable[[float], None],
    ) -> LoadRow:
        """Return the row of a point's earlier ``repetitions`` and of new ones, which are added."""
        first = len(repetitions) + 1
        for at in range(first, first + self.options.repetitions):
            count = self.options.requests_at(point)
            seed = f"{self.spec.seed}/{point:g}/{at}"
            repetitions.append(
                await self._repetition(endpoint, target, self.options, point, count, seed)
            )
            advance((at - first + 1) / self.options.repetitions)
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
        may_fail = self.options.search is not None and self.has_answers  # it misses the targets
        if all(each.error for each in result.answered) and not may_fail:
            first = result.answered[0].error
            raise BadInputError(f"the endpoint answered none of {count} requests: {first}")
        self.has_answers = True
        return result

    def _prompts(self, count: int, seed: str) -> Sequence[Prompt]:
        """Return random excerpts of the held-out text, of equal length, drawn with the seed."""
        length = self.spec.prompt_tokens
        source = random.Random(seed)  # noqa: S311 - the same prompts again, no secret
        last = len(self.text) - length
        begins = [source.randrange(last) for _ in range(count)]
        return [self.text[begin : begin + length].tolist() for begin in begins]


def _expected_seconds(options: LoadOptions, level: float, rows: Collection[LoadRow]) -> float:
    """Return how long a level takes, at the speed of the nearest level that was measured."""
    nearest = min(rows, key=lambda row: abs(math.log(row.point / level)))
    count = options.requests_at(level) * options.repetitions
    seconds = count * nearest.duration_seconds / nearest.requests
    if isinstance(options.arrivals, OpenLoop):
        return max(seconds, count / level)
    return seconds


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
        msg = "the model has no tokenizer.json, which a load test needs; choose another model"
        raise MissingModelError(msg)
    ids = text_ids(job, tokenizer)
    if len(ids) <= spec.prompt_tokens:
        msg = (
            f"prompt_tokens is {spec.prompt_tokens}, but the host's own text has only "
            f"{len(ids)} tokens; choose a smaller prompt_tokens"
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
    found = {LIMIT_FIGURES[report.arrivals]: limit_words(report)} if report.limit else {}
    return {**dict.fromkeys(names, how), **found, **({"load": beware} if beware else {})}
