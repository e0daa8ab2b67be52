"""Specs of compress, benchmark and load jobs."""

import math
from typing import Annotated, Literal, NamedTuple, Self, get_args

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

from planner.specs.base import PRUNING_METHODS
from runners.jobspec.base import (
    NAME_LENGTH,
    ArtefactModel,
    Figure,
    FolderModel,
    HostText,
    ModelRef,
    NamedText,
    Repository,
    ResumableDocument,
    RevisionText,
    RunDocument,
)

# ---------------------------------------------------------------------------
# Compression options: the method and its settings.
# ---------------------------------------------------------------------------


# Options of Sheared LLaMA pruning: target shape and training steps.


HIDDEN_MULTIPLE, CHANNEL_MULTIPLE = 16, 32  # widths that suit kernels and quantisation groups


class Shape(NamedTuple):
    """The shape of a dense model; ``key_value_heads`` includes their query heads."""

    layers: int
    hidden_size: int
    key_value_heads: int
    intermediate_size: int

    def size(self, dimension: str) -> int:
        """Return the size of a mask dimension."""
        return self[("layers", "hidden", "heads", "channels").index(dimension)]

    def without(self, share: float) -> "Shape":
        """Return the shape with about ``share`` of the weights removed, evenly by dimension.

        Depth, hidden size and inner widths are each scaled by ``(1 - share) ** (1/3)``.
        """
        ratio = (1.0 - share) ** (1 / 3)
        return Shape(
            max(1, round(self.layers * ratio)),
            _rounded(self.hidden_size, ratio, HIDDEN_MULTIPLE),
            max(1, round(self.key_value_heads * ratio)),
            _rounded(self.intermediate_size, ratio, CHANNEL_MULTIPLE),
        )


class Shear(BaseModel):
    """Target sizes, which override the even shape of ``sparsity``, and training steps.

    Masks and weights are trained together first; then the pruned model is trained further, with
    domains sampled by how far their loss is above the original's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: PositiveInt | None = None
    hidden_size: PositiveInt | None = None
    key_value_heads: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    mask_steps: PositiveInt = Field(default=80, le=1_000_000)
    recovery_steps: PositiveInt = Field(default=160, le=1_000_000)
    learning_rate: float = Field(default=5e-4, gt=0.0, le=0.1)

    def target(self, full: Shape, share: float) -> Shape:
        """Return the shape to prune to."""
        even = full.without(share)
        return Shape(
            self.layers or even.layers,
            self.hidden_size or even.hidden_size,
            self.key_value_heads or even.key_value_heads,
            self.intermediate_size or even.intermediate_size,
        )


def _rounded(size: int, ratio: float, multiple: int) -> int:
    multiple = min(multiple, size)
    return max(multiple, round(size * ratio / multiple) * multiple)


# Compression options: the method and its settings.


WeightDtype = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4"]
QUANTISED_DTYPES: tuple[WeightDtype, ...] = ("int8", "fp8", "int4")
NF4_BLOCK = 64  # weights per scale, fixed by bitsandbytes
NF4_BITS = 4
JobCompressMethod = Literal[
    "bf16", "int8", "int8_dynamic", "fp8", "nf4", "rtn", "gptq", "quantease", "awq",
    "smoothquant", "fptq", "norm_tweaking", "finequant", "magnitude", "wanda", "sparsegpt",
    "autoround", "llm_pruner", "sheared_llama", "qmoe", "gguf",
]  # fmt: skip
# Q4_K_M and Q5_K_M are llama.cpp's mixtures.
GgufType = Literal["F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0"]
# torchao and bitsandbytes, the whole model at once
LIBRARY_DTYPES: dict[str, WeightDtype] = {
    "bf16": "bf16",
    "int8": "int8",
    "int8_dynamic": "int8",
    "fp8": "fp8",
    "nf4": "int4",
}
STRUCTURAL_METHODS = ("llm_pruner", "sheared_llama")  # need the gradients of the whole model
TERNARY_METHODS = ("qmoe",)  # experts alone
SELF_SIZED_METHODS = ("finequant",)  # group size per matrix, at least the given one
ROW_METHODS = ("smoothquant",)  # one scale per row, independent of the group size
FOLDING_METHODS = ("awq", "smoothquant", "fptq")  # scales are folded into the preceding norms
INT8_INPUT_METHODS = (
    "smoothquant",
    "fptq",
    "int8_dynamic",
)  # each token's activations round to 8 bits
# Their result does not depend on a text; Sheared LLaMA trains on the domains of the host's own.
WITHOUT_CALIBRATION = frozenset(
    {*LIBRARY_DTYPES, "rtn", "finequant", "magnitude", "gguf", "sheared_llama"}
)
ROW_BITS = 8
PATTERN_BLOCK = 4  # of 2:4: two of four adjacent weights of a row are kept


class CompressOptions(BaseModel):
    """The settings of a compression, without model and seed.

    ``bits`` and ``group_size`` apply to methods that quantise, ``sparsity`` and ``pattern`` to
    pruning. QuantEase keeps ``outlier_share`` of the weights in 16 bits; SmoothQuant moves the
    share ``smoothing`` of the activations' range into the weights; norm tweaking makes
    ``tweak_passes`` passes over the text; AutoRound takes ``rounding_steps`` steps in each layer;
    FineQuant halves a matrix's groups while that reduces its error by ``least_gain``.
    """

    method: JobCompressMethod = "int8"
    bits: Literal[2, 3, 4, 8] = 4
    group_size: PositiveInt = NF4_BLOCK  # fixed for nf4: another size is noted and ignored
    is_act_ordered: bool = False  # GPTQ: columns of large inputs first
    damping: float = Field(default=0.01, gt=0.0, le=1.0)  # of the Hessian's mean diagonal
    outlier_share: float = Field(default=0.0, ge=0.0, le=0.1)
    smoothing: float = Field(default=0.5, ge=0.0, le=1.0)
    tweak_passes: PositiveInt = Field(default=4, le=100)
    tweak_learning_rate: float = Field(default=1e-3, gt=0.0, le=0.1)
    rounding_steps: PositiveInt = Field(default=200, le=10_000)
    least_gain: float = Field(default=0.15, gt=0.0, lt=1.0)
    gguf_type: GgufType = "Q8_0"
    shear: Shear = Shear()
    sparsity: float = Field(default=0.5, gt=0.0, lt=1.0)
    pattern: Literal["unstructured", "2:4"] = "unstructured"
    recovery_steps: NonNegativeInt = Field(
        default=0, le=100_000
    )  # of a LoRA that is merged afterwards
    calibration_tokens: PositiveInt = Field(default=16_384, le=10_000_000)
    evaluation_tokens: PositiveInt = 8192

    @property
    def is_layerwise(self) -> bool:
        """Return whether the built-in engine compresses the model layer by layer."""
        others = (self.is_structural, self.is_exported, self.is_ternary)
        return self.method not in LIBRARY_DTYPES and not any(others)

    @property
    def is_exported(self) -> bool:
        """Return whether the result is one GGUF file."""
        return self.method == "gguf"

    @property
    def is_ternary(self) -> bool:
        """Return whether experts become ternary weights in an entropy code."""
        return self.method in TERNARY_METHODS

    @property
    def is_structural(self) -> bool:
        """Return whether whole heads and channels are removed, which yields a smaller model."""
        return self.method in STRUCTURAL_METHODS

    @property
    def has_codes(self) -> bool:
        """Return whether weights become integer codes with scales."""
        return self.is_layerwise and self.method not in PRUNING_METHODS

    @property
    def has_groups(self) -> bool:
        """Return whether groups of ``group_size`` weights share a scale."""
        return self.has_codes and self.method not in ROW_METHODS

    @property
    def row_divisor(self) -> int:
        """Return the required divisor of a matrix's row length."""
        if self.has_groups:
            return 1 if self.method in SELF_SIZED_METHODS else self.group_size
        return PATTERN_BLOCK if self.pattern == "2:4" else 1

    @property
    def is_packed(self) -> bool:
        """Return whether the weights are stored as codes."""
        return self.has_codes and not self.outlier_share

    @property
    def code_bits(self) -> int:
        """Return the bits per code."""
        return ROW_BITS if self.method in ROW_METHODS else self.bits

    @property
    def rounds_inputs(self) -> bool:
        """Return whether activations are also rounded to 8 bits per token."""
        return self.method in INT8_INPUT_METHODS

    @property
    def weight_dtype(self) -> WeightDtype:
        """Return the weight dtype for loading the result."""
        if self.is_ternary:
            return "int4"
        if self.is_packed:
            return "int8" if self.code_bits > NF4_BITS else "int4"
        return LIBRARY_DTYPES.get(self.method, "bf16")

    @property
    def held_dtype(self) -> WeightDtype:
        """Return the weight dtype in memory: packed codes are unpacked when loaded."""
        return "bf16" if self.is_layerwise or self.is_ternary else self.weight_dtype

    @property
    def predictable_phases(self) -> tuple[tuple[str, WeightDtype], ...]:
        """Return prefixes and dtypes of the measured phases that the planner can predict.

        It cannot predict models with fewer heads, or with activations rounded by the reader.
        """
        original: tuple[str, WeightDtype] = ("original_", "bf16")
        if self.is_structural or self.rounds_inputs:
            return (original,)
        return (original, ("", self.held_dtype))

    @property
    def title(self) -> str:
        """Return a short method name for a model's title."""
        if self.is_structural:
            return f"{self.method} {self.sparsity:.0%}"
        if self.is_ternary:
            return "QMoE, ternary experts"
        if self.is_exported:
            return f"GGUF {self.gguf_type}"
        inputs = ", 8 bit activations" if self.rounds_inputs else ""
        if not self.is_layerwise:
            return f"{self.weight_dtype}{inputs}"
        if self.has_codes:
            return f"{self.method} {self.code_bits} bit{inputs}"
        share = "2:4" if self.pattern == "2:4" else f"{self.sparsity:.0%}"
        return f"{self.method} {share}"

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings that the method reads, for a model card."""
        if self.method in LIBRARY_DTYPES:
            return {}
        if self.is_exported:
            return {"gguf_type": self.gguf_type}
        values: dict[str, object] = {"calibration_tokens": self.calibration_tokens}
        if self.is_ternary:
            return {"calibration_tokens": str(self.calibration_tokens)}
        if self.has_codes:
            values |= {"bits": self.code_bits}
            values |= {"group_size": self.group_size} if self.has_groups else {}
        elif self.is_structural:
            values |= {"sparsity": self.sparsity, "recovery_steps": self.recovery_steps}
            if self.method == "sheared_llama":
                values = {"sparsity": self.sparsity, **self.shear.model_dump(exclude_none=True)}
        else:
            values |= {"pattern": self.pattern}
            values |= {"sparsity": self.sparsity} if self.pattern == "unstructured" else {}
        values |= {shown: getattr(self, name) for shown, name in READ_BY.get(self.method, ())}
        if self.outlier_share:
            values |= {"outlier_share": self.outlier_share}
        return {name: str(value) for name, value in values.items()}


# method -> its specific settings, by their names on a model card
READ_BY = {
    "gptq": (("act_order", "is_act_ordered"), ("damping", "damping")),
    "smoothquant": (("smoothing", "smoothing"),),
    "norm_tweaking": (
        ("damping", "damping"),
        ("tweak_passes", "tweak_passes"),
        ("tweak_learning_rate", "tweak_learning_rate"),
    ),
    "autoround": (("rounding_steps", "rounding_steps"),),
    "finequant": (("least_gain", "least_gain"),),
}


# ---------------------------------------------------------------------------
# Specs and reports of the jobs that measure: benchmark, evaluate, prove, drill; and compress.
# ---------------------------------------------------------------------------


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
            raise ValueError(
                f"the points of a sweep are {listed}; give each once, in increasing order"
            )
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

# A mean or a percentile of a request's time to its first token, per token or to its end.
LatencyName = Annotated[
    str, StringConstraints(pattern=r"^(ttft|tpot|latency)(_p(50|90|95|99))?_seconds$")
]
# A search's levels are measured long enough for a steady state.
REQUESTS_PER_CLIENT = 4  # a repetition of a closed loop
OPEN_LOOP_SECONDS = 10.0  # a repetition of an open loop


class LoadSearch(BaseModel):
    """A search for the highest load that meets latency targets; it begins at the arrivals' point.

    ``targets``: the longest seconds of measured figures, such as ``ttft_p95_seconds``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    targets: dict[LatencyName, PositiveFloat] = Field(min_length=1, max_length=8)
    highest: PositiveFloat = Field(le=10_000.0)  # no level lies above it
    max_points: int = Field(default=MAX_POINTS, ge=1, le=MAX_POINTS)  # levels, and repeated ones
    max_seconds: PositiveFloat = 3600.0  # no level begins that is expected to end later


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
    search: LoadSearch | None = None

    @model_validator(mode="after")
    def _search_has_one_first_level(self) -> Self:
        if self.search is None:
            return self
        first, *others = self.arrivals.points
        if others or isinstance(self.arrivals, Burst) or first > self.search.highest:
            msg = (
                "a search begins at one number of clients or one rate, up to its highest; give "
                "one point, or leave search out"
            )
            raise ValueError(msg)
        return self

    @property
    def highest(self) -> float:
        """Return the highest point that may be measured."""
        return self.search.highest if self.search else self.arrivals.points[-1]

    def requests_at(self, point: float) -> int:
        """Return the number of requests per repetition of a point."""
        if isinstance(self.arrivals, Burst):
            return round(point)
        if isinstance(self.arrivals, ClosedLoop):
            each = REQUESTS_PER_CLIENT if self.search else 1
            return max(self.requests_per_repetition, each * round(point))
        lasting = math.ceil(OPEN_LOOP_SECONDS * point) if self.search else 0
        return max(self.requests_per_repetition, lasting)

    def main_point(self, concurrency: int) -> float:
        """Return the sweep's main point: the plan's concurrency if present, else the last."""
        points = self.arrivals.points
        has_plans = isinstance(self.arrivals, ClosedLoop) and concurrency in points
        return float(concurrency) if has_plans else points[-1]

    def places(self, at_least: int) -> int:
        """Return the endpoint's concurrency limit: at least the largest point."""
        if isinstance(self.arrivals, OpenLoop):
            return at_least
        return max(at_least, round(self.highest))


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

    names: tuple[TaskName, ...] = Field(
        default=(), max_length=64, description="Left out: all of the folder"
    )
    folder: Annotated[str, StringConstraints(min_length=1, max_length=1000)] | None = Field(
        default=None, description="On the host; left out: tasks on its held-out text"
    )
    documents: PositiveInt | None = Field(
        default=None, le=1_000_000, description="Of a task at most; left out: all"
    )


# Specs of the smaller job kinds: compress, evaluate, benchmark, drill, prove.


class CompressSpec(CompressOptions, ResumableDocument):
    """Compress a model's linear weights; report size, perplexity and speed before and after."""

    kind: Literal["compress"] = "compress"
    model: ModelRef
    calibration_data: NamedText = HostText()
    prompt_tokens: PositiveInt = 128
    output_tokens: PositiveInt = 32
    seed: int = 17

    @model_validator(mode="after")
    def _calibration_is_read(self) -> Self:
        if self.method in WITHOUT_CALIBRATION and not isinstance(self.calibration_data, HostText):
            msg = (
                f"method is {self.method}, which calibrates on no data set; leave "
                "calibration_data out, or choose a method that does, such as gptq or awq"
            )
            raise ValueError(msg)
        return self


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
    max_batch_tokens: PositiveInt | None = None  # of that endpoint's steps; None: as usual
    profile: bool = False  # report the time per operator

    @model_validator(mode="after")
    def _profiles_no_endpoint(self) -> Self:
        if self.load is not None and self.profile:
            msg = "profile and load exclude each other; leave profile out, or leave load out"
            raise ValueError(msg)
        if self.load is None and self.max_batch_tokens is not None:
            msg = (
                f"max_batch_tokens is {self.max_batch_tokens}, and only the endpoint of a load "
                "test has steps; leave it out, or give load"
            )
            raise ValueError(msg)
        return self


class EvaluateSpec(RunDocument):
    """Evaluate a model on held-out text and ``tasks``, optionally compared with ``original``."""

    kind: Literal["evaluate"] = "evaluate"
    model: ModelRef
    weight_dtype: WeightDtype = "bf16"
    original: ModelRef | None = None
    text: NamedText = HostText()  # of a data set all tokens, prompts too
    evaluation_tokens: PositiveInt = 8192
    tasks: EvaluationTasks | None = None
    seed: int = 17


LONGEST_CARD = 64_000  # characters


class PublishSpec(RunDocument):
    """Push a model's folder, with a card as its README.md, to a repository of the Hub.

    ``card``: Markdown with the Hub's YAML before it. The token is the secret ``HF_TOKEN``.
    """

    kind: Literal["publish"] = "publish"
    model: Annotated[ArtefactModel | FolderModel, Field(discriminator="source")]
    repository: Repository
    revision: RevisionText = ""  # branch; "": main
    is_private: bool = True  # of a repository that the job makes
    card: str = Field(min_length=1, max_length=LONGEST_CARD)


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


# The stages of a validation, in their order.
StageName = Literal["identity", "rates", "correctness", "speed", "jobs", "distributed"]
STAGES: tuple[StageName, ...] = get_args(StageName)


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
    name: str = Field(max_length=NAME_LENGTH)
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
    is_met: bool | None = None  # whether it meets a search's targets; None in a sweep


# How a search ended: its bracket is narrow enough, no higher or lower level exists, or its budget
# is spent.
SearchEnding = Literal["found", "highest", "lowest", "points", "seconds"]
# Arrivals -> the planner's name of the highest load that meets the targets.
LIMIT_FIGURES = {"closed": "slo_max_concurrency", "open": "slo_max_requests_per_second"}


class LoadLimit(BaseModel):
    """What a search found: the limit lies from ``met`` up to ``missed``.

    ``met``: the highest level that meets the targets, None if none does. ``missed``: the lowest
    level above it that misses them, None if none does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    targets: dict[LatencyName, PositiveFloat]  # longest seconds of each figure
    met: FiniteFloat | None
    missed: FiniteFloat | None
    ending: SearchEnding


class LoadReport(BaseModel):
    """A whole sweep, or a search with its limit; rows have rising points."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arrivals: ArrivalKind
    prompt_tokens: PositiveInt
    output_tokens: PositiveInt
    places: PositiveInt  # the endpoint's concurrency limit
    seed: int
    rows: tuple[LoadRow, ...] = Field(min_length=1, max_length=64)
    limit: LoadLimit | None = None

    @model_validator(mode="after")
    def _no_burst_is_searched(self) -> Self:
        if self.limit is not None and self.arrivals not in LIMIT_FIGURES:
            msg = "the limit is of a search, and bursts are not searched; leave limit out"
            raise ValueError(msg)
        return self


# The phases and steps that a job's figures are measured in, for jobs and pages.
#
# Loading, warm-up, evaluation and saving before and after are not part of any figure.


FIRST_STEPS_SKIPPED = 2  # they include allocation and kernel selection
TRAINING = "Training"  # phase of a training
EVALUATING = "Evaluating between steps"  # another, within it
MEASURING = "Measuring speed and perplexity"  # phase of a benchmark
JUDGING = "Reading held-out text"  # phase of an evaluation
ORIGINAL = "Measuring the original"  # phases of a compression
COMPRESSING = "Compressing and saving"
SAVED = "Measuring the saved model"
ORIGINAL_PREFIX = "original_"  # before the names of figures of the uncompressed model
