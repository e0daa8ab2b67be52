"""How sure a limit is: the interval of the figure that ends it, carried over to the value itself.

Near its limit memory grows by a straight line, with cache and activations; a time grows by a
power of the value, as half of the value says. How far the figure may be off says through either
how far the limit may be off.
"""

import math
from collections.abc import Callable

from planner.search.constraints import figure
from planner.specs.estimate import Estimate, Interval

GROWING = ("kv_cache", "activations")
MEMORY_LIMITS = frozenset({"memory", "max_concurrency"})
PEAK = "per_device_peak_bytes"


def limit_interval(
    value: int, constraint: str, estimate: Estimate, at_half: Callable[[], Estimate]
) -> Interval | None:
    """Return the 80 % interval of a limit, or nothing where no growing figure ends it.

    ``at_half`` costs the same strategy at half of the value; it is asked for times alone.
    """
    if constraint in MEMORY_LIMITS:
        return _by_memory(value, estimate)
    known = estimate.interval.get(constraint)
    if known is None or value <= 1:  # one has no half
        return None
    here, there = figure(estimate, constraint), figure(at_half(), constraint)
    return _by_time(value, known, here, there) if here and there else None


def _by_memory(value: int, estimate: Estimate) -> Interval | None:
    """Return the values at which the peak would be as high as its interval's other ends."""
    known = estimate.interval.get(PEAK)
    held = estimate.memory
    growing = sum(held.breakdown_bytes.get(part, 0) for part in GROWING)
    if known is None or not growing:
        return None
    (low, high), peak = known, held.per_device_peak_bytes
    return max(0.0, value * (1 - (high - peak) / growing)), value * (1 + (peak - low) / growing)


def _by_time(value: int, known: Interval, here: float, there: float) -> Interval | None:
    """Return the same for a time that is ``here`` at the value and ``there`` at half of it."""
    low, high = known
    power = math.log2(here / there)
    if power <= 0 or low <= 0:
        return None
    return value * (here / high) ** (1 / power), value * (here / low) ** (1 / power)
