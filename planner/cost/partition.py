"""Layer splits over pipeline stages with different devices, by dynamic programming.

The slowest stage limits a pipeline, so the first objective is the smallest maximum; among these
splits, the one with the smallest sum fills the pipeline fastest.
Source: Zheng et al. 2022 (Alpa), arXiv:2201.12023, section 5 (stages bounded by the slowest).
"""

from collections.abc import Callable
from typing import cast

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]
EVENNESS = 1e-9
TINY = 1e-300
NEARLY = 1 + 1e-12  # tolerance for sums in a different order


def split_layers(seconds: Table) -> tuple[int, ...] | None:
    """Return the number of layers per stage, at least 1 each; None if nothing fits.

    ``seconds`` has a row per stage and a column per number of layers from 0 to all, infinite where
    the layers do not fit.

    >>> split_layers(np.array([[0.0, 1.0, 2.0, 3.0], [0.0, 2.0, 4.0, 6.0]]))
    (2, 1)
    """
    table = np.array(seconds, dtype=np.float64)
    table[:, 0] = np.inf
    slowest, _ = _fill(table, np.maximum)
    if not np.isfinite(slowest):
        return None
    table[table > slowest * NEARLY] = np.inf
    # Among equal sums, the smallest sum of squares is the most even split.
    _, layers = _fill(table + EVENNESS * table**2 / max(slowest, TINY), np.add)
    return layers


def split_in_flight(seconds: Table, in_flight: float) -> tuple[int, ...] | None:
    """Return the fastest split for ``in_flight`` micro-batches; None if nothing fits.

    A round takes the sum over all stages, but at least ``in_flight`` times the slowest stage. With
    one micro-batch only the sum counts, with one per stage only the slowest stage.

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
    # The sum falls as the bound rises: the optimum is next to their crossing.
    while high - low > 1:
        middle = (low + high) // 2
        crossed = _within(table, bounds[middle])[0] <= in_flight * bounds[middle]
        low, high = (low, middle) if crossed else (middle, high)
    candidates = [_within(table, bounds[at]) for at in (low, high) if at >= 0]
    return min(
        candidates,
        key=lambda candidate: max(candidate[0], in_flight * _slowest(table, candidate[1])),
    )[1]


def _within(table: Table, bound: float) -> tuple[float, tuple[int, ...]]:
    """Return the smallest sum with every stage within a bound, and its split."""
    return _fill(np.where(table > bound * NEARLY, np.inf, table), np.add)


def _slowest(table: Table, layers: tuple[int, ...]) -> float:
    return max(float(table[stage, count]) for stage, count in enumerate(layers))


def _fill(table: Table, combine: Callable[[Table, Table], Table]) -> tuple[float, tuple[int, ...]]:
    """Return the smallest combined time over all stages, and its split."""
    stages, counts = table.shape
    best = np.full(counts, np.inf)
    best[0] = 0.0
    earlier_layers = (
        np.arange(counts)[:, None] - np.arange(counts)[None, :]
    )  # layers on earlier stages
    chosen = np.zeros((stages, counts), dtype=np.int64)
    for stage in range(stages):
        earlier = np.where(earlier_layers >= 0, best[np.maximum(earlier_layers, 0)], np.inf)
        combined = combine(earlier, table[stage][None, :])
        chosen[stage] = combined.argmin(axis=1)
        best = combined.min(axis=1)
    remaining, layers = counts - 1, []
    for stage in reversed(range(stages)):
        layers.append(int(chosen[stage, remaining]))
        remaining -= layers[-1]
    return cast("float", best[-1]), tuple(reversed(layers))
