"""Specs and reports of the jobs that measure: benchmark, evaluate, prove, drill; and compress."""

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)

from runners.jobspec.base import ModelRef, RunDocument
from runners.jobspec.compress import CompressOptions, WeightDtype
from runners.prove.report import STAGES, StageName
from runners.wire import Figure

# Load options of an endpoint benchmark: arrivals, repetitions, timeout.


MAX_POINTS = 12
Requests = Annotated[int, Field(ge=1, le=1024)]  # concurrent, each on its own connection
Rate = Annotated[float, Field(gt=0.0, le=10_000.0)]


class _Arrivals(BaseModel):
    """The base of the arrival kinds; the points of a sweep must increase."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def points(self) -> tuple[float, ...]:
        """Return the sweep's points."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _points_rise(self) -> Self:
        points = self.points
        if list(points) != sorted(set(points)):
            listed = ", ".join(f"{each:g}" for each in points)
            raise ValueError(f"the points of a sweep rise, each once; these are {listed}")
        return self


class ClosedLoop(_Arrivals):
    """A fixed number of clients; each sends its next request when the last one is answered."""

    kind: Literal["closed"] = "closed"
    concurrency: Annotated[tuple[Requests, ...], Field(min_length=1, max_length=MAX_POINTS)]

    @property
    def points(self) -> tuple[float, ...]:
        """Return the concurrencies."""
        return tuple(float(each) for each in self.concurrency)


class OpenLoop(_Arrivals):
    """Random arrivals at a mean rate, independent of the answers (Poisson process)."""

    kind: Literal["open"] = "open"
    request_rate_per_second: Annotated[
        tuple[Rate, ...], Field(min_length=1, max_length=MAX_POINTS)
    ]

    @property
    def points(self) -> tuple[float, ...]:
        """Return the rates."""
        return self.request_rate_per_second


class Burst(_Arrivals):
    """A number of requests at one instant, and none after them."""

    kind: Literal["burst"] = "burst"
    burst_requests: Annotated[tuple[Requests, ...], Field(min_length=1, max_length=MAX_POINTS)]

    @property
    def points(self) -> tuple[float, ...]:
        """Return the burst sizes."""
        return tuple(float(each) for each in self.burst_requests)


Arrivals = Annotated[ClosedLoop | OpenLoop | Burst, Field(discriminator="kind")]


class LoadOptions(BaseModel):
    """A load sweep against an endpoint that the job starts on its host's loopback.

    Each point is measured ``repetitions`` times, with prompts and arrivals of its own seed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    arrivals: Arrivals
    requests_per_repetition: PositiveInt = Field(default=32, le=100_000)  # ignored by bursts
    warm_up_requests: NonNegativeInt = Field(default=4, le=1000)  # sent once, not measured
    repetitions: PositiveInt = Field(default=3, le=20)
    request_timeout_seconds: PositiveFloat = Field(default=120.0, le=3600.0)

    def requests_at(self, point: float) -> int:
        """Return the number of requests per repetition of a point."""
        if isinstance(self.arrivals, Burst):
            return round(point)
        if isinstance(self.arrivals, ClosedLoop):
            return max(self.requests_per_repetition, round(point))
        return self.requests_per_repetition

    def main_point(self, concurrency: int) -> float:
        """Return the sweep's main point: the plan's concurrency if present, else the last."""
        points = self.arrivals.points
        has_plans = isinstance(self.arrivals, ClosedLoop) and concurrency in points
        return float(concurrency) if has_plans else points[-1]

    def places(self, at_least: int) -> int:
        """Return the endpoint's concurrency limit: at least the largest point."""
        if isinstance(self.arrivals, OpenLoop):
            return at_least
        return max(at_least, round(self.arrivals.points[-1]))


# Evaluation options: windows of held-out text and tasks of lm-evaluation-harness.


MAX_WINDOW = 512  # tokens per window; shorter for a model with fewer positions
TASKS_ENVIRONMENT = "lm_eval"  # the named environment with the harness
TaskName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]


def window_of(positions: int) -> tuple[int, int]:
    """Return a window's tokens and its scored tokens, which are its second half."""
    length = min(MAX_WINDOW, positions)
    return length, length // 2


class EvaluationTasks(BaseModel):
    """Tasks by name, from YAML files below ``folder`` or from the host's held-out text.

    Empty ``names`` selects all tasks. ``documents`` limits the documents per task.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: tuple[TaskName, ...] = Field(default=(), max_length=64)
    folder: Annotated[str, StringConstraints(min_length=1, max_length=1000)] | None = None
    documents: PositiveInt | None = Field(default=None, le=1_000_000)


# Specs of the smaller job kinds: compress, evaluate, benchmark, drill, prove.


class CompressSpec(CompressOptions, RunDocument):
    """Compress a model's linear weights; report size, perplexity and speed before and after."""

    kind: Literal["compress"] = "compress"
    model: ModelRef
    prompt_tokens: PositiveInt = 128
    output_tokens: PositiveInt = 32
    seed: int = 17


class BenchmarkSpec(RunDocument):
    """Measure prefill and decode speed, peak memory and perplexity of a model as planned."""

    kind: Literal["benchmark"] = "benchmark"
    model: ModelRef
    weight_dtype: WeightDtype = "bf16"
    batch_size: PositiveInt = 1
    prompt_tokens: PositiveInt = 128
    output_tokens: PositiveInt = 64
    repetitions: PositiveInt = 5
    evaluation_tokens: PositiveInt = 8192
    seed: int = 17
    load: LoadOptions | None = None  # measured from the clients of an endpoint
    profile: bool = False  # report the time per operator

    @model_validator(mode="after")
    def _profiles_no_endpoint(self) -> Self:
        if self.load is not None and self.profile:
            msg = "profile is of the model alone; leave it out, or run it without load"
            raise ValueError(msg)
        return self


class EvaluateSpec(RunDocument):
    """Evaluate a model on held-out text and ``tasks``, optionally compared with ``original``."""

    kind: Literal["evaluate"] = "evaluate"
    model: ModelRef
    weight_dtype: WeightDtype = "bf16"
    original: ModelRef | None = None
    evaluation_tokens: PositiveInt = 8192
    tasks: EvaluationTasks | None = None
    seed: int = 17


class DrillSpec(RunDocument):
    """Simulate a job without a model: short steps, some figures, and a chosen ending.

    A server runs drills only if its operator allowed them.
    """

    kind: Literal["drill"] = "drill"
    steps: PositiveInt = Field(default=20, le=100_000)
    step_seconds: NonNegativeFloat = Field(default=0.1, le=60.0)
    log_bytes_per_step: NonNegativeInt = Field(default=0, le=64 * 1024**2)
    memory_bytes: NonNegativeInt = Field(default=0, le=1024**4)  # allocated before the first step
    ending: Literal["well", "exit_code", "signal", "oom_gpu", "missing_model"] = "well"
    exit_code: int = Field(default=7, ge=1, le=255)
    signal_number: int = Field(default=11, ge=1, le=31)
    ignores_stop: bool = False
    daemons: NonNegativeInt = Field(default=0, le=64)  # left running; they ignore SIGTERM
    forks_per_second: NonNegativeInt = Field(default=0, le=1000)  # after a stop request


class ProveSpec(RunDocument):
    """Prove on a host that every path is real; the report is the job's artefact.

    ``minutes`` limits the whole run; ``is_small`` takes the smallest sizes, which prove only the
    code.
    """

    kind: Literal["prove"] = "prove"
    stages: tuple[StageName, ...] = Field(default=STAGES, min_length=1, max_length=len(STAGES))
    minutes: float = Field(default=10.0, gt=0, le=120.0)
    is_small: bool = False


# The report of a profiled benchmark: operators of a prefill and of a decode step.
#
# Times are self times; speed figures never come from a profiled pass.


OPERATORS_ARTEFACT = "operators"
MAX_ROWS = 60  # per phase; the remaining operators are summed in one row
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
Bound = Literal["compute", "memory_bandwidth", "overhead"]  # the planner's operator classes


class OperatorRow(BaseModel):
    """One operator with one set of shapes in one phase."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    phase: Phase
    name: str = Field(max_length=120)
    shapes: str = Field(max_length=240)  # of its inputs; empty for a sum of operators
    calls: PositiveInt
    seconds: NonNegativeFloat
    flops: NonNegativeFloat | None = None  # None: unknown for this operator
    bound: Bound


class ProfileReport(BaseModel):
    """The profile of one workload; a phase's rows cover its whole time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: PositiveInt
    prompt_tokens: PositiveInt
    decode_steps: PositiveInt
    slowdown_ratio: NonNegativeFloat  # time with the profiler over time without
    flops_per_second: NonNegativeFloat  # of a large matrix product, and
    bytes_per_second: NonNegativeFloat  # of a large copy: the device's limits for comparison
    rows: tuple[OperatorRow, ...] = Field(max_length=2 * MAX_ROWS + 2)

    def of(self, phase: Phase) -> list[OperatorRow]:
        """Return a phase's rows, longest first."""
        rows = [row for row in self.rows if row.phase == phase]
        return sorted(rows, key=lambda row: -row.seconds)

    def seconds_by_bound(self, phase: Phase) -> dict[Bound, float]:
        """Return a phase's seconds per bound, longest first."""
        seconds: dict[Bound, float] = {}
        for row in self.of(phase):
            seconds[row.bound] = seconds.get(row.bound, 0.0) + row.seconds
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))


# The report of a load benchmark: one row per point of the sweep.
#
# Figures have the planner's names and base units; ``interval`` is the 80 % confidence interval of
# a mean over the repetitions, the level of the planner's intervals.


LOAD_ARTEFACT = "load"
ArrivalKind = Literal["closed", "open", "burst"]
MEANS = ("tokens_per_second", "requests_per_second", "ttft_seconds", "tpot_seconds",
         "latency_seconds")  # fmt: skip
DISTRIBUTED = ("ttft", "tpot", "latency")
PERCENTILES = (50, 90, 95, 99)


class LoadRow(BaseModel):
    """One point of the sweep (concurrency, rate or burst size) and its measurements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    point: FiniteFloat
    requests: PositiveInt
    failed: NonNegativeInt
    repetitions: PositiveInt
    duration_seconds: FiniteFloat
    measured: dict[str, Figure]
    interval: dict[str, tuple[FiniteFloat, FiniteFloat]] = Field(default_factory=dict)
    errors: dict[str, NonNegativeInt] = Field(default_factory=dict)  # error text -> count
    notes: tuple[str, ...] = ()  # caveats of the row


class LoadReport(BaseModel):
    """A whole sweep."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arrivals: ArrivalKind
    prompt_tokens: PositiveInt
    output_tokens: PositiveInt
    places: PositiveInt  # the endpoint's concurrency limit
    seed: int
    rows: tuple[LoadRow, ...] = Field(min_length=1, max_length=64)


# The phases and steps that a job's figures are measured in, for jobs and pages.
#
# Loading, warm-up, evaluation and saving before and after are not part of any figure.


FIRST_STEPS_SKIPPED = 2  # they include allocation and kernel selection
TRAINING = "Training"  # phase of a training
MEASURING = "Measuring speed and perplexity"  # phase of a benchmark
JUDGING = "Reading held-out text"  # phase of an evaluation
ORIGINAL = "Measuring the original"  # phases of a compression
COMPRESSING = "Compressing and saving"
SAVED = "Measuring the saved model"
ORIGINAL_PREFIX = "original_"  # before the names of figures of the uncompressed model
