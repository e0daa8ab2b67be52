"""A question turned around: not what a plan costs, but how much is possible."""

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
    """A plan request and what to find the limit of; that field of it is only a starting value."""

    question: InverseQuestion


class Beyond(SparseSpec):
    """One step further: what was tried there, and which limit it breaks by how much."""

    value: int | float | str
    reason: str
    constraint: str
    required: float | None = None
    limit: float | None = None
    unit: str = ""


class Limit(SparseSpec):
    """How far one thing goes: the last value that works with its estimate, and the one beyond.

    ``beyond`` is absent when nothing lies beyond, as with the largest model of the catalog.
    ``interval`` is the 80 % interval of a value that memory or a time ends.
    """

    value: int | float | str
    unit: str
    name: str = ""
    interval: Interval | None = None
    cluster: ClusterSpec
    estimate: Estimate
    beyond: Beyond | None = None


class InverseAnswer(SparseSpec):
    """The limits that were found, the best first; none when not even the smallest value works.

    Only ``largest_model`` has several: one for each format of the weights.
    """

    id: str | int | None = None
    question: InverseQuestion
    limits: tuple[Limit, ...]
    smallest: Beyond | None = None
    searches: int
    seconds: float
    calibration: str
