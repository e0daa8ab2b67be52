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
