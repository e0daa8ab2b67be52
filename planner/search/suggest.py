"""The smallest changes that make a request fit or meet its target, each verified by a search."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from planner.errors import PlannerError
from planner.search.changes import (
    Change,
    cheaper_methods,
    fewer_bits,
    fewer_limits,
    fewer_pins,
    is_no_better,
    largest_option,
    more_devices,
    other_devices,
    other_trainers,
    pins_of,
    placements,
    several_others,
    smaller_workloads,
)
from planner.specs.cluster import DeviceSpec
from planner.specs.estimate import Estimate
from planner.specs.plan import PlanRequest, Purpose, Suggestion
from planner.specs.strategy import Strategy

MAX_SUGGESTIONS = 6
MOST_HOST_BYTES = 2 * 10**12  # of one server: NVIDIA DGX H100 and H200 data sheets
Best = Callable[[PlanRequest], Estimate | None]
Works = Callable[[PlanRequest], bool]


def suggestions(
    request: PlanRequest, best: Best, works: Works | None = None, *, purpose: Purpose = "fit"
) -> tuple[Suggestion, ...]:
    """Return up to six changes, the smallest working one of each kind, cheapest kind first.

    For the purpose ``fit`` a change works if something fits, regardless of targets; for ``target``
    a plan must also meet the targets. ``works`` is a faster test than ``best`` for the existence
    of a plan.
    """
    trial = _Trial(request, best, works or (lambda changed: best(changed) is not None), purpose)
    return tuple(trial.smallest())[:MAX_SUGGESTIONS]


class _Trial:
    """The trial of changes to one request for one purpose."""

    def __init__(self, request: PlanRequest, best: Best, works: Works, purpose: Purpose) -> None:
        self.request = request
        self.best = best
        self.works = works
        self.purpose = purpose

    def smallest(self) -> Iterator[Suggestion]:
        """Yield the smallest working change of each kind, kinds ordered by cost."""
        request = self.request
        yield from self._first_working(fewer_pins(request) if self._is_any_pin_binding() else ())
        yield from self._first_working(placements(request))
        yield from self._first_working(other_trainers(request))
        yield from self._first_working(fewer_bits(request))
        yield from self._first_working(cheaper_methods(request))
        for ladder in smaller_workloads(request):
            yield from self._smallest_step(ladder)
        more = [*self._first_working(more_devices(request)), *self._cheapest_device()]
        yield from more or self._cheapest_cluster()
        yield from self._first_working(fewer_limits(request))

    def _request_with(self, change: Change) -> PlanRequest:
        changed = PlanRequest.model_validate({**dict(self.request), **change.changes})
        return changed.without_targets() if self.purpose == "fit" else changed

    def _works(self, change: Change) -> bool:
        try:
            return self.works(self._request_with(change))
        except PlannerError:
            return False

    def _verified_suggestion(self, change: Change) -> Suggestion | None:
        """Return the change with the best plan that it allows, or None."""
        try:
            estimate = self.best(self._request_with(change))
        except PlannerError:
            return None
        if estimate is None or ("engine" in change.changes and self._overfills_host(estimate)):
            return None
        shown = {name: _json(value) for name, value in change.changes.items()}
        return Suggestion(
            title=change.title, changes=shown, estimate=estimate, purpose=self.purpose
        )

    def _overfills_host(self, estimate: Estimate) -> bool:
        """Return whether a suggested trainer leaves more to an unknown host than servers hold."""
        cluster = largest_option(self.request)
        most = (cluster.host_memory_bytes or MOST_HOST_BYTES) * cluster.nodes
        return (estimate.memory.host_bytes or 0) > most

    def _first_working(self, changes: Iterable[Change]) -> list[Suggestion]:
        for change in changes:
            suggestion = self._verified_suggestion(change) if self._works(change) else None
            if suggestion:
                return [suggestion]
        return []

    def _is_any_pin_binding(self) -> bool:
        """Return whether freeing all pins helps; if not, no subset does."""
        is_pinned = bool(pins_of(self.request))
        return is_pinned and self._works(Change("", {"pins": Strategy()}))

    def _smallest_step(self, ladder: Sequence[Change]) -> list[Suggestion]:
        """Return the first working step of a ladder, or nothing if the last step fails.

        Assumes that each step is less demanding than the one before, which allows bisection. Only
        the suggested step is searched for its best plan.
        """
        index = self._first_step(ladder)
        suggestion = None if index is None else self._verified_suggestion(ladder[index])
        return [suggestion] if suggestion else []

    def _first_step(self, ladder: Sequence[Change]) -> int | None:
        low, high = 0, len(ladder) - 1
        if not ladder or not self._works(ladder[high]):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._works(ladder[middle]) else (middle + 1, high)
        return high

    def _cheapest_device(self) -> list[Suggestion]:
        """Return the first device that works, skipping devices dominated by a failed one.

        Assumes that what fits on a smaller device fits on a larger one.
        """
        devices = other_devices(self.request)
        largest = max(devices, key=lambda each: each[0].memory_bytes, default=None)
        if largest is None or (self.purpose == "fit" and not self._works(largest[1])):
            return []
        failed: list[DeviceSpec] = []
        for device, change in devices:
            if any(self._is_dominated(device, than) for than in failed):
                continue
            suggestion = self._verified_suggestion(change) if self._works(change) else None
            if suggestion:
                return [suggestion]
            failed.append(device)
        return []

    def _is_dominated(self, device: DeviceSpec, failed_device: DeviceSpec) -> bool:
        if self.purpose == "fit":
            return device.memory_bytes <= failed_device.memory_bytes
        return is_no_better(device, failed_device)

    def _cheapest_cluster(self) -> list[Suggestion]:
        """Return the cheapest working count of any priced device, in US dollars per hour."""
        best: tuple[float, Change] | None = None
        for device, ladder in several_others(self.request):
            hourly = device.price_usd_per_hour or 0.0
            costs = [hourly * change.changes["cluster"].num_devices for change in ladder]
            cheaper = [
                change
                for change, cost in zip(ladder, costs, strict=True)
                if best is None or cost < best[0]
            ]
            index = self._first_step(cheaper)
            if index is not None:
                best = costs[index], cheaper[index]
        suggestion = self._verified_suggestion(best[1]) if best else None
        return [suggestion] if suggestion else []


def _json(value: object) -> object:
    if isinstance(value, tuple):
        return [_json(each) for each in value]
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if dump else value
