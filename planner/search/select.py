"""Selects from scored columns: the best of each family, the frontier, what lost by the least."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from planner.search.block import Flags, Numbers, Rows
from planner.search.rank import PENALTIES, Merit
from planner.search.scoring import Scores
from planner.specs.estimate import Estimate
from planner.specs.plan import Bound, Objective

# Rows this close to the best are costed exactly before one of them is chosen.
CLOSE = 1e-9
MAX_TIES = 8


@dataclass(frozen=True)
class Table:
    """The scores of all blocks under each other."""

    parts: Sequence[Scores]
    limits: Mapping[str, Bound]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @cached_property
    def starts(self) -> Rows:
        """Return the row at which each part starts."""
        return np.cumsum([0, *(len(part) for part in self.parts)])

    def part_of(self, row: int) -> tuple[Scores, int]:
        """Return the part that holds a row, and its place there."""
        index = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.parts[index], row - int(self.starts[index])

    def exact(self, row: int) -> Estimate:
        """Return one row as the exact door costs it."""
        part, own = self.part_of(row)
        return part.exact(own)

    @cached_property
    def merit(self) -> Merit:
        """Return what objectives look at, one number a row."""
        columns = {
            name: np.concatenate([getattr(part.merit, name) for part in self.parts])
            for name in vars(self.parts[0].merit)
        }
        return Merit(**cast("dict[str, float]", columns))

    @cached_property
    def fits(self) -> Flags:
        """Return which rows fit into memory."""
        return np.concatenate([part.fits for part in self.parts])

    @cached_property
    def families(self) -> Rows:
        """Return a number for each family on each kind of hardware."""
        numbers = np.concatenate([part.families for part in self.parts])
        kinds_of_hardware = dict.fromkeys(part.question.hardware for part in self.parts)
        order = {hardware: index for index, hardware in enumerate(kinds_of_hardware)}
        own = [order[part.question.hardware] for part in self.parts]
        kinds = np.repeat(own, [len(part) for part in self.parts])
        numbered: Rows = numbers.astype(np.int64) * len(order) + kinds
        return numbered

    @cached_property
    def misses(self) -> Numbers:
        """Return by which share each row misses its first broken limit; below 0 for none."""
        usable = np.repeat([part.usable_bytes for part in self.parts], np.diff(self.starts))
        short = np.abs(np.asarray(self.merit.peak_bytes) / usable - 1)
        missed = np.where(self.fits, -1.0, short)
        for name, bound in self.limits.items():
            share = self._share(name, bound)
            missed = np.where((missed < 0) & (share >= 0), share, missed)
        return missed

    def _share(self, name: str, bound: Bound) -> Numbers:
        """Return by which share each row misses a limit; 0 for no figure, below 0 for none."""
        values = np.concatenate([_values(part, name) for part in self.parts])
        found = np.full(len(values), -1.0)
        # A miss of both limits is impossible unless they cross: then the upper one counts.
        for limit, broken in (
            (bound.min, values < (bound.min or 0.0)),
            (bound.max, values > (bound.max or 0.0)),
        ):
            if limit is not None:
                away = np.abs(values / limit - 1) if limit else np.zeros(len(values))
                found = np.where(broken, away, found)
                found = np.where(np.isnan(values), 0.0, found)
        return found

    @cached_property
    def feasible(self) -> Rows:
        """Return the rows that fit and break no limit."""
        return np.flatnonzero(self.misses < 0)


def _values(part: Scores, name: str) -> Numbers:
    found = part.figures(name)
    return np.full(len(part), np.nan) if found is None else found


def best_rows(table: Table, objective: Objective, top: int) -> list[int]:
    """Return the rows among which the best of the ``top`` best families are."""
    rows = table.feasible
    if not len(rows):
        return []
    penalties = np.asarray(PENALTIES[objective](table.merit))[rows]
    speeds = np.asarray(table.merit.speed)[rows]
    order = np.lexsort((-speeds, penalties))
    _, first, family = np.unique(
        table.families[rows][order], return_index=True, return_inverse=True
    )
    leaders = order[np.sort(first)]
    last = leaders[min(top, len(leaders)) - 1]
    leader = order[first][family]  # of each row in order, the first of its family
    found: dict[int, list[int]] = {}
    rival = _rivals(penalties, speeds, order, leader) & _rivals(
        penalties, speeds, order, np.full(len(order), last)
    )
    for position in np.flatnonzero(rival):
        ties = found.setdefault(int(family[position]), [])
        if len(ties) < MAX_TIES:
            ties.append(int(rows[order[position]]))
    return [row for ties in found.values() for row in ties]


def _rivals(penalties: Numbers, speeds: Numbers, own: Rows, other: Rows) -> Flags:
    """Return which rows are better than others, or so close that rounding decides."""
    better = penalties[other] - penalties[own]
    near = CLOSE * np.abs(penalties[other])
    faster = speeds[own] >= speeds[other] * (1 - CLOSE)
    return (better > near) | ((better >= -near) & faster)


def frontier_rows(table: Table) -> list[int]:
    """Return the feasible rows that no other one matches in everything and beats in something."""
    rows = table.feasible
    merit = table.merit
    values = np.stack([np.asarray(column)[rows] for column in merit.criteria], axis=1)
    kept = skyline(values)
    return [int(row) for row in rows[kept]]


def skyline(values: Numbers) -> Rows:
    """Return the places of the rows that no other row dominates, the least first.

    The row with the least sum of shares cannot be dominated: it stays, and takes with it all
    that it dominates, until none is left.
    """
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    low, high = values.min(axis=0), values.max(axis=0)
    sums = ((values - low) / np.where(high > low, high - low, 1.0)).sum(axis=1)
    left, kept = np.arange(len(values)), []
    while len(left):
        pivot = left[np.lexsort((*values[left].T[::-1], sums[left]))[0]]
        kept.append(pivot)
        left = left[~(values[left] >= values[pivot]).all(axis=1)]
    chosen = np.array(kept)
    return cast("Rows", chosen[np.lexsort(values[chosen].T[::-1])])


def lost_families(table: Table, most: int) -> list[tuple[int, int]]:
    """Return families without a feasible row: the row that misses by the least, and how many."""
    taken = np.isin(table.families, table.families[table.feasible])
    rows = np.flatnonzero(~taken)
    order = rows[np.argsort(table.misses[rows], kind="stable")]
    _, first, counts = np.unique(table.families[order], return_index=True, return_counts=True)
    closest = np.argsort(first)[:most]
    return [(int(order[first[index]]), int(counts[index])) for index in closest]
