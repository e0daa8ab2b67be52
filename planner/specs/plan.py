"""A search over strategies, and inverse questions: requests and responses."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt

from planner.specs.base import JsonObject, SparseSpec
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate, HostCalibration, Interval
from planner.specs.model import ModelSpec
from planner.specs.strategy import Strategy
from planner.specs.workload import ServeWorkload, Workload

# The constraint of a rejection without numbers: a technique does not apply.
APPLICABILITY = "applicability"
Objective = Literal["throughput", "latency", "cost", "energy", "memory", "quality", "balanced"]
Purpose = Literal["fit", "target"]
# Only memory and weight quality decide whether a plan fits; all other limits are targets.
FIT_LIMITS = frozenset({"per_device_peak_bytes", "quality_loss_ratio"})


class Bound(SparseSpec):
    """A lower and an upper limit on one figure of an estimate."""

    min: float | None = None
    max: float | None = None


class PlanRequest(SparseSpec):
    """A request for the best strategy for a workload, model and hardware."""

    id: str | int | None = None
    model: str | ModelSpec | dict[str, Any] = Field(union_mode="left_to_right")
    cluster: ClusterSpec
    workload: Workload
    engine: str | None = None
    objective: Objective = "balanced"
    constraints: dict[str, Bound] = Field(default_factory=dict)
    pins: Strategy = Field(default_factory=Strategy)
    top: Annotated[int, Field(ge=1, le=100)] = 5
    hardware_options: tuple[ClusterSpec, ...] = ()
    host_calibration: HostCalibration | None = None

    def without_targets(self) -> "PlanRequest":
        """Return the request without performance targets, only limits on fit."""
        limits = {name: bound for name, bound in self.constraints.items() if name in FIT_LIMITS}
        workload = self.workload
        if isinstance(workload, ServeWorkload):
            no_target = {"ttft_slo_seconds": None, "tpot_slo_seconds": None}
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
    """The reason for a rejected family: the binding constraint with its numbers."""

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


class Searched(SparseSpec):
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
    searched: Searched
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
    """The failure one step beyond a limit: the value, and the limit that it violates."""

    value: int | float | str
    reason: str
    constraint: str
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
