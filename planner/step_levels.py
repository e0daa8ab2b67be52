"""Fits the factors of training steps on several levels at once.

The logarithm of a factor is a sum: what all runs have in common, what is the engine's, the chip
family's, the chip's own, and that of the engine on the family. Each is drawn to nothing, the more
the narrower its level's spread is, so that an engine that was never seen on a chip takes what each
of them shows elsewhere. Errors count as absolute log ratios, so that a few odd runs do not steer
the fit; it is solved by reweighted least squares from the physics, never from another fit, so that
runs that are left out have no say.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from planner.evidence import SUPERSEDED
from planner.fitting import Columns
from planner.step_fitting import CEILINGS, FLOORS, ISSUE, LEAST, PARTS, WORK, StepCase

Key = tuple[str, ...]
# How far, as a log, parts are from the physics: products reach well-known shares of the peak,
# while how much of an exchange shows depends on the software alone.
PART_SPREADS = {
    "matmul": 0.2,
    "matmul_8bit": 0.1,
    "matmul_4bit": 0.2,
    "experts": 0.3,
    "experts_narrow": 0.3,
    "operands": 0.3,
    "attention": 0.6,
    "attention_unfused": 0.6,
    "tensor_parallel": 0.6,
    "expert_exchange": 0.8,
    "pipeline": 0.8,
    "update": 0.8,
    "layer_overhead": 1.0,
    "exchange": 1.0,
    "hidden": 3.0,
    "rounds": 0.2,
}
USUAL_SPREAD = 0.5
# How much of a part's spread lies on each level, for engines with runs of their own.
TOGETHER = {"common": 1.0, "engine": 0.7, "family": 0.5, "chip": 0.6, "pair": 1.0}
# The same where engines are not told apart: what an engine without runs is taken to be like.
POOLED = {"common": 0.3, "family": 0.15, "chip": 0.3}
UNIT = 0.05  # an error of 5 % is as unlikely as a factor one spread from the physics
ROUNDING = 0.02  # below this errors count as their squares
OLD_WEIGHT = 0.03  # of code that the same engine has outrun since
ITERATIONS = 40
CONVERGED = 3e-5
LONGEST_STEP = 1.5
SHORTEST_SHARE = 1e-3
NEGLIGIBLE_SHARE = 1e-4


def keys_of(engine: str, family: str, chip: str) -> dict[str, Key]:
    """Return what a run's factors are put together from, by level."""
    return {
        "common": ("common",),
        "engine": ("engine", engine),
        "family": ("family", family),
        "chip": ("chip", chip),
        "pair": ("pair", engine, family),
    }


def bounds() -> tuple[Columns, Columns]:
    """Return the lowest and the highest factor of each part."""
    floors = np.array([FLOORS.get(part, LEAST) for part in PARTS])
    return floors, np.array([CEILINGS[part] for part in PARTS])


@dataclass(frozen=True, eq=False)
class Levels:
    """What was found on each level: the logarithms by part that add up to a run's factors."""

    effects: Mapping[Key, Columns]

    def factors(self, engine: str, family: str, chip: str = "") -> Columns:
        """Return the factors of the parts; a level without runs adds nothing."""
        keys = keys_of(engine, family, chip).values()
        logs = sum(
            (self.effects[key] for key in keys if key in self.effects), np.zeros(len(PARTS))
        )
        found: Columns = np.clip(np.exp(logs), *bounds())
        return found

    def step_s(self, case: StepCase) -> float:
        """Return the seconds of a run under its factors."""
        return case.step_s(self.factors(case.engine, case.architecture, case.device))


@dataclass(frozen=True)
class _Cell:
    """The runs of one engine on one chip: they have all their factors in common."""

    blocks: tuple[int, ...]
    seconds: Columns
    measured_s: Columns
    weights: Columns
    runs_ahead: bool

    def derivatives(self, logs: Columns) -> tuple[Columns, Columns]:
        """Return the log errors, and the share of each part in each predicted step."""
        factors = np.exp(logs)
        low, high = bounds()
        parts = self.seconds * np.clip(factors, low, high)
        if self.runs_ahead:
            work = parts[:, : len(WORK)].sum(axis=1)
            waits = parts[:, ISSUE] > work
            parts[waits, : len(WORK)] = 0.0
            parts[~waits, ISSUE] = 0.0
        steps = parts.sum(axis=1)
        shares = np.where((factors < low) | (factors > high), 0.0, parts / steps[:, None])
        return np.log(steps / self.measured_s), shares


class _Problem:
    """All runs of a fit, and what it costs to put factors where they are."""

    def __init__(self, cases: Sequence[StepCase], spreads: Mapping[str, float]) -> None:
        newest = {case.engine for case in cases if case.source not in SUPERSEDED}
        self.keys: list[Key] = []
        self.cells: list[_Cell] = []
        levels: list[float] = []
        groups: dict[tuple[str, str, str], list[StepCase]] = {}
        for case in cases:
            groups.setdefault((case.engine, case.architecture, case.device), []).append(case)
        for names, runs in groups.items():
            own = keys_of(*names)
            for level in spreads:
                if own[level] not in self.keys:
                    self.keys.append(own[level])
                    levels.append(spreads[level])
            outrun = [run.source in SUPERSEDED and run.engine in newest for run in runs]
            self.cells.append(
                _Cell(
                    blocks=tuple(self.keys.index(own[level]) for level in spreads),
                    seconds=np.array([run.seconds for run in runs]),
                    measured_s=np.array([run.measured_s for run in runs]),
                    weights=np.where(outrun, OLD_WEIGHT, 1.0),
                    runs_ahead=runs[0].runs_ahead,
                )
            )
        parts = np.array([PART_SPREADS.get(part, USUAL_SPREAD) for part in PARTS])
        self.stiffness = (np.outer(levels, parts)) ** -2.0
        self.active = self._active()

    def _active(self) -> npt.NDArray[np.bool_]:
        """Return which parts runs of each block show at all."""
        found = np.zeros(self.stiffness.shape, dtype=bool)
        for cell in self.cells:
            shown = (cell.seconds / cell.measured_s[:, None]).max(axis=0) > NEGLIGIBLE_SHARE
            for block in cell.blocks:
                found[block] |= shown
        return found

    def cost(self, effects: Columns) -> float:
        """Return how wrong the effects are on the runs, and how far from the physics."""
        total = 0.5 * float((self.stiffness * effects**2).sum())
        for cell in self.cells:
            errors, _ = cell.derivatives(effects[list(cell.blocks)].sum(axis=0))
            total += float(cell.weights @ np.sqrt(errors**2 + ROUNDING**2)) / UNIT
        return total

    def step(self, effects: Columns) -> Columns:
        """Return the step of reweighted least squares."""
        blocks, parts = effects.shape
        curvature = np.zeros((blocks, parts, blocks, parts))
        slope = self.stiffness * effects
        for cell in self.cells:
            errors, shares = cell.derivatives(effects[list(cell.blocks)].sum(axis=0))
            weights = cell.weights / np.sqrt(errors**2 + ROUNDING**2) / UNIT
            own = (shares * weights[:, None]).T @ shares
            pull = shares.T @ (weights * errors)
            for left in cell.blocks:
                slope[left] += pull
                for right in cell.blocks:
                    curvature[left, :, right] += own
        kept = np.flatnonzero(self.active)
        matrix = curvature.reshape(blocks * parts, blocks * parts)[np.ix_(kept, kept)]
        matrix[np.diag_indices_from(matrix)] += self.stiffness.reshape(-1)[kept]
        found = np.zeros(blocks * parts)
        found[kept] = np.linalg.solve(matrix, -slope.reshape(-1)[kept])
        clipped: Columns = np.clip(found, -LONGEST_STEP, LONGEST_STEP).reshape(effects.shape)
        return clipped


def _descended(problem: _Problem, effects: Columns, cost: float) -> tuple[Columns, float]:
    """Return the best place along the step, and its cost: farther while that gains."""
    step, share = problem.step(effects), 1.0
    tried = problem.cost(effects + step)
    while tried >= cost:
        share /= 2
        if share < SHORTEST_SHARE:
            return effects, cost
        tried = problem.cost(effects + share * step)
    while share >= 1.0:
        farther = problem.cost(effects + 2 * share * step)
        if farther >= tried:
            break
        share, tried = 2 * share, farther
    return effects + share * step, tried


def fit_levels(cases: Iterable[StepCase], spreads: Mapping[str, float]) -> Levels:
    """Return the factors that runs show, on the levels that ``spreads`` names."""
    kept = tuple(cases)
    if not kept:
        return Levels({})
    problem = _Problem(kept, spreads)
    effects = np.zeros(problem.stiffness.shape)
    cost = problem.cost(effects)
    for _ in range(ITERATIONS):
        moved, lower = _descended(problem, effects, cost)
        gained = cost - lower
        effects, cost = moved, lower
        if gained < CONVERGED * max(1.0, cost):
            break
    return Levels(dict(zip(problem.keys, effects, strict=True)))


def pooled(cases: Iterable[StepCase]) -> Levels:
    """Return the factors that training engines have in common; runners issue as no engine does."""
    return fit_levels([case for case in cases if not case.runs_ahead], POOLED)


class StepFactors:
    """The factors of every engine: its own where it has runs, else what engines have in common.

    Either fit is made when it is first asked for.
    """

    def __init__(self, cases: Sequence[StepCase]) -> None:
        self.cases = tuple(cases)
        self.engines = frozenset(case.engine for case in cases)

    @cached_property
    def together(self) -> Levels:
        """Return what runs show of the engines that they are of."""
        return fit_levels(self.cases, TOGETHER)

    @cached_property
    def pooled(self) -> Levels:
        """Return what an engine without runs is taken to be like."""
        return pooled(self.cases)

    def of(self, engine: str, family: str, chip: str = "") -> Columns:
        """Return the factors of an engine on a chip."""
        levels = self.together if engine in self.engines else self.pooled
        return levels.factors(engine, family, chip)

    def step_s(self, case: StepCase) -> float:
        """Return the seconds of a run under its engine's factors."""
        return case.step_s(self.of(case.engine, case.architecture, case.device))
