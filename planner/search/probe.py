"""Asks the search about one value of an inverse question, and keeps the reasons for its noes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from planner.errors import PlannerError
from planner.search.engine import best_with_cluster, explore
from planner.search.rejection import distance
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate, EstimateRequest
from planner.specs.inverse import Beyond, Limit
from planner.specs.plan import PlanRequest, Rejection
from planner.specs.strategy import Strategy
from planner.workload.estimator import estimate_request

Answer = tuple[Estimate, ClusterSpec, PlanRequest]


@dataclass
class Probe:
    """Searches for single values; ``yes`` and ``no`` have what each value came to."""

    yes: dict[float | str, Answer] = field(default_factory=dict)
    no: dict[float | str, Beyond] = field(default_factory=dict)

    @property
    def searches(self) -> int:
        """Return how many values were searched."""
        return len(self.yes) + len(self.no)

    def works(self, value: float | str, *requests: PlanRequest) -> bool:
        """Return whether any of the requests with this value has a plan; searched only once."""
        if value not in self.yes and value not in self.no:
            self._search(value, requests)
        return value in self.yes

    def _search(self, value: float | str, requests: Sequence[PlanRequest]) -> None:
        for request in requests:
            try:
                found = explore(request)
            except PlannerError as error:
                constraint = error.field or error.code
                reason = Beyond(value=value, reason=error.message, constraint=constraint)
                self.no[value] = min(self.no.get(value, reason), reason, key=shortfall)
                continue
            best = best_with_cluster(request, found)
            if best is not None:
                self.yes[value] = (*best, request)
                self.no.pop(value, None)
                return
            missed = closest_miss(value, list(found.rejected.values()))
            self.no[value] = min(self.no.get(value, missed), missed, key=shortfall)

    def absorb(self, other: "Probe", cluster: ClusterSpec) -> None:
        """Keep what another probe searched on one of several clusters beside the rest."""
        self.yes |= {f"{value} on {cluster}": answer for value, answer in other.yes.items()}
        self.no |= {f"{value} on {cluster}": refused for value, refused in other.no.items()}

    def limit(self, value: float | str, unit: str, beyond: float | str | None) -> Limit:
        """Return the limit at a value that works, with what happens at the one beyond."""
        estimate, cluster, request = self.yes[value]
        refused = None if beyond is None else self.no.get(beyond)
        verified = in_full(request, cluster, estimate.strategy)
        return Limit(value=value, unit=unit, cluster=cluster, estimate=verified, beyond=refused)


def shortfall(beyond: Beyond) -> float:
    """Return by which share something missed its limit; infinite where no number decided."""
    if beyond.required is None or not beyond.limit:
        return math.inf
    return abs(beyond.required / beyond.limit - 1)


def in_full(request: PlanRequest, cluster: ClusterSpec, strategy: Strategy) -> Estimate:
    """Return what a search found as an estimate of its own, with all figures but no terms."""
    asked = EstimateRequest(
        id=request.id,
        model=request.model,
        cluster=cluster,
        workload=request.workload,
        strategy=strategy,
        engine=request.engine,
        host_calibration=request.host_calibration,
    )
    return estimate_request(asked).model_copy(update={"terms": ()})


def closest_miss(value: float | str, rejections: Sequence[Rejection]) -> Beyond:
    """Return the rejection that missed its limit by the least, as the end of the way."""
    numbered = [one for one in rejections if one.required is not None]
    if not numbered:
        words = "; ".join(one.reason for one in rejections) or "no strategy applies"
        return Beyond(value=value, reason=words, constraint="applicability")
    closest = min(numbered, key=distance)
    return Beyond(
        value=value,
        reason=f"{closest.family}: {closest.reason}",
        constraint=closest.constraint,
        required=closest.required,
        limit=closest.limit,
        unit=closest.unit,
    )


def largest_step(works: Callable[[int], bool], top: int) -> int:
    """Return the largest number from 1 to ``top`` that works, 0 if not even 1 does.

    Assumes that what works for a number works for each smaller one. Goes up in doublings and
    then halves the gap, so that far-away tops cost nothing.
    """
    good, bad = 0, 1
    while bad <= top and works(bad):
        good, bad = bad, bad * 2
    if bad > top:
        if good == top or works(top):
            return top
        bad = top
    while bad - good > 1:
        middle = (good + bad) // 2
        if works(middle):
            good = middle
        else:
            bad = middle
    return good
