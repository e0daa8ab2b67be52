"""Splits layers over pipeline stages of unlike devices by dynamic programming.

A pipeline moves at the pace of its slowest stage, so that the first aim is the smallest maximum;
of the splits that reach it, the one with the least time over all stages fills the pipeline first.
Source: Zheng et al. 2022 (Alpa), arXiv:2201.12023, section 5 (stages bounded by the slowest).
"""

from collections.abc import Callable
from typing import cast

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]
EVENNESS = 1e-9
TINY = 1e-300
NEARLY = 1 + 1e-12  # sums of the same seconds in another order


def split_layers(seconds: Table) -> tuple[int, ...] | None:
    """Return how many layers each stage takes, at least one each; nothing where none fits.

    ``seconds`` has a row for each stage and a column for each number of layers from 0 to all of
    them; it is infinite where so many do not fit.

    >>> split_layers(np.array([[0.0, 1.0, 2.0, 3.0], [0.0, 2.0, 4.0, 6.0]]))
    (2, 1)
    """
    table = np.array(seconds, dtype=np.float64)
    table[:, 0] = np.inf
    slowest, _ = _fill(table, np.maximum)
    if not np.isfinite(slowest):
        return None
    table[table > slowest * NEARLY] = np.inf
    # Between equal sums the even split is the plainer one: its squares are the least.
    _, layers = _fill(table + EVENNESS * table**2 / max(slowest, TINY), np.add)
    return layers


def split_in_flight(seconds: Table, in_flight: float) -> tuple[int, ...] | None:
    """Return the split in which so many micro-batches go round soonest; nothing if none fits.

    A round takes as long as all stages in turn, and no less than the slowest stage takes for all
    of the ``in_flight``. With one alone the sum counts, with one a stage the slowest.

    >>> split_in_flight(np.array([[0.0, 1.0, 2.0, 3.0], [0.0, 2.0, 4.0, 6.0]]), 1)
    (2, 1)
    """
    if in_flight >= len(seconds):
        return split_layers(seconds)
    table = np.array(seconds, dtype=np.float64)
    table[:, 0] = np.inf
    least, layers = _fill(table, np.add)
    if not np.isfinite(least):
        return None
    if in_flight * _slowest(table, layers) <= least:
        return layers
    bounds = np.unique(table[np.isfinite(table)])
    low, high = -1, len(bounds) - 1
    # The larger the bound on a stage, the smaller the sum: both sides of where they cross count.
    while high - low > 1:
        middle = (low + high) // 2
        crossed = _within(table, bounds[middle])[0] <= in_flight * bounds[middle]
        low, high = (low, middle) if crossed else (middle, high)
    found = [_within(table, bounds[at]) for at in (low, high) if at >= 0]
    return min(found, key=lambda one: max(one[0], in_flight * _slowest(table, one[1])))[1]


def _within(table: Table, bound: float) -> tuple[float, tuple[int, ...]]:
    """Return the least sum over stages of which none takes longer than a bound, and its split."""
    return _fill(np.where(table > bound * NEARLY, np.inf, table), np.add)


def _slowest(table: Table, layers: tuple[int, ...]) -> float:
    return max(float(table[stage, held]) for stage, held in enumerate(layers))


def _fill(table: Table, combine: Callable[[Table, Table], Table]) -> tuple[float, tuple[int, ...]]:
    """Return the least combined time of all layers on all stages, and how many each one takes."""
    stages, places = table.shape
    best = np.full(places, np.inf)
    best[0] = 0.0
    before = np.arange(places)[:, None] - np.arange(places)[None, :]  # layers on earlier stages
    chosen = np.zeros((stages, places), dtype=np.int64)
    for stage in range(stages):
        earlier = np.where(before >= 0, best[np.maximum(before, 0)], np.inf)
        together = combine(earlier, table[stage][None, :])
        chosen[stage] = together.argmin(axis=1)
        best = together.min(axis=1)
    left, layers = places - 1, []
    for stage in reversed(range(stages)):
        layers.append(int(chosen[stage, left]))
        left -= layers[-1]
    return cast("float", best[-1]), tuple(reversed(layers))
