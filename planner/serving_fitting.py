"""Fits the parts of prefill and decode, and how callers fall together, to published sweeps.

A point's values are sums over levels: what all engines have in common, what its engine adds, and
what its pair of model and chip adds. Each level is drawn to zero, so that few points leave what is
known from more. The factors of engines are fitted without factors of pairs, which
would take from them what they have to explain; pairs add theirs afterwards.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.catalog.reading import data_json
from planner.fitting import Columns
from planner.serving_cases import Pair, ServingCase
from planner.serving_model import (
    DECODE,
    FLOOR,
    FREE,
    NAMES,
    PARTS,
    PREFILL,
    Sweep,
    packed,
    sweep_of,
)

Strengths = Mapping[str, float]
ALIKE = frozenset({"linear", "attention", "elementwise"})  # the same kernels in every engine
OF_EXPERTS = frozenset({"experts", "further", "expert_exchange"})
TPOT_NOISE, TTFT_NOISE = 0.05, 0.15  # how far apart repeated measurements lie, as log ratios
ROUNDS, TRIES = 30, 6
DAMPING, EASIER, HARDER, LEAST_DAMPING = 1e-2, 0.2, 5.0, 1e-6
LONGEST_STEP = 1.0
CONVERGED = 1e-4
SCALES = np.zeros((len(NAMES), 2))  # a pair's passes are slower or faster as a whole
SCALES[DECODE, 0] = 1.0
SCALES[PREFILL, 1] = 1.0
OWN_HABITS = np.eye(len(NAMES))[:, FREE]
PAIR_BASIS = np.hstack([SCALES, OWN_HABITS])
PAIR_SCALE_SPREAD = 0.3


@dataclass(frozen=True)
class Level:
    """What some points share: which ones, in which directions, and how far from zero."""

    members: Columns
    basis: Columns
    spreads: Columns


@dataclass(frozen=True, eq=False)
class ServingFit:
    """What was fitted: a row of values of all engines, and what engines and pairs add to it."""

    shared: Columns
    engines: Mapping[str, Columns] = field(default_factory=dict)
    pairs: Mapping[Pair, Columns] = field(default_factory=dict)

    def engine_values(self, engine: str) -> Columns:
        """Return the values of an engine, or of all where it is not known."""
        return self.shared + self.engines.get(engine, 0.0)

    def values(self, cases: Sequence[ServingCase]) -> Columns:
        """Return the values of each case, those of its pair where the fit knows it."""
        rows = [
            bounded(self.engine_values(case.engine)) + self.pairs.get(case.pair, 0.0)
            for case in cases
        ]
        return np.array(rows).reshape(len(cases), len(NAMES))


def bounded(values: Columns) -> Columns:
    """Return values without factors below what is possible."""
    found = values.copy()
    found[..., : len(PARTS)] = np.maximum(found[..., : len(PARTS)], FLOOR)
    return found


def strengths_without(group: str) -> Strengths:
    """Return the spreads of the priors that a search found without looking at a group."""
    chosen = data_json("serving_priors.json")["chosen"]
    found: dict[str, float] = chosen.get(group, chosen["none"])
    return found


def part_of(name: str) -> str:
    """Return the part of a named value without its phase.

    >>> part_of("decode_tensor_parallel"), part_of("burst_ratio")
    ('tensor_parallel', 'burst_ratio')
    """
    phase, _, rest = name.partition("_")
    return rest if phase in {"decode", "prefill"} else name


def spreads(strengths: Strengths) -> Columns:
    """Return how far each value may lie from its prior, before a level's own share."""
    return np.array([strengths.get(part_of(name), strengths["8bit"]) for name in NAMES])


def engine_spreads(strengths: Strengths) -> Columns:
    """Return how far an engine's values may lie from what engines have in common."""
    found = spreads(strengths) * strengths["engine"]
    for index, name in enumerate(NAMES):
        if part_of(name) in ALIKE:
            found[index] *= strengths["engine_alike"]
        if part_of(name) in OF_EXPERTS:
            found[index] *= strengths["engine_experts"]
    return found


def weights_of(cases: Sequence[ServingCase], most: float) -> Columns:
    """Return how much each case counts: together those of a pair count as ``most`` do."""
    points = Counter(case.pair for case in cases)
    return np.array([min(1.0, most / points[case.pair]) for case in cases])


def where_true(flags: Iterable[bool]) -> Columns:
    """Return flags as a column of ones and zeros."""
    return np.array([float(flag) for flag in flags])


def fit_serving(cases: Sequence[ServingCase], strengths: Strengths) -> ServingFit:
    """Return what all points share, what engines add and what the pairs among the cases add."""
    fit, habits = fit_engines(cases, strengths)
    return replace(fit, pairs=fit_pairs(cases, fit, habits, strengths))


def fit_engines(
    cases: Sequence[ServingCase], strengths: Strengths
) -> tuple[ServingFit, dict[Pair, Columns]]:
    """Return what all points share and engines add, and the habits of pairs beside it."""
    whole = packed({})
    if not cases:
        return ServingFit(whole), {}
    engines = sorted({case.engine for case in cases})
    pairs = sorted({case.pair for case in cases})
    own = spreads(strengths)
    everywhere, identity = np.ones(len(cases)), np.eye(len(NAMES))
    levels = [Level(everywhere, identity, own * strengths["shared"])]
    for engine in engines:
        members = where_true(case.engine == engine for case in cases)
        levels.append(Level(members, identity, engine_spreads(strengths)))
    for pair in pairs:
        members = where_true(case.pair == pair for case in cases)
        levels.append(Level(members, OWN_HABITS, own[FREE] * strengths["habits"]))
    sweep, weights = sweep_of(cases), weights_of(cases, strengths["points"])
    base = np.tile(whole, (len(cases), 1))
    found = descend(sweep, weights, base, levels)
    added = dict(zip(engines, found[1:], strict=False))
    habits = dict(zip(pairs, found[1 + len(engines) :], strict=True))
    return ServingFit(whole + found[0], added), habits


def fit_pairs(
    cases: Sequence[ServingCase],
    fit: ServingFit,
    habits: Mapping[Pair, Columns],
    strengths: Strengths,
) -> dict[Pair, Columns]:
    """Return what each pair adds to its engine: habits, and slower or faster passes."""
    own = spreads(strengths)[FREE] * strengths["habits"]
    level_spreads = np.concatenate([np.full(2, PAIR_SCALE_SPREAD), own])
    found = {}
    for pair in habits:
        kept = [case for case in cases if case.pair == pair]
        base = bounded(np.tile(fit.engine_values(pair[0]), (len(kept), 1)))
        level = Level(np.ones(len(kept)), PAIR_BASIS, level_spreads)
        (added,) = descend(sweep_of(kept), np.ones(len(kept)), base, [level])
        found[pair] = PAIR_BASIS @ added
    return found


@dataclass(frozen=True)
class _Objective:
    """The regret of values that levels add up to, with its first and second derivatives."""

    sweep: Sweep
    weights: Columns
    base: Columns
    levels: Sequence[Level]

    def values(self, added: Columns) -> Columns:
        """Return the values of every point."""
        found, at = self.base.copy(), 0
        for level in self.levels:
            size = level.basis.shape[1]
            found += level.members[:, None] * (level.basis @ added[at : at + size])
            at += size
        return found

    def spreads(self) -> Columns:
        """Return the spreads of all levels in a row."""
        return np.concatenate([level.spreads for level in self.levels])

    def wrong(self, values: Columns) -> Columns:
        """Return how wrong both times of every point are, in units of their noise."""
        found: Columns = self.sweep.wrong(values) / np.array([TPOT_NOISE, TTFT_NOISE])
        return found

    def regret(self, added: Columns) -> float:
        """Return how wrong the values are and how far from zero; one gross error counts once."""
        wrong = self.wrong(bounded(self.values(added)))
        regrets = 2 * (np.sqrt(1 + wrong**2) - 1).sum(axis=1)
        return float(self.weights @ regrets) + float(((added / self.spreads()) ** 2).sum())

    def derivatives(self, added: Columns) -> tuple[Columns, Columns]:
        """Return the gradient of the regret and its curvature, both halved."""
        free = self.values(added)
        values = bounded(free)
        wrong = self.wrong(values)
        slopes = self.sweep.slopes(values) / np.array([TPOT_NOISE, TTFT_NOISE])[:, None]
        slopes *= (values == free)[:, None, :]
        heed = self.weights[:, None] / np.sqrt(1 + wrong**2)
        pull = np.einsum("pt,ptv->pv", heed * wrong, slopes)
        # All levels of one point at once: each point's slopes along every level's directions.
        along = [level.members[:, None, None] * (slopes @ level.basis) for level in self.levels]
        whole = np.concatenate(along, axis=2).reshape(2 * len(values), -1)
        curvature = whole.T @ (whole * heed.reshape(-1, 1))
        gradient = np.concatenate(
            [level.basis.T @ (level.members @ pull) for level in self.levels]
        )
        spread = self.spreads()
        curvature[np.diag_indices(len(spread))] += 1 / spread**2
        return gradient + added / spread**2, curvature


def descend(
    sweep: Sweep, weights: Columns, base: Columns, levels: Sequence[Level]
) -> list[Columns]:
    """Return what each level adds at the least regret, by damped Gauss-Newton steps.

    Source: Levenberg 1944, Marquardt 1963; points far off are heeded less (Charbonnier's loss).
    """
    objective = _Objective(sweep, weights, base, levels)
    added = np.zeros(len(objective.spreads()))
    least, damping = objective.regret(added), DAMPING
    for _ in range(ROUNDS):
        gradient, curvature = objective.derivatives(added)
        before = least
        for _ in range(TRIES):
            damped = curvature + damping * np.diag(np.diag(curvature))
            step = np.clip(-np.linalg.solve(damped, gradient), -LONGEST_STEP, LONGEST_STEP)
            regret = objective.regret(added + step)
            if regret < least:
                added, least = added + step, regret
                damping = max(damping * EASIER, LEAST_DAMPING)
                break
            damping *= HARDER
        if before - least < CONVERGED * before:
            break
    ends = np.cumsum([level.basis.shape[1] for level in levels])
    return np.split(added, ends[:-1])


def serving_errors(cases: Sequence[ServingCase], fit: ServingFit) -> tuple[Columns, Columns]:
    """Return the relative errors of the time per output token and to the first token."""
    wrong = np.expm1(sweep_of(cases).wrong(fit.values(cases)))
    return wrong[:, 0], wrong[:, 1]
