"""Select rows of scored tables: best of each family, frontier, closest infeasible."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np

from planner.search.question import (
    first_violation,
    is_percentile,
    is_simulated,
    mean_bound,
    violation,
)
from planner.search.rank import DIGITS, PENALTIES, Merit
from planner.search.scoring import Scores
from planner.search.space import Flags, Numbers, Rows
from planner.specs.estimate import Bound, Estimate, Objective
from planner.specs.workload import ServeWorkload

MAX_SIMULATED_ROWS = 4
ROUNDING = 1e-9  # relative difference between column and scalar results


@dataclass(frozen=True)
class Table:
    """The concatenated scores of all blocks; ``simulated`` holds the simulated rows."""

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
        """Return the part that holds a row, and the row's index in it."""
        index = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.parts[index], row - int(self.starts[index])

    def exact(self, row: int) -> Estimate:
        """Return the exact estimate of a row."""
        part, own = self.part_of(row)
        return part.simulated(own) if row in self.simulated else part.exact(own)

    def text(self, row: int) -> str:
        """Return a row's strategy as JSON with all defaults filled in."""
        part, own = self.part_of(row)
        return part.text(own)

    @cached_property
    def complexity(self) -> Numbers:
        """Return the complexity of each row, one column per row; ties prefer simpler rows."""
        return np.concatenate([part.complexity for part in self.parts], axis=1)

    @cached_property
    def merit(self) -> Merit:
        """Return the figures that objectives use, one number per row."""
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
        """Return a number for each strategy family on each kind of hardware and engine."""
        numbers = np.concatenate([part.families for part in self.parts])
        compared = dict.fromkeys(part.question.compared for part in self.parts)
        order = {kind: index for index, kind in enumerate(compared)}
        own = [order[part.question.compared] for part in self.parts]
        kinds = np.repeat(own, [len(part) for part in self.parts])
        numbered: Rows = numbers.astype(np.int64) * len(order) + kinds
        return numbered

    @cached_property
    def relative_violations(self) -> Numbers:
        """Return each row's relative miss of its first violated limit; negative if none.

        For limits that need a simulation, these are the misses known so far.
        """
        usable = np.concatenate([part.usable_bytes for part in self.parts])
        memory_miss = np.abs(np.asarray(self.merit.peak_bytes) / usable - 1)
        missed = np.where(self.fits, -1.0, memory_miss)
        for name, bound in self._column_limits:
            share = self._relative_violation(name, bound)
            missed = np.where((missed < 0) & (share >= 0), share, missed)
        return missed

    @cached_property
    def _column_limits(self) -> list[tuple[str, Bound]]:
        """Return the limits that columns decide; percentiles are bounded by their mean."""
        decided = []
        for name, bound in self.limits.items():
            mean_limit = mean_bound(name, bound)
            if mean_limit and self._has_load:
                decided.append((mean_limit[0], Bound(max=mean_limit[1])))
            elif not is_simulated(name) or not self._has_load:
                decided.append((name, bound))
        return decided

    @cached_property
    def _has_load(self) -> bool:
        """Return whether requests arrive, which only a simulation follows."""
        workloads = (part.question.request.workload for part in self.parts)
        return any(isinstance(workload, ServeWorkload) for workload in workloads)

    @cached_property
    def undecided_rows(self) -> Flags:
        """Return the rows that need a simulation to decide their limits."""
        has_simulated = self._has_load and any(is_simulated(name) for name in self.limits)
        return (self.relative_violations < 0) & has_simulated

    def settle(self, row: int) -> bool:
        """Return whether a row is feasible, simulating it if necessary."""
        if self.undecided_rows[row]:
            is_decided, miss = self._by_percentiles(row)
            if not is_decided:
                part, own = self.part_of(row)
                first = first_violation(part.simulated(own), self.limits)
                miss = first and first[1:]
            self.undecided_rows[row] = False
            self.simulated.add(row)
            if miss is not None:
                value, limit = miss
                self.relative_violations[row] = abs(value / limit - 1) if value and limit else 0.0
        return bool(self.relative_violations[row] < 0)

    def passes(self, row: int) -> bool:
        """Return the result of ``settle`` without updating the row if percentiles decide."""
        if self.undecided_rows[row]:
            is_decided, miss = self._by_percentiles(row)
            if is_decided:
                return miss is None
        return self.settle(row)

    def _by_percentiles(self, row: int) -> tuple[bool, tuple[float | None, float] | None]:
        """Return whether percentiles alone decide, and the first violation with its limit.

        They avoid the row's full estimate unless rounding may decide.
        """
        simulated_limits = {
            name: bound for name, bound in self.limits.items() if is_simulated(name)
        }
        part, own = self.part_of(row)
        values = (
            part.percentiles(own, simulated_limits)
            if all(map(is_percentile, simulated_limits))
            else None
        )
        if values is None or any(
            _is_near(values.get(name), simulated_limits[name]) for name in simulated_limits
        ):
            return False, None
        violations = (
            violation(values.get(name), bound) for name, bound in simulated_limits.items()
        )
        return True, next((miss for miss in violations if miss is not None), None)

    def column(self, name: str) -> Numbers:
        """Return a figure of each row; NaN if a row has none."""
        return np.concatenate([_values(part, name) for part in self.parts])

    def _relative_violation(self, name: str, bound: Bound) -> Numbers:
        """Return each row's relative miss of a limit; 0 for a missing figure, negative if met."""
        values = self.column(name)
        shares = np.full(len(values), -1.0)
        # Only crossed limits can both be missed: then the upper one counts.
        for limit, beyond in (
            (bound.min, values < (bound.min or 0.0)),
            (bound.max, values > (bound.max or 0.0)),
        ):
            if limit is not None:
                miss = np.abs(values / limit - 1) if limit else np.zeros(len(values))
                shares = np.where(beyond, miss, shares)
                shares = np.where(np.isnan(values), 0.0, shares)
        return shares

    @property
    def feasible(self) -> Rows:
        """Return the rows that fit and violate no limit, as far as known."""
        return np.flatnonzero(self.relative_violations < 0)


def has_feasible_row(table: Table) -> bool:
    """Return whether any row is feasible, simulating only a few rows of least delay.

    ``settle`` would simulate every row to prove that none is feasible.
    """
    rows = table.feasible
    if not len(rows) or not table.undecided_rows[rows].all():
        return bool(len(rows))
    return any(table.passes(int(row)) for row in _by_delay(table, rows)[:MAX_SIMULATED_ROWS])


def fastest_row(table: Table) -> int | None:
    """Return the row of least delay for the limits among those that fit, None if none fits."""
    rows = np.flatnonzero(table.fits)
    return int(_by_delay(table, rows)[0]) if len(rows) else None


def _by_delay(table: Table, rows: Rows) -> Rows:
    """Return rows by the means that limits on percentiles bound, the least delay first."""
    means = [
        mean_limit[0]
        for name, bound in table.limits.items()
        if (mean_limit := mean_bound(name, bound))
    ]
    waits = [table.column(mean)[rows] for mean in means] or [np.asarray(table.merit.delay)[rows]]
    shares = np.max([wait / wait.min() for wait in waits], axis=0)
    return rows[np.argsort(shares)]


def best_value(table: Table, name: str, *, least: bool) -> float | None:
    """Return the least or largest value of a figure over the rows that fit and meet all limits.

    A percentile is simulated for the few rows of the least mean; None if no row has a value.
    """
    rows = [int(row) for row in table.feasible if not table.undecided_rows[row]]
    mean = mean_bound(name, Bound(max=1.0))
    if not rows or (is_simulated(name) and mean is None):
        return None
    values = table.column(mean[0] if mean else name)[rows]
    if mean is not None:
        few = [rows[at] for at in np.argsort(values)[:MAX_SIMULATED_ROWS]]
        parts = [table.part_of(row) for row in few]
        found = [getattr(part.simulated(own).performance, name) for part, own in parts]
        values = np.array([np.nan if value is None else value for value in found])
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    return float(values.min() if least else values.max())


def _is_near(value: float | None, bound: Bound) -> bool:
    """Return whether rounding may decide between a value and its limit."""
    limits = [limit for limit in (bound.min, bound.max) if limit]
    return value is not None and any(abs(value / limit - 1) < ROUNDING for limit in limits)


def _values(part: Scores, name: str) -> Numbers:
    figures = part.figures(name)
    return np.full(len(part), np.nan) if figures is None else figures


def best_rows(table: Table, objective: Objective, top: int) -> list[int]:
    """Return the best row of each of the ``top`` best strategy families, more if families tie.

    The order is that of ``rank.order_of``: objective, speed, simplicity, and finally the text of
    the strategy.
    """
    return _choose_settled(table, lambda: _best_rows(table, objective, top))


def _choose_settled(table: Table, choose: Callable[[], list[int]]) -> list[int]:
    """Return the choice, repeated until every chosen row passes its simulated limits."""
    while True:
        chosen = choose()
        if all(table.settle(row) for row in chosen):
            return chosen


def _best_rows(table: Table, objective: Objective, top: int) -> list[int]:
    rows = _least_of_families(table, objective)
    if not len(rows):
        return []
    keys = _keys(table, objective, rows)
    order = np.lexsort(keys[::-1])
    # Rows of the same place are equal in every number.
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


def _least_of_families(table: Table, objective: Objective) -> Rows:
    """Return the feasible rows of each strategy family that the objective puts first."""
    rows = table.feasible
    penalties = _penalties(table, objective, rows)
    _, family = np.unique(table.families[rows], return_inverse=True)
    least = np.full(len(rows), np.inf)
    np.fmin.at(least, family, penalties)
    # A family without a number keeps all its rows.
    is_least = (penalties == least[family]) | np.isinf(least[family])
    return cast("Rows", rows[is_least])


def _penalties(table: Table, objective: Objective, rows: Rows) -> Numbers:
    return round_to_compared_digits(np.asarray(PENALTIES[objective](table.merit))[rows])


def _keys(table: Table, objective: Objective, rows: Rows) -> Numbers:
    """Return the sort keys of rows, the most important first."""
    speeds = np.asarray(table.merit.speed)[rows]
    return np.stack(
        [
            _penalties(table, objective, rows),
            round_to_compared_digits(-speeds),
            *table.complexity[:, rows],
        ]
    )


def round_to_compared_digits(values: Numbers) -> Numbers:
    """Return numbers rounded to the compared digits, as ``rank`` rounds a single one.

    >>> round_to_compared_digits(np.array([0.1 + 0.2, 0.0]))
    array([0.3, 0. ])
    """
    size = np.abs(np.where(np.isfinite(values) & (values != 0), values, 1.0))
    scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(size)))
    return np.rint(values * scale) / scale


def frontier_rows(table: Table) -> list[int]:
    """Return the feasible rows that no other row dominates."""
    criteria = [np.asarray(column) for column in table.merit.criteria]

    def choose() -> list[int]:
        rows = table.feasible
        values = np.stack([column[rows] for column in criteria], axis=1)
        return [int(row) for row in rows[pareto_rows(values)]]

    return _choose_settled(table, choose)


def pareto_rows(values: Numbers) -> Rows:
    """Return the indices of the non-dominated rows, in lexicographic order.

    The row with the smallest normalised sum cannot be dominated. It is kept, the rows that it
    dominates are dropped, and the step repeats. Finite values are normalised to [0, 1], infinite
    ones to -1 and 2.
    """
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    is_finite = np.isfinite(values)
    low = values.min(axis=0, where=is_finite, initial=np.inf)
    high = values.max(axis=0, where=is_finite, initial=-np.inf)
    low = np.where(is_finite.any(axis=0), low, 0.0)
    normalised = (values - low) / np.where(high > low, high - low, 1.0)
    sums = normalised.clip(-1.0, 2.0).sum(axis=1)
    remaining, pivots = np.arange(len(values)), []
    while len(remaining):
        own = sums[remaining]
        tied = remaining[own == own.min()]
        pivot = tied[np.lexsort(values[tied].T[::-1])[0]]
        pivots.append(pivot)
        remaining = remaining[~(values[remaining] >= values[pivot]).all(axis=1)]
    chosen = np.array(pivots)
    return cast("Rows", chosen[np.lexsort(values[chosen].T[::-1])])


def _settle_families(table: Table) -> None:
    """Simulate rows until each strategy family has a feasible row or no candidate."""
    delays = np.asarray(table.merit.delay)
    for family in np.unique(table.families[table.undecided_rows]):
        rows = np.flatnonzero((table.families == family) & (table.relative_violations < 0))
        for row in rows[np.lexsort((delays[rows], table.undecided_rows[rows]))]:
            if table.settle(int(row)):
                break


def infeasible_strategy_families(table: Table, most: int) -> list[tuple[int, int]]:
    """Return the row closest to feasible of each infeasible strategy family, and its row count."""
    _settle_families(table)
    is_feasible = np.isin(table.families, table.families[table.feasible])
    rows = np.flatnonzero(~is_feasible)
    order = rows[np.argsort(table.relative_violations[rows], kind="stable")]
    _, first, counts = np.unique(table.families[order], return_index=True, return_counts=True)
    closest = np.argsort(first)[:most]
    return [(int(order[first[index]]), int(counts[index])) for index in closest]
