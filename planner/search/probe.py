"""Searches for single values of an inverse question, with the reasons for failures."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from planner.errors import PlannerError
from planner.search.engine import best_with_cluster, explore
from planner.search.rejection import distance
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate, EstimateRequest
from planner.specs.inverse import FirstFailure, Limit
from planner.specs.plan import PlanRequest, Rejection
from planner.specs.strategy import Strategy
from planner.workload.estimator import estimate_request

Answer = tuple[Estimate, ClusterSpec, PlanRequest]


@dataclass
class Probe:
    """Cached searches for single values; ``yes`` and ``no`` hold the results per value."""

    yes: dict[float | str, Answer] = field(default_factory=dict)
    no: dict[float | str, FirstFailure] = field(default_factory=dict)

    @property
    def searches(self) -> int:
        """Return the number of searched values."""
        return len(self.yes) + len(self.no)

    def works(self, value: float | str, *requests: PlanRequest) -> bool:
        """Return whether any request with this value has a plan; cached per value."""
        if value not in self.yes and value not in self.no:
            self._search(value, requests)
        return value in self.yes

    def _search(self, value: float | str, requests: Sequence[PlanRequest]) -> None:
        for request in requests:
            try:
                exploration = explore(request)
            except PlannerError as error:
                constraint = error.field or error.code
                reason = FirstFailure(value=value, reason=error.message, constraint=constraint)
                self.no[value] = min(self.no.get(value, reason), reason, key=shortfall)
                continue
            best = best_with_cluster(request, exploration)
            if best is not None:
                self.yes[value] = (*best, request)
                self.no.pop(value, None)
                return
            missed = closest_miss(value, list(exploration.rejected.values()))
            self.no[value] = min(self.no.get(value, missed), missed, key=shortfall)

    def absorb(self, other: "Probe", cluster: ClusterSpec) -> None:
        """Merge another probe's results, keyed by value and cluster."""
        self.yes |= {f"{value} on {cluster}": answer for value, answer in other.yes.items()}
        self.no |= {f"{value} on {cluster}": refused for value, refused in other.no.items()}

    def limit(self, value: float | str, unit: str, beyond: float | str | None) -> Limit:
        """Return the limit at a feasible value, with the failure at the next value."""
        estimate, cluster, request = self.yes[value]
        refused = None if beyond is None else self.no.get(beyond)
        verified = in_full(request, cluster, estimate.strategy)
        return Limit(value=value, unit=unit, cluster=cluster, estimate=verified, beyond=refused)


def shortfall(beyond: FirstFailure) -> float:
    """Return the relative miss of a limit; infinite if no number decided."""
    if beyond.required is None or not beyond.limit:
        return math.inf
    return abs(beyond.required / beyond.limit - 1)


def in_full(request: PlanRequest, cluster: ClusterSpec, strategy: Strategy) -> Estimate:
    """Return the full estimate of a found strategy, without terms."""
    full_request = EstimateRequest(
        id=request.id,
        model=request.model,
        cluster=cluster,
        workload=request.workload,
        strategy=strategy,
        engine=request.engine,
        host_calibration=request.host_calibration,
    )
    return estimate_request(full_request).model_copy(update={"terms": ()})


def closest_miss(value: float | str, rejections: Sequence[Rejection]) -> FirstFailure:
    """Return the rejection with the smallest relative miss as a failure."""
    numbered = [rejection for rejection in rejections if rejection.required is not None]
    if not numbered:
        reasons = "; ".join(rejection.reason for rejection in rejections) or "no strategy applies"
        return FirstFailure(value=value, reason=reasons, constraint="applicability")
    closest = min(numbered, key=distance)
    return FirstFailure(
        value=value,
        reason=f"{closest.family}: {closest.reason}",
        constraint=closest.constraint,
        required=closest.required,
        limit=closest.limit,
        unit=closest.unit,
    )


def largest_step(works: Callable[[int], bool], top: int) -> int:
    """Return the largest number from 1 to ``top`` that works, 0 if 1 does not.

    Assumes that a number works if a larger one does. The search doubles and then bisects, so that
    a large ``top`` costs little.
    """
    works_at, fails_at = 0, 1
    while fails_at <= top and works(fails_at):
        works_at, fails_at = fails_at, fails_at * 2
    if fails_at > top:
        if works_at == top or works(top):
            return top
        fails_at = top
    while fails_at - works_at > 1:
        middle = (works_at + fails_at) // 2
        if works(middle):
            works_at = middle
        else:
            fails_at = middle
    return works_at
