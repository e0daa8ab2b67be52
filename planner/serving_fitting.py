"""Fits the parts of prefill and decode, and how callers fall together, to published sweeps.

A point's values are sums over levels: what all engines have in common, what its engine adds, what
the kernels of its family of chips add, and what its pair of model and chip and the layout inside
the pair add. Each level is drawn to zero, so that few points leave what is known from more. The
factors of engines are fitted without factors of pairs, which would take from them what they have
to explain; pairs and their layouts add theirs afterwards, and once more under each release of the
engine, where a pair was measured with several: DeepSeek in NVFP4 on B200 took 85 to 92 ms a token
under TensorRT-LLM 1.3.0rc1, 17 to 21 under 1.3.0rc5.
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
from planner.workload.swept import RELEASE, told

Strengths = Mapping[str, float]
ALIKE = frozenset({"linear", "attention", "elementwise"})  # the same kernels in every engine
OF_EXPERTS = frozenset({"experts", "further", "expert_exchange"})
TPOT_NOISE, TTFT_NOISE = 0.05, 0.15  # how far apart repeated measurements lie, as log ratios
PAIRS_APART = 2.0  # pairs lie further from their engine than measurements of one pair lie apart
# Rows that were measured with something that they do not say lie ten spreads away: Student's t.
FREEDOM = 3.0
ROUNDS, TRIES = 30, 6
DAMPING, EASIER, HARDER, LEAST_DAMPING = 1e-2, 0.2, 5.0, 1e-6
LONGEST_STEP = 1.0
CONVERGED = 1e-4
SCALES = np.zeros((len(NAMES), 2))  # a pair's passes are slower or faster as a whole
SCALES[DECODE, 0] = 1.0
SCALES[PREFILL, 1] = 1.0
DECODE_SCALE = SCALES[:, :1]
OWN_HABITS = np.eye(len(NAMES))[:, FREE]
OF_DECODING = np.eye(len(NAMES))[:, DECODE]  # what kernels of a family of chips do alike
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
    families: Mapping[str, Columns] = field(default_factory=dict)
    pairs: Mapping[Pair, Columns] = field(default_factory=dict)
    layouts: Mapping[Pair, Columns] = field(default_factory=dict)
    told: Mapping[Pair, Columns] = field(default_factory=dict)

    def engine_values(self, engine: str, family: str = "") -> Columns:
        """Return the values of an engine on a family of chips, or what is known of either.

        A family that nobody measured is taken to be as the measured ones are in the mean.
        """
        usual = np.mean([*self.families.values()], axis=0) if self.families else 0.0
        of_family = self.families.get(family, usual)
        return bounded(self.shared + self.engines.get(engine, 0.0) + of_family)

    def place_values(
        self, engine: str, group: str, layout: str = "", release: str = ""
    ) -> Columns:
        """Return the values of an engine's group, of a layout or a release that the fit knows."""
        pair, of_layout = self.pairs.get((engine, group), 0.0), self.layouts.get((engine, layout))
        nearest = (
            self.told.get((engine, told(layout, release))),
            None if of_layout is None else pair + of_layout,
            self.told.get((engine, told(group, release))),
        )
        added = next((one for one in nearest if one is not None), pair)
        return bounded(self.engine_values(engine, family_of(group)) + added)

    def told_values(self, engine: str, place: str) -> Columns:
        """Return the values of a pair or of a layout under a release of the engine."""
        family = place.split("/")[1].partition(RELEASE)[0]
        return bounded(self.engine_values(engine, family) + self.told[engine, place])

    def values(self, cases: Sequence[ServingCase]) -> Columns:
        """Return the values of each case, those of its pair and layout where the fit knows it."""
        rows = [self.place_values(c.engine, c.group, c.layout, c.release) for c in cases]
        return np.array(rows).reshape(len(cases), len(NAMES))


def family_of(group: str) -> str:
    """Return the family of chips of a group.

    >>> family_of("64x5120x0/hopper")
    'hopper'
    """
    return group.rpartition("/")[2]


def bounded(values: Columns) -> Columns:
    """Return values without factors below what is possible."""
    found = values.copy()
    found[..., : len(PARTS)] = np.maximum(found[..., : len(PARTS)], FLOOR)
    return found


def strengths_without(part: str) -> Strengths:
    """Return the spreads of the priors that a search found without looking at a part.

    A part is a group, for the strengths of engines, or a fold of sweeps, for that of layouts.
    """
    found = data_json("serving_priors.json")
    own: dict[str, dict[str, float]] = found["chosen"]
    layouts: dict[str, dict[str, float]] = found["layouts"]
    return own.get(part, own["none"]) | layouts.get(part, layouts["none"])


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


def fit_serving(
    cases: Sequence[ServingCase], strengths: Strengths, asked: Iterable[Pair] | None = None
) -> ServingFit:
    """Return what all points share, what engines and families add, and what pairs add.

    ``asked`` are the pairs that will be asked for: of others the fit tells nothing.
    """
    fit, habits = fit_engines(cases, strengths)
    wanted = habits if asked is None else {pair for pair in asked if pair in habits}
    pairs: dict[Pair, Columns] = {}
    layouts: dict[Pair, Columns] = {}
    releases: dict[Pair, Columns] = {}
    for pair in sorted(wanted):
        own = [case for case in cases if case.pair == pair]
        pairs[pair], found = fit_pair(own, fit, strengths)
        layouts |= {(pair[0], layout): added for layout, added in found.items()}
        releases |= {(pair[0], name): a for name, a in fit_releases(own, fit, strengths).items()}
    return replace(fit, pairs=pairs, layouts=layouts, told=releases)


def fit_engines(
    cases: Sequence[ServingCase], strengths: Strengths
) -> tuple[ServingFit, dict[Pair, Columns]]:
    """Return what all points share, engines and families add, and the habits of pairs beside."""
    whole = packed({})
    if not cases:
        return ServingFit(whole), {}
    engines = sorted({case.engine for case in cases})
    families = sorted({family_of(case.group) for case in cases})
    pairs = sorted({case.pair for case in cases})
    own = spreads(strengths)
    everywhere, identity = np.ones(len(cases)), np.eye(len(NAMES))
    levels = [Level(everywhere, identity, own * strengths["shared"])]
    for engine in engines:
        members = where_true(case.engine == engine for case in cases)
        levels.append(Level(members, identity, engine_spreads(strengths)))
    for family in families:
        members = where_true(family_of(case.group) == family for case in cases)
        levels.append(Level(members, OF_DECODING, own[DECODE] * strengths["family"]))
    for pair in pairs:
        members = where_true(case.pair == pair for case in cases)
        levels.append(Level(members, OWN_HABITS, own[FREE] * strengths["habits"]))
    sweep, weights = sweep_of(cases), weights_of(cases, strengths["points"])
    base = np.tile(whole, (len(cases), 1))
    shared, *found = descend(sweep, weights, base, levels, PAIRS_APART)
    added = dict(zip((*engines, *families), found, strict=False))
    habits = dict(zip(pairs, found[-len(pairs) :], strict=True))
    fit = ServingFit(
        whole + shared,
        {engine: added[engine] for engine in engines},
        {family: OF_DECODING @ added[family] for family in families},
    )
    return fit, habits


def fit_pair(
    cases: Sequence[ServingCase], fit: ServingFit, strengths: Strengths
) -> tuple[Columns, dict[str, Columns]]:
    """Return what a pair adds to its engine, and what each of its measured layouts adds to that.

    A pair has habits of its own and slower or faster passes; of a layout every part may differ.
    """
    added, *found = descend_pair(cases, fit, pair_levels(cases, strengths))
    return PAIR_BASIS @ added, dict(zip(layouts_of(cases), found, strict=True))


def fit_releases(
    cases: Sequence[ServingCase], fit: ServingFit, strengths: Strengths
) -> dict[str, Columns]:
    """Return what a pair and its layouts add to the engine under each release, by place.

    A release decodes slower or faster as a whole. Where all points are of one release there is
    nothing to tell; points that name none count for the pair and its layouts.
    """
    releases, layouts = sorted({case.release for case in cases} - {""}), layouts_of(cases)
    if len({case.release for case in cases}) == 1:
        return {}
    levels = pair_levels(cases, strengths)
    for release in releases:
        members = where_true(case.release == release for case in cases)
        levels.append(Level(members, DECODE_SCALE, np.full(1, PAIR_SCALE_SPREAD)))
    added, *found = descend_pair(cases, fit, levels)
    of_layouts = dict(zip(layouts, found, strict=False))
    scales = zip(releases, found[len(layouts) :], strict=True)
    pair = PAIR_BASIS @ added
    whole = {release: pair + DECODE_SCALE @ scale for release, scale in scales}
    places = {told(cases[0].group, release): values for release, values in whole.items()}
    for layout, own in of_layouts.items():
        places |= {told(layout, release): values + own for release, values in whole.items()}
    return places


def layouts_of(cases: Iterable[ServingCase]) -> list[str]:
    """Return the layouts of cases in alphabetical order."""
    return sorted({case.layout for case in cases})


def pair_levels(cases: Sequence[ServingCase], strengths: Strengths) -> list[Level]:
    """Return the levels of one pair: what all its cases share, then what each layout adds."""
    own = spreads(strengths)
    own[FREE] *= strengths["habits"]
    pair_spreads = np.concatenate([np.full(2, PAIR_SCALE_SPREAD), own[FREE]])
    levels = [Level(np.ones(len(cases)), PAIR_BASIS, pair_spreads)]
    for layout in layouts_of(cases):
        members = where_true(case.layout == layout for case in cases)
        levels.append(Level(members, np.eye(len(NAMES)), own * strengths["layout"]))
    return levels


def descend_pair(
    cases: Sequence[ServingCase], fit: ServingFit, levels: Sequence[Level]
) -> list[Columns]:
    """Return what each level adds to the engine on the pair's family of chips."""
    base = np.array([fit.engine_values(c.engine, family_of(c.group)) for c in cases])
    return descend(sweep_of(cases), np.ones(len(cases)), base, levels)


@dataclass(frozen=True)
class _Objective:
    """The regret of values that levels add up to, with its first and second derivatives."""

    sweep: Sweep
    weights: Columns
    base: Columns
    levels: Sequence[Level]
    apart: float

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
        found: Columns = self.sweep.wrong(values) / self.noise
        return found

    @property
    def noise(self) -> Columns:
        """Return how far apart points lie that have the same values, as log ratios."""
        return self.apart * np.array([TPOT_NOISE, TTFT_NOISE])

    def regret(self, added: Columns) -> float:
        """Return how wrong the values are and how far from zero; gross errors hardly count."""
        wrong = self.wrong(bounded(self.values(added)))
        regrets = FREEDOM * np.log1p(wrong**2 / FREEDOM).sum(axis=1)
        return float(self.weights @ regrets) + float(((added / self.spreads()) ** 2).sum())

    def derivatives(self, added: Columns) -> tuple[Columns, Columns]:
        """Return the gradient of the regret and its curvature, both halved."""
        free = self.values(added)
        values = bounded(free)
        wrong = self.wrong(values)
        slopes = self.sweep.slopes(values) / self.noise[:, None]
        slopes *= (values == free)[:, None, :]
        heed = self.weights[:, None] / (1 + wrong**2 / FREEDOM)
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
    sweep: Sweep, weights: Columns, base: Columns, levels: Sequence[Level], apart: float = 1.0
) -> list[Columns]:
    """Return what each level adds at the least regret, by damped Gauss-Newton steps.

    ``apart`` is how much further than repeated measurements points of one value lie apart.
    Source: Levenberg 1944, Marquardt 1963; points far off are heeded less (Lange, Little and
    Taylor 1989: errors of Student's t).
    """
    objective = _Objective(sweep, weights, base, levels, apart)
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
