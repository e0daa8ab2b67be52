"""Measures time ratios robustly on shared machines: alternating rounds of process CPU time.

CPU time is hardly affected by other programs; the remaining effect is the same on both sides of
a round.
"""

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from runners.ratios import Ratio

LEVEL = 0.95
SECONDS = "processor seconds"
Way = Callable[[], object]


def seconds_in_turns(ways: Sequence[Way], rounds: int) -> list[list[float]]:
    """Return each method's CPU seconds per round, after a warm-up round.

    Every other round runs in reverse order, so that no method always has warm caches.
    """
    taken: list[list[float]] = [[] for _ in ways]
    order = list(range(len(ways)))
    for number in range(rounds + 1):
        for at in order if number % 2 else reversed(order):
            began = time.process_time()
            ways[at]()
            if number:
                taken[at].append(time.process_time() - began)
    return taken


def ratio_of(name: str, baseline: Sequence[float], technique: Sequence[float]) -> Ratio:
    """Return the geometric mean of the rounds' ratios with its Student's t interval.

    A single round has no interval.
    """
    logs = np.log(np.asarray(baseline) / np.asarray(technique))
    count, mean = len(logs), float(logs.mean())
    if count == 1:
        return Ratio(name, math.exp(mean), 1e-9, 1e9, 1, SECONDS)
    error = float(logs.std(ddof=1)) / math.sqrt(count)
    reach = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * error
    low, high = math.exp(mean - reach), math.exp(mean + reach)
    return Ratio(name, math.exp(mean), low, high, count, SECONDS)
