"""A search over strategies: the request and the answer."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt

from planner.specs.base import JsonObject, SparseSpec
from planner.specs.calibration import HostCalibration
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate
from planner.specs.model import ModelSpec
from planner.specs.strategy import Strategy
from planner.specs.workload import Workload

# The constraint of a rejection that no number decided: a technique does not apply.
APPLICABILITY = "applicability"
Objective = Literal["throughput", "latency", "cost", "energy", "memory", "quality", "balanced"]


class Bound(SparseSpec):
    """A lower and an upper limit on one figure of an estimate."""

    min: float | None = None
    max: float | None = None


class PlanRequest(SparseSpec):
    """One question: which strategy is best for this goal, model and hardware?"""

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


class PlannedStrategy(Estimate):
    """An estimate that the search offers, with the reasons for it.

    ``tier`` is where it runs, as a key of the technique registry; ``advice`` are the rules of
    thumb that its figures contradict.
    """

    rank: NonNegativeInt = 0
    cluster: ClusterSpec
    reasons: tuple[str, ...] = ()
    techniques: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    tier: str | None = None
    advice: tuple[str, ...] = ()


class Rejection(SparseSpec):
    """Why a family of strategies lost: the binding constraint with its numbers."""

    family: str
    constraint: str
    reason: str
    required: float | None = None
    limit: float | None = None
    unit: str = ""
    strategies: NonNegativeInt = 1


class Suggestion(SparseSpec):
    """A small change that makes an infeasible request fit, verified by an estimate."""

    title: str
    changes: JsonObject
    estimate: Estimate


class Searched(SparseSpec):
    """How much was looked at, in how long."""

    strategies: NonNegativeInt
    seconds: float


class PlanAnswer(SparseSpec):
    """The ranked plans, the frontier, what was rejected and what would help.

    ``request`` repeats the question, so that an answer can be exported by itself.
    """

    id: str | int | None = None
    request: PlanRequest | None = None
    plans: tuple[PlannedStrategy, ...]
    pareto: tuple[PlannedStrategy, ...]
    rejected: dict[str, Rejection]
    suggestions: tuple[Suggestion, ...]
    searched: Searched
    calibration: str
