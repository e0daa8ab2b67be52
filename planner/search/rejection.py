"""Reasons for rejected strategies by family, each with the numbers of its closest miss."""

from dataclasses import dataclass, field
from typing import get_args

from planner.search.constraints import figure, is_simulated, mean_bound, unit_of
from planner.specs.base import Dtype
from planner.specs.estimate import Estimate
from planner.specs.plan import APPLICABILITY, Bound, Rejection
from planner.specs.strategy import AWAY_TITLES, OffloadSpec, Strategy
from planner.workload.ranks import Layout

GIB = 1024**3
DTYPES = get_args(Dtype)
OFFLOADS = ("none", "cpu", "nvme")
LARGEST_GROUP = 4096
MAX_FAMILIES = 32


def family_of(strategy: Strategy) -> str:
    """Return the family of a strategy: its weight format, its splits and what it offloads."""
    parts = [f"{strategy.weight_dtype or strategy.compute_dtype} weights"]
    for size, name in (
        (strategy.tensor_parallel_size, "tensor"),
        (strategy.pipeline_parallel_size, "pipeline"),
        (strategy.context_parallel_size, "context"),
    ):
        if size and size > 1:
            parts.append(f"{name} parallel {size}")
    if strategy.zero_stage:
        parts.append(f"ZeRO {strategy.zero_stage}")
    if strategy.activation_recomputation == "full":
        parts.append("full recomputation")
    return ", ".join((*parts, *strategy.offload_places))


def family_numbers(strategy: Strategy, layout: Layout) -> float:
    """Return the family of each strategy as a number, for columns of layouts.

    Numbers differ exactly where ``family_of`` differs: every part has its own digits.
    """
    number: float = DTYPES.index(strategy.weight_dtype or strategy.compute_dtype or "fp32")
    offload = strategy.offload or OffloadSpec()
    parts: tuple[tuple[float, int], ...] = (
        (layout.tensor, LARGEST_GROUP),
        (layout.pipeline, LARGEST_GROUP),
        (layout.context, LARGEST_GROUP),
        (layout.zero_stage, 4),
        (strategy.activation_recomputation == "full", 2),
        (OFFLOADS.index(offload.optimizer), len(OFFLOADS)),
        *((getattr(offload, name) > 0, 2) for name in AWAY_TITLES),
    )
    for part, radix in parts:
        number = number * radix + part
    return number


@dataclass
class Rejections:
    """Collect rejections, keeping the closest miss of each family."""

    by_family: dict[str, Rejection] = field(default_factory=dict)
    accepted: set[str] = field(default_factory=set)

    def accept(self, strategy: Strategy) -> None:
        """Mark a family as feasible, so that it is not reported as rejected."""
        self.accepted.add(family_of(strategy))

    def technique(self, key: str, reason: str) -> None:
        """Add a technique that does not apply."""
        self.by_family[key] = Rejection(family=key, constraint=APPLICABILITY, reason=reason)

    def memory(self, estimate: Estimate, usable_bytes: float, strategies: int = 1) -> None:
        """Add a strategy that exceeds the device memory."""
        required = float(estimate.memory.per_device_peak_bytes)
        largest = max(estimate.memory.breakdown_bytes.items(), key=lambda item: item[1])
        name, share = largest
        reason = (
            f"needs {required / GIB:.1f} GiB per device, {usable_bytes / GIB:.1f} GiB are usable; "
            f"{name.replace('_', ' ')} take {share / GIB:.1f} GiB"
        )
        self._note(estimate, Miss("memory", reason, required, usable_bytes, "B"), strategies)

    def constraint(
        self, estimate: Estimate, miss: tuple[str, float | None, float], strategies: int = 1
    ) -> None:
        """Add a strategy that violates a constraint of the request."""
        name, value, limit = miss
        unit = unit_of(name)
        shown = "unknown" if value is None else f"{value:.4g} {unit}".strip()
        reason = f"{name} is {shown}, the limit is {limit:g} {unit}".strip()
        if value is None and is_simulated(name):
            value, reason = _without_percentiles(estimate, name, limit)
        self._note(estimate, Miss(name, reason, value, limit, unit), strategies)

    def _note(self, estimate: Estimate, miss: "Miss", strategies: int) -> None:
        family = family_of(estimate.strategy)
        previous = self.by_family.get(family)
        count = (previous.strategies if previous else 0) + strategies
        if previous and previous.required is not None and not miss.closer_than(previous):
            self.by_family[family] = previous.model_copy(update={"strategies": count})
            return
        self.by_family[family] = Rejection(
            family=family,
            constraint=miss.constraint,
            reason=miss.reason,
            required=miss.required,
            limit=miss.limit,
            unit=miss.unit,
            strategies=count,
        )

    def result(self) -> dict[str, Rejection]:
        """Return the techniques that do not apply, then the closest rejected families."""
        rejected = [each for family, each in self.by_family.items() if family not in self.accepted]
        techniques = [each for each in rejected if each.constraint == APPLICABILITY]
        families = [each for each in rejected if each.constraint != APPLICABILITY]
        closest = sorted(families, key=distance)[:MAX_FAMILIES]
        return {rejection.family: rejection for rejection in (*techniques, *closest)}


def _without_percentiles(estimate: Estimate, name: str, limit: float) -> tuple[float | None, str]:
    """Return the mean that already violates the limit, or report an overloaded queue."""
    far = mean_bound(name, Bound(max=limit))
    most = estimate.performance.max_requests_per_second
    if most is not None or far is None:
        served = "" if most is None else f", the most is {most:.3g} a second"
        return None, f"more requests come than can be served{served}: {name} has no value"
    mean, unit = figure(estimate, far[0]), unit_of(name)
    reason = f"{far[0]} is {mean:.4g} {unit}, the limit on {name} is {limit:g} {unit}"
    return mean, reason


def distance(rejection: Rejection) -> float:
    """Return the relative miss of a rejection, 0 if it has no numbers."""
    if rejection.required is None or not rejection.limit:
        return 0.0
    return abs(rejection.required / rejection.limit - 1)


@dataclass(frozen=True)
class Miss:
    """The miss of one limit by one strategy."""

    constraint: str
    reason: str
    required: float | None
    limit: float
    unit: str

    def closer_than(self, other: Rejection) -> bool:
        """Return whether this relative miss is smaller than a rejection's."""
        if self.required is None or other.required is None or not other.limit or not self.limit:
            return False
        own = abs(self.required / self.limit - 1)
        return own < abs(other.required / other.limit - 1)
