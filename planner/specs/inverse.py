"""Inverse questions: the limit of one quantity instead of the cost of a plan."""

from typing import Literal

from planner.specs.base import SparseSpec
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate, Interval
from planner.specs.plan import PlanRequest

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
