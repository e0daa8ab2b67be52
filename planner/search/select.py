"""Selects from scored columns: the best of each family, the frontier, what lost by the least."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np

from planner.search.block import Flags, Numbers, Rows
from planner.search.constraints import broken, hopeless, is_percentile, is_simulated
from planner.search.rank import DIGITS, PENALTIES, Merit
from planner.search.scoring import Scores
from planner.specs.estimate import Estimate
from planner.specs.plan import Bound, Objective

FEW = 4
ROUNDING = 1e-9  # columns and single numbers differ by less


@dataclass(frozen=True)
class Table:
    """The scores of all blocks under each other; some rows had to be ``simulated``."""

    parts: Sequence[Scores]
    limits: Mapping[str, Bound]
    simulated: set[int] = field(default_factory=set)

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
        return part.simulated(own) if row in self.simulated else part.exact(own)

    def text(self, row: int) -> str:
        """Return one row's strategy as text, every default filled in."""
        part, own = self.part_of(row)
        return part.text(own)

    @cached_property
    def plainness(self) -> Numbers:
        """Return what each row asks for, a column a row; of equals the plainer one goes first."""
        return np.concatenate([part.plainness for part in self.parts], axis=1)

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
        """Return by which share each row misses its first broken limit; below 0 for none.

        Of limits that only a simulation can decide, these are the misses known so far.
        """
        usable = np.repeat([part.usable_bytes for part in self.parts], np.diff(self.starts))
        short = np.abs(np.asarray(self.merit.peak_bytes) / usable - 1)
        missed = np.where(self.fits, -1.0, short)
        for name, bound in self._decided:
            share = self._share(name, bound)
            missed = np.where((missed < 0) & (share >= 0), share, missed)
        return missed

    @cached_property
    def _decided(self) -> list[tuple[str, Bound]]:
        """Return the limits that columns decide: of a percentile, how far its mean may be."""
        found = []
        for name, bound in self.limits.items():
            far = hopeless(name, bound)
            if far:
                found.append((far[0], Bound(max=far[1])))
            elif not is_simulated(name):
                found.append((name, bound))
        return found

    @cached_property
    def unsure(self) -> Flags:
        """Return the rows of which only a simulation can tell whether they break a limit."""
        asked = any(is_simulated(name) for name in self.limits)
        return (self.misses < 0) & asked

    def settle(self, row: int) -> bool:
        """Return whether a row fits and breaks no limit, simulated where nothing else tells."""
        if self.unsure[row]:
            part, own = self.part_of(row)
            miss = broken(part.simulated(own), self.limits)
            self.unsure[row] = False
            self.simulated.add(row)
            if miss is not None:
                _, value, limit = miss
                self.misses[row] = abs(value / limit - 1) if value and limit else 0.0
        return bool(self.misses[row] < 0)

    def passes(self, row: int) -> bool:
        """Return what ``settle`` does, without the row's estimate where percentiles decide."""
        asked = {name: bound for name, bound in self.limits.items() if is_simulated(name)}
        if not self.unsure[row] or not all(map(is_percentile, asked)):
            return self.settle(row)
        part, own = self.part_of(row)
        found = part.percentiles(own)
        if found is None or any(_is_near(found.get(name), asked[name]) for name in asked):
            return self.settle(row)
        return all(_is_within(found.get(name), bound) for name, bound in asked.items())

    def column(self, name: str) -> Numbers:
        """Return a figure of each row; not a number where a row has none."""
        return np.concatenate([_values(part, name) for part in self.parts])

    def _share(self, name: str, bound: Bound) -> Numbers:
        """Return by which share each row misses a limit; 0 for no figure, below 0 for none."""
        values = self.column(name)
        found = np.full(len(values), -1.0)
        # A miss of both limits is impossible unless they cross: then the upper one counts.
        for limit, beyond in (
            (bound.min, values < (bound.min or 0.0)),
            (bound.max, values > (bound.max or 0.0)),
        ):
            if limit is not None:
                away = np.abs(values / limit - 1) if limit else np.zeros(len(values))
                found = np.where(beyond, away, found)
                found = np.where(np.isnan(values), 0.0, found)
        return found

    @property
    def feasible(self) -> Rows:
        """Return the rows that fit and break no limit, as far as it is known."""
        return np.flatnonzero(self.misses < 0)


def promises(table: Table) -> bool:
    """Return whether any row fits and breaks no limit, or one of the few that wait the least.

    This is quick where ``settle`` would simulate every row to find that there is none.
    """
    rows = table.feasible
    if not len(rows) or not table.unsure[rows].all():
        return bool(len(rows))
    means = [far[0] for name, bound in table.limits.items() if (far := hopeless(name, bound))]
    waits = [table.column(mean)[rows] for mean in means] or [np.asarray(table.merit.delay)[rows]]
    shares = np.max([wait / wait.min() for wait in waits], axis=0)
    return any(table.passes(int(row)) for row in rows[np.argsort(shares)[:FEW]])


def _is_near(value: float | None, bound: Bound) -> bool:
    """Return whether a value is so near a limit that rounding may decide."""
    limits = [limit for limit in (bound.min, bound.max) if limit]
    return value is not None and any(abs(value / limit - 1) < ROUNDING for limit in limits)


def _is_within(value: float | None, bound: Bound) -> bool:
    if value is None:
        return False
    low, high = bound.min, bound.max
    return (low is None or value >= low) and (high is None or value <= high)


def _values(part: Scores, name: str) -> Numbers:
    found = part.figures(name)
    return np.full(len(part), np.nan) if found is None else found


def best_rows(table: Table, objective: Objective, top: int) -> list[int]:
    """Return the best row of each of the ``top`` best families, more where several are as good.

    The order is that of ``rank.order_of``: the objective, speed, plainness, and between rows that
    are alike in all of these the text of the strategy.
    """
    return _settled(table, lambda: _best_rows(table, objective, top))


def _settled(table: Table, choose: Callable[[], list[int]]) -> list[int]:
    """Return what is chosen once nothing chosen breaks a limit that a simulation decides."""
    while True:
        chosen = choose()
        if all(table.settle(row) for row in chosen):
            return chosen


def _best_rows(table: Table, objective: Objective, top: int) -> list[int]:
    rows = table.feasible
    if not len(rows):
        return []
    keys = _keys(table, objective, rows)
    order = np.lexsort(keys[::-1])
    # Rows of one place are alike in every number.
    place = np.cumsum([0, *(keys[:, order[1:]] != keys[:, order[:-1]]).any(axis=0)])
    families = table.families[rows][order]
    leaders = np.sort(np.unique(families, return_index=True)[1])
    last = place[leaders[min(top, len(leaders)) - 1]]
    chosen = []
    for leader in leaders[place[leaders] <= last]:
        alike = np.flatnonzero((place == place[leader]) & (families == families[leader]))
        ties = [int(rows[order[position]]) for position in alike]
        chosen.append(ties[0] if len(ties) == 1 else min(ties, key=table.text))
    return chosen


def _keys(table: Table, objective: Objective, rows: Rows) -> Numbers:
    """Return the numbers that rows are ordered by, the most important first."""
    penalties = np.asarray(PENALTIES[objective](table.merit))[rows]
    speeds = np.asarray(table.merit.speed)[rows]
    return np.stack([rounded(penalties), rounded(-speeds), *table.plainness[:, rows]])


def rounded(values: Numbers) -> Numbers:
    """Return numbers to the digits that count, as ``rank`` rounds one of them.

    >>> rounded(np.array([0.1 + 0.2, 0.0]))
    array([0.3, 0. ])
    """
    size = np.abs(np.where(np.isfinite(values) & (values != 0), values, 1.0))
    scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(size)))
    return np.rint(values * scale) / scale


def frontier_rows(table: Table) -> list[int]:
    """Return the feasible rows that no other one matches in everything and beats in something."""
    criteria = [np.asarray(column) for column in table.merit.criteria]

    def choose() -> list[int]:
        rows = table.feasible
        values = np.stack([column[rows] for column in criteria], axis=1)
        return [int(row) for row in rows[skyline(values)]]

    return _settled(table, choose)


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


def _settle_families(table: Table) -> None:
    """Simulate rows until each family has a feasible one, or none that could be."""
    delays = np.asarray(table.merit.delay)
    for family in np.unique(table.families[table.unsure]):
        rows = np.flatnonzero((table.families == family) & (table.misses < 0))
        for row in rows[np.lexsort((delays[rows], table.unsure[rows]))]:
            if table.settle(int(row)):
                break


def lost_families(table: Table, most: int) -> list[tuple[int, int]]:
    """Return families without a feasible row: the row that misses by the least, and how many."""
    _settle_families(table)
    taken = np.isin(table.families, table.families[table.feasible])
    rows = np.flatnonzero(~taken)
    order = rows[np.argsort(table.misses[rows], kind="stable")]
    _, first, counts = np.unique(table.families[order], return_index=True, return_counts=True)
    closest = np.argsort(first)[:most]
    return [(int(order[first[index]]), int(counts[index])) for index in closest]
