"""How a ratio of two runs is taken where other work moves the clock: in turns, round by round.

Seconds are the process's own, so that whoever else works on the machine hardly counts; what is
left of it falls on both sides of a round alike.
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
    """Return the processor seconds of each way in each round; a first round is not counted.

    Every other round goes backwards: no way always runs in another's warm caches.
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
    """Return the geometric mean of the rounds' ratios with its interval by Student's t.

    One round alone has no interval: it bounds nothing.
    """
    logs = np.log(np.asarray(baseline) / np.asarray(technique))
    count, mean = len(logs), float(logs.mean())
    if count == 1:
        return Ratio(name, math.exp(mean), 1e-9, 1e9, 1, SECONDS)
    error = float(logs.std(ddof=1)) / math.sqrt(count)
    reach = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * error
    low, high = math.exp(mean - reach), math.exp(mean + reach)
    return Ratio(name, math.exp(mean), low, high, count, SECONDS)
