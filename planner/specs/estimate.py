"""Requests and responses: the cost of one strategy, a search over many, inverse questions."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from pydantic.fields import FieldInfo

from planner.specs.base import JsonObject, OperatorClass, SparseSpec
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec, NamedModel
from planner.specs.on_policy import JobPin
from planner.specs.workload import ServeWorkload, Strategy, Workload

# Predicted and measured figures, and the calibration factors computed from them.


class Measurement(SparseSpec):
    """One figure that a job measured, with the figure that the plan predicted."""

    metric: str
    predicted: PositiveFloat
    measured: PositiveFloat
    operator_class: OperatorClass
    host: str
    measured_at: str | None = None
    job: str | None = None


class CalibrationFactor(SparseSpec):
    """A multiplier for the times of one operator class, with its uncertainty.

    ``spread`` is the standard deviation of the remaining log ratios after the factor is applied.
    """

    factor: PositiveFloat
    n: PositiveInt
    spread: NonNegativeFloat


class HostCalibration(SparseSpec):
    """One host's factors by operator class; ``digest`` identifies the inputs."""

    host: str
    factors: dict[OperatorClass, CalibrationFactor] = Field(default_factory=dict)
    digest: str = ""


Interval = tuple[float, float]
ProvenanceKind = Literal["measured", "published", "modelled"]
ErrorClass = Literal["calibrated on this host", "same family", "datasheet only"]


class EstimateRequest(SparseSpec):
    """A request for the cost of one strategy on given hardware.

    ``model`` is a catalog id, a Hugging Face ``config.json`` or the fields of a ``ModelSpec``.
    """

    id: str | int | None = None
    model: NamedModel
    cluster: ClusterSpec
    workload: Workload
    strategy: Strategy = Field(default_factory=Strategy)
    engine: str | None = None
    host_calibration: HostCalibration | None = None


class EquationInput(SparseSpec):
    """One input value of an equation."""

    symbol: str
    name: str
    value: float | int | str
    unit: str = ""


class Term(SparseSpec):
    """One line of the explanation: an equation with its inputs, result and source."""

    group: str
    key: str
    name: str
    equation: str
    inputs: tuple[EquationInput, ...] = ()
    value: float
    unit: str
    operator_class: OperatorClass | None = None
    provenance: ProvenanceKind = "modelled"
    source: str = ""


class MemoryAnswer(SparseSpec):
    """The peak memory of the fullest device, by tensor class.

    For a pipeline it has the layers per stage, and on mixed devices the capacity and device of
    each stage. For a compression it has the size of the result; ``disk_bytes`` also counts the
    original. ``reference_weights`` of a distillation are its teacher's.
    """

    per_device_peak_bytes: int = Field(description="Peak memory of the fullest device")
    capacity_bytes: int
    breakdown_bytes: dict[str, int]
    per_stage_peak_bytes: tuple[int, ...]
    per_stage_layers: tuple[int, ...] | None = None
    per_stage_capacity_bytes: tuple[int, ...] | None = None
    per_stage_devices: tuple[str, ...] | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    checkpoint_bytes: int | None = None


class Performance(SparseSpec):
    """Speed figures; figures that do not apply to the workload are absent.

    ``tokens_per_second`` counts generated tokens for serving and generation, and trained tokens
    for training. ``tpot_seconds`` is the mean time between tokens after the first one.
    Percentiles, the share of requests that meet the objectives and the maximum load that meets
    them are present only in explained estimates of serving.
    """

    tokens_per_second: float | None = Field(default=None, description="Tokens per second")
    output_tokens_per_second: float | None = Field(
        default=None, description="Generated tokens per second"
    )
    prefill_tokens_per_second: float | None = Field(
        default=None, description="Prompt tokens per second"
    )
    decode_tokens_per_second: float | None = Field(
        default=None, description="Generated tokens per second without prefill"
    )
    tokens_per_second_per_device: float | None = Field(
        default=None, description="Tokens per second of one device"
    )
    requests_per_second: float | None = Field(default=None, description="Requests per second")
    ttft_seconds: float | None = Field(default=None, description="Time to first token, mean")
    tpot_seconds: float | None = Field(
        default=None, description="Time per output token after the first, mean"
    )
    latency_seconds: float | None = Field(
        default=None, description="Time of a whole request, mean"
    )
    ttft_p50_seconds: float | None = Field(default=None, description="Time to first token, p50")
    ttft_p90_seconds: float | None = Field(default=None, description="Time to first token, p90")
    ttft_p95_seconds: float | None = Field(default=None, description="Time to first token, p95")
    ttft_p99_seconds: float | None = Field(default=None, description="Time to first token, p99")
    tpot_p50_seconds: float | None = Field(
        default=None, description="Time per output token, the mean ITL of a request, p50"
    )
    tpot_p90_seconds: float | None = Field(
        default=None, description="Time per output token, the mean ITL of a request, p90"
    )
    tpot_p95_seconds: float | None = Field(
        default=None, description="Time per output token, the mean ITL of a request, p95"
    )
    tpot_p99_seconds: float | None = Field(
        default=None, description="Time per output token, the mean ITL of a request, p99"
    )
    latency_p50_seconds: float | None = Field(
        default=None, description="Time of a whole request, p50"
    )
    latency_p90_seconds: float | None = Field(
        default=None, description="Time of a whole request, p90"
    )
    latency_p95_seconds: float | None = Field(
        default=None, description="Time of a whole request, p95"
    )
    latency_p99_seconds: float | None = Field(
        default=None, description="Time of a whole request, p99"
    )
    queue_seconds: float | None = Field(
        default=None, description="Wait of a request before its prefill, mean"
    )
    slo_attainment_ratio: float | None = Field(
        default=None, description="Share of the requests that meet the objectives"
    )
    slo_max_concurrency: int | None = Field(
        default=None, description="Most requests in flight that meet the objectives"
    )
    slo_max_requests_per_second: float | None = Field(
        default=None, description="Highest rate that meets the objectives"
    )
    max_requests_per_second: float | None = Field(
        default=None, description="Highest rate without a queue that grows"
    )
    prefill_seconds: float | None = Field(default=None, description="Time of a prefill")
    step_seconds: float | None = Field(default=None, description="Time of one step")
    duration_seconds: float | None = Field(default=None, description="Time of the run")
    trained_tokens: float | None = Field(default=None, description="Tokens of the run")
    samples_per_second: float | None = Field(default=None, description="Sequences per second")
    model_flops_per_second_per_device: float | None = Field(
        default=None, description="FLOP per second of the model on one device"
    )
    mfu: float | None = Field(
        default=None, description="Share of the device's peak FLOP per second that the model uses"
    )
    max_concurrency: int | None = Field(
        default=None, description="Most requests that memory holds at once"
    )
    bubble_ratio: float | None = Field(
        default=None, description="Share of a step in which pipeline stages wait"
    )
    communication_ratio: float | None = Field(
        default=None, description="Share of a step for communication that nothing hides"
    )
    rollout_idle_ratio: float | None = Field(
        default=None,
        description="Share of a step in which devices that generate completions wait",
    )
    trainer_idle_ratio: float | None = Field(
        default=None,
        description="Share of a step in which the other devices, which train, wait",
    )


class Quality(SparseSpec):
    """The quality loss of the compressed model, each figure as (low, expected, high).

    ``perplexity_ratio`` is relative to the uncompressed baseline (higher is worse).
    ``score_ratio`` is the ratio of task scores (lower is worse), used if no perplexity table
    exists.
    """

    perplexity_ratio: tuple[float, float, float] | None = None
    score_ratio: tuple[float, float, float] | None = None
    evidence: tuple[str, ...] = ()

    @property
    def as_score(self) -> tuple[float, float, float] | None:
        """Return the loss as a score ratio; a perplexity ratio is inverted."""
        if self.perplexity_ratio is None:
            return self.score_ratio
        low, middle, high = self.perplexity_ratio
        return 1 / high, 1 / middle, 1 / low

    @property
    def losses(self) -> tuple[str, tuple[float, ...]]:
        """Return the measure of the loss, and the relative loss (low, expected, high) in it.

        A loss of perplexity is no loss of task scores: the two are not compared.
        """
        if self.perplexity_ratio is not None:
            return "perplexity", tuple(ratio - 1 for ratio in self.perplexity_ratio)
        return "task scores", tuple(1 - ratio for ratio in reversed(self.score_ratio or ()))

    @property
    def loss_ratio(self) -> float | None:
        """Return the expected relative loss, or None if no table has it."""
        if self.perplexity_ratio is not None:
            return self.perplexity_ratio[1] - 1
        return None if self.score_ratio is None else 1 - self.score_ratio[1]


class Reliability(SparseSpec):
    """What failures cost a training over many device hours; intervals are of 80 %.

    ``checkpoint_seconds`` is how long a checkpoint stops the steps, ``checkpoint_write_seconds``
    how long storage takes for it. ``goodput_ratio`` is the share of the wall time in which
    training moves on: the rest goes to checkpoints, restarts and steps that are computed again.
    """

    mean_time_between_failures_seconds: float = Field(
        description="Mean time between failures of the job, on all its devices"
    )
    expected_failures: float = Field(description="Failures during the run, mean")
    checkpoint_bytes: int = Field(description="Weights and optimiser states of a checkpoint")
    checkpoint_seconds: float = Field(description="How long a checkpoint stops the steps")
    checkpoint_write_seconds: float = Field(description="Time to write a checkpoint")
    restart_seconds: float = Field(description="From a failure to the next step")
    checkpoint_interval_seconds: float = Field(
        description="Training time between checkpoints that loses least"
    )
    checkpoint_interval_steps: PositiveInt = Field(
        description="Steps between checkpoints that lose least"
    )
    goodput_ratio: float = Field(description="Share of the wall time in which training moves on")
    goodput_interval: Interval
    wall_seconds: float = Field(description="Time of the run with its failures")
    wall_interval: Interval


class Estimate(SparseSpec):
    """The cost of one strategy, explained.

    ``interval`` holds an 80 % interval per figure. ``time_breakdown_seconds`` holds the seconds of
    one pass by operator class, for each phase (prefill, decode, train_step, compress). ``terms``
    is the record that explanations, equations and tests read.
    """

    id: str | int | None = None
    fits: bool
    memory: MemoryAnswer
    performance: Performance
    interval: dict[str, Interval]
    error_class: ErrorClass
    bound_by: str
    time_breakdown_seconds: dict[str, dict[str, float]] = Field(default_factory=dict)
    quality: Quality | None = None
    reliability: Reliability | None = None
    energy_joules_per_token: float | None = Field(default=None, description="Energy of a token")
    cost_usd_per_million_tokens: float | None = Field(
        default=None, description="Price of a million tokens"
    )
    carbon_grams_per_million_tokens: float | None = Field(
        default=None, description="CO2 of a million tokens"
    )
    electricity_usd_per_million_tokens: float | None = Field(
        default=None, description="Price of the electricity of a million tokens"
    )
    run_energy_joules: float | None = Field(default=None, description="Energy of the run")
    run_cost_usd: float | None = Field(default=None, description="Price of the run")
    run_carbon_grams: float | None = Field(default=None, description="CO2 of the run")
    run_electricity_usd: float | None = Field(
        default=None, description="Price of the run's electricity"
    )
    strategy: Strategy
    engine: str
    warnings: tuple[str, ...] = ()
    calibration: str
    terms: tuple[Term, ...] = Field(default=(), repr=False)


# A search over strategies, and inverse questions: requests and responses.


# The figures that a constraint may limit, each with its words.
OWN_FIGURES: Mapping[str, FieldInfo] = {
    "per_device_peak_bytes": MemoryAnswer.model_fields["per_device_peak_bytes"],
    "quality_loss_ratio": FieldInfo(
        annotation=float,
        default=None,
        description="Share of the quality that compression is expected to lose",
    ),
    **{
        name: info
        for name, info in Estimate.model_fields.items()
        if name.startswith(("energy_", "cost_", "carbon_", "electricity_", "run_"))
    },
}
FIGURES: Mapping[str, FieldInfo] = {**Performance.model_fields, **OWN_FIGURES}
# The constraint of a rejection without numbers: a technique does not apply.
APPLICABILITY = "applicability"
MEMORY = "memory"
Objective = Literal["throughput", "latency", "cost", "energy", "memory", "quality", "balanced"]
Purpose = Literal["fit", "target"]
# Only memory and weight quality decide whether a plan fits; all other limits are targets.
FIT_LIMITS = frozenset({"per_device_peak_bytes", "quality_loss_ratio"})


class UnknownFigureError(ValueError):
    """A limit is on a figure that no estimate has."""


def _figure(name: str) -> str:
    if name not in FIGURES:
        raise UnknownFigureError("there is no such figure")
    return name


FigureName = Annotated[str, AfterValidator(_figure)]


class Bound(SparseSpec):
    """Limits on one figure of an estimate, in its unit."""

    min: float | None = Field(default=None, description="Smallest allowed value")
    max: float | None = Field(default=None, description="Largest allowed value")


SERVICE_TARGETS = ("ttft_slo_seconds", "tpot_slo_seconds", "request_rate_per_second")


class PlanRequest(SparseSpec):
    """A request for the best strategy for a workload, model and hardware."""

    id: str | int | None = Field(
        default=None, description="Name of the request, which the answer repeats"
    )
    model: NamedModel = Field(
        description="Catalog id, a Hugging Face config.json, or the fields of a model"
    )
    repository: str | None = Field(
        default=None,
        max_length=512,
        description="Repository of the Hub with the model's weights, as owner/name, where the "
        "model is a config.json or the weights are elsewhere than in the catalog's; no figure "
        "depends on it",
    )
    cluster: ClusterSpec = Field(description="Hardware to plan for")
    workload: Workload = Field(description="The work, by its kind")
    engine: str | None = Field(
        default=None,
        description="Engine to plan for, also with its version as 'vllm 0.12.0': vllm, sglang, "
        "tensorrt_llm, llama_cpp, ik_llama_cpp, ktransformers, exllamav2, flexgen or gpt_fast to "
        "serve; torch, trl, torchtitan, megatron, deepspeed, nemo, llm_foundry or litgpt to "
        "train; auto compares those that sites run",
    )
    objective: Objective = Field(default="balanced", description="What plans are ranked by")
    constraints: dict[FigureName, Bound] = Field(
        default_factory=dict, description="Limits on figures of the answer, by the figure's name"
    )
    pins: Strategy = Field(
        default_factory=Strategy, description="Parts of the strategy that are fixed"
    )
    job_pins: tuple[JobPin, ...] = Field(
        default=(),
        max_length=1,
        description="Which of the pins nobody stated, as they are what jobs of the host do; "
        "no figure depends on it",
    )
    top: Annotated[int, Field(ge=1, le=100)] = Field(
        default=5, description="How many plans to return"
    )
    hardware_options: tuple[ClusterSpec, ...] = Field(
        default=(), description="Hardware to choose among, in place of the cluster"
    )
    host_calibration: HostCalibration | None = Field(
        default=None, description="Factors that a host's measurements gave"
    )

    @property
    def named_model(self) -> str | ModelSpec | dict[str, Any]:
        """Return the model, a config.json with its repository as its name."""
        if self.repository and isinstance(self.model, dict):
            # Other tools name a repository of ModelScope without a scheme.
            return {**self.model, "_name_or_path": self.repository.removeprefix("ms://")}
        return self.model

    def estimate_request(self, cluster: ClusterSpec, strategy: Strategy) -> EstimateRequest:
        """Return the request that costs one strategy on a cluster."""
        return EstimateRequest(
            id=self.id,
            model=self.named_model,
            cluster=cluster,
            workload=self.workload,
            strategy=strategy,
            engine=self.engine,
            host_calibration=self.host_calibration,
        )

    def without_targets(self) -> "PlanRequest":
        """Return the request without performance targets, only limits on fit.

        Without the target of its arrival rate, a service takes the load that memory allows.
        """
        limits = {name: bound for name, bound in self.constraints.items() if name in FIT_LIMITS}
        workload = self.workload
        if isinstance(workload, ServeWorkload):
            no_target = dict.fromkeys(SERVICE_TARGETS)
            workload = workload.model_copy(update=no_target)
        return self.model_copy(update={"constraints": limits, "workload": workload})


class PlannedStrategy(Estimate):
    """An estimate in a search result, with the reasons for it.

    ``tier`` is the deployment tier, a key of the technique registry. ``advice`` lists the rules of
    thumb that the figures contradict.
    """

    rank: NonNegativeInt = 0
    cluster: ClusterSpec
    reasons: tuple[str, ...] = ()
    techniques: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    tier: str | None = None
    advice: tuple[str, ...] = ()


class Rejection(SparseSpec):
    """Why a strategy family was rejected: the binding constraint with its numbers."""

    family: str
    constraint: str
    reason: str
    required: float | None = None
    limit: float | None = None
    unit: str = ""
    strategies: NonNegativeInt = 1


class Suggestion(SparseSpec):
    """A small change that makes a request feasible, verified by an estimate.

    Purpose ``fit``: nothing fits without the change; targets are ignored. Purpose ``target``: with
    the change a plan also meets the request's limits.
    """

    title: str
    changes: JsonObject
    estimate: Estimate
    purpose: Purpose = "fit"


class SearchStats(SparseSpec):
    """The number of searched strategies, and the time taken."""

    strategies: NonNegativeInt
    seconds: float


class PlanAnswer(SparseSpec):
    """The ranked plans, the frontier, the rejections and the suggestions.

    ``request`` repeats the request, so that an answer can be exported by itself.
    """

    id: str | int | None = None
    request: PlanRequest | None = None
    plans: tuple[PlannedStrategy, ...]
    pareto: tuple[PlannedStrategy, ...]
    rejected: dict[str, Rejection]
    suggestions: tuple[Suggestion, ...]
    searched: SearchStats
    calibration: str


# Inverse questions: the limit of one quantity instead of the cost of a plan.


InverseQuestion = Literal[
    "longest_context",
    "largest_batch",
    "most_users",
    "longest_sequence",
    "largest_model",
    "fewest_devices",
    "cheapest_instance",
]


class InverseRequest(PlanRequest):
    """A plan request with the quantity to maximise; that field is only a starting value."""

    question: InverseQuestion


class FirstFailure(SparseSpec):
    """The failure one step beyond a limit: the value, and the limit that it violates.

    Of all strategies it is that of the one nearest to a plan, whose ``family`` is named: one that
    fits and misses a target is nearer than one that does not fit.
    """

    value: int | float | str
    reason: str
    constraint: str
    family: str = ""
    required: float | None = None
    limit: float | None = None
    unit: str = ""


class Limit(SparseSpec):
    """The last working value of a quantity with its estimate, and the failure beyond it.

    ``beyond`` is absent if there is no further value, such as after the largest model of the
    catalog. ``interval`` is the 80 % interval of a value that is limited by memory or time.
    """

    value: int | float | str
    unit: str
    name: str = ""
    interval: Interval | None = None
    cluster: ClusterSpec
    estimate: Estimate
    beyond: FirstFailure | None = None


class InverseAnswer(SparseSpec):
    """The limits found, best first; empty if not even the smallest value works.

    Only ``largest_model`` has several limits: one for each weight format.
    """

    id: str | int | None = None
    question: InverseQuestion
    limits: tuple[Limit, ...]
    smallest: FirstFailure | None = None
    searches: int
    seconds: float
    calibration: str
