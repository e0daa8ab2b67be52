"""Intervals of inverse limits: the interval of the limiting figure, propagated to the value.

Near the limit, memory grows linearly with cache and activations, and a time grows by a power law
that the figure at half of the value determines. Both relations convert the figure's interval into
an interval of the limit.
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
    """Return the 80 % interval of a limit, or None if no growing figure determines it.

    ``at_half`` estimates the same strategy at half of the value; it is called for times only.
    """
    if constraint in MEMORY_LIMITS:
        return _by_memory(value, estimate)
    interval = estimate.interval.get(constraint)
    if interval is None or value <= 1:  # 1 has no integer half
        return None
    here, there = figure(estimate, constraint), figure(at_half(), constraint)
    return _by_time(value, interval, here, there) if here and there else None


def _by_memory(value: int, estimate: Estimate) -> Interval | None:
    """Return the values at which the peak memory reaches the bounds of its interval."""
    interval = estimate.interval.get(PEAK)
    memory = estimate.memory
    growing = sum(memory.breakdown_bytes.get(part, 0) for part in GROWING)
    if interval is None or not growing:
        return None
    (low, high), peak = interval, memory.per_device_peak_bytes
    return max(0.0, value * (1 - (high - peak) / growing)), value * (1 + (peak - low) / growing)


def _by_time(value: int, interval: Interval, here: float, there: float) -> Interval | None:
    """Return the values at which a time reaches the bounds of its interval."""
    low, high = interval
    power = math.log2(here / there)
    if power <= 0 or low <= 0:
        return None
    return value * (here / high) ** (1 / power), value * (here / low) ** (1 / power)
