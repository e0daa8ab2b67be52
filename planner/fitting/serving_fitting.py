"""Fit the parts of prefill and decode, and the waits, to published sweeps.

A point's values are sums over levels: common to all engines, per engine, per chip family
(kernels), per pair of model and chip, and per layout of a pair. Each level is shrunk towards zero,
so that few points do not override what more points show. The factors of engines are fitted without
pair factors, which would absorb what they must explain; pairs and their layouts are fitted
afterwards, and again per release of the engine for pairs measured with several releases: DeepSeek
in NVFP4 on B200 took 85 to 92 ms a token under TensorRT-LLM 1.3.0rc1, 17 to 21 under 1.3.0rc5.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.catalog.reading import data_json
from planner.fitting.serving_model import (
    AWAITED,
    CEILING,
    DECODE,
    FLOOR,
    INTAKE,
    PARTS,
    PASSES,
    PREFILL,
    Pair,
    ServingCase,
    Sweep,
    pack_values,
    sweep_of,
)
from planner.fitting.step_fitting import Columns
from planner.workload.setting import RELEASE, release_key

Strengths = Mapping[str, float]
# Every engine has similar kernels for these.
ENGINE_INDEPENDENT_PARTS = frozenset({"linear", "attention", "elementwise"})
OF_EXPERTS = frozenset({"experts", "further", "expert_exchange"})
TPOT_NOISE, TTFT_NOISE = 0.05, 0.15  # log-ratio noise of repeated measurements
PAIRS_APART = 2.0  # noise between pairs of an engine, relative to noise within a pair
# Rows with unstated conditions lie ten spreads off: Student's t.
FREEDOM = 3.0
ROUNDS, TRIES = 30, 6
DAMPING, EASIER, HARDER, LEAST_DAMPING = 1e-2, 0.2, 5.0, 1e-6
LONGEST_STEP = 1.0
CONVERGED = 1e-4
SCALES = np.zeros((len(PARTS), 2))  # one factor for all decode and one for all prefill parts
SCALES[DECODE, 0] = 1.0
SCALES[PREFILL, 1] = 1.0
DECODE_SCALE = SCALES[:, :1]
OWN_WAITS = np.eye(len(PARTS))[:, [AWAITED, INTAKE]]
OF_DECODING = np.eye(len(PARTS))[:, DECODE]  # parts that a chip family's kernels determine
# What a step of a mixture takes beyond a dense one's, which a pair may have alone: kernels of one
# format and width, tuned or not. An engine measured with one mixture would otherwise give the
# kernels of that mixture to all others.
OWN_EXPERTS = np.eye(len(PARTS))[
    :, [PARTS.index(f"{phase}_{part}") for phase in PASSES for part in sorted(OF_EXPERTS)]
]
PAIR_BASIS = np.hstack([SCALES, OWN_WAITS, OWN_EXPERTS])
PAIR_SCALE_SPREAD = 0.3


@dataclass(frozen=True)
class Level:
    """A group of points with shared effects: members, directions, and prior spreads."""

    members: Columns
    basis: Columns
    spreads: Columns


@dataclass(frozen=True, eq=False)
class ServingFit:
    """The fitted values common to all engines, and the additions of engines, pairs and others."""

    shared: Columns
    engines: Mapping[str, Columns] = field(default_factory=dict)
    families: Mapping[str, Columns] = field(default_factory=dict)
    pairs: Mapping[Pair, Columns] = field(default_factory=dict)
    layouts: Mapping[Pair, Columns] = field(default_factory=dict)
    releases: Mapping[Pair, Columns] = field(default_factory=dict)

    def engine_values(self, engine: str, family: str = "") -> Columns:
        """Return the values of an engine on a chip family, as far as either was measured.

        An unmeasured family takes the mean of the measured families.
        """
        mean_family = np.mean([*self.families.values()], axis=0) if self.families else 0.0
        of_family = self.families.get(family, mean_family)
        return clip_factors(self.shared + self.engines.get(engine, 0.0) + of_family)

    def place_values(
        self, engine: str, group: str, layout: str = "", release: str = ""
    ) -> Columns:
        """Return the values of an engine's group, and its layout or release if fitted."""
        pair, of_layout = self.pairs.get((engine, group), 0.0), self.layouts.get((engine, layout))
        nearest = (
            self.releases.get((engine, release_key(layout, release))),
            None if of_layout is None else pair + of_layout,
            self.releases.get((engine, release_key(group, release))),
        )
        added = next((values for values in nearest if values is not None), pair)
        return clip_factors(self.engine_values(engine, family_of(group)) + added)

    def release_values(self, engine: str, place: str) -> Columns:
        """Return the values of a pair or layout under a release of the engine."""
        family = place.split("/")[1].partition(RELEASE)[0]
        return clip_factors(self.engine_values(engine, family) + self.releases[engine, place])

    def values(self, cases: Sequence[ServingCase]) -> Columns:
        """Return the parameters of each case, [cases, parameters].

        They are of the case's pair of model and family, or of its layout or release, if fitted.
        """
        rows = [self.place_values(c.engine, c.group, c.layout, c.release) for c in cases]
        return np.array(rows).reshape(len(cases), len(PARTS))


def family_of(group: str) -> str:
    """Return the chip family of a group.

    >>> family_of("64x5120x0/hopper")
    'hopper'
    """
    return group.rpartition("/")[2]


def clip_factors(values: Columns) -> Columns:
    """Return values with factors clipped to their bounds."""
    clipped: Columns = np.clip(values, FLOOR, CEILING)
    return clipped


def strengths_without(part: str) -> Strengths:
    """Return the prior spreads chosen without a part.

    A part is a group, for the strengths of engines, or a fold of sweeps, for that of layouts.
    """
    stored = data_json("serving_priors.json")
    own: dict[str, dict[str, float]] = stored["chosen"]
    layouts: dict[str, dict[str, float]] = stored["layouts"]
    return own.get(part, own["none"]) | layouts.get(part, layouts["none"])


def part_of(name: str) -> str:
    """Return the part of a named value without its phase.

    >>> part_of("decode_tensor_parallel"), part_of("steps_awaited")
    ('tensor_parallel', 'steps_awaited')
    """
    phase, _, rest = name.partition("_")
    return rest if phase in {"decode", "prefill"} else name


def spreads(strengths: Strengths) -> Columns:
    """Return the prior spread of each value, before scaling by level."""
    return np.array([strengths.get(part_of(name), strengths["8bit"]) for name in PARTS])


def engine_spreads(strengths: Strengths) -> Columns:
    """Return the prior spreads of an engine's values about the common values."""
    scaled = spreads(strengths) * strengths["engine"]
    scaled[AWAITED] = strengths["engine_waits"]
    for index, name in enumerate(PARTS):
        if part_of(name) in ENGINE_INDEPENDENT_PARTS:
            scaled[index] *= strengths["engine_alike"]
        if part_of(name) in OF_EXPERTS:
            scaled[index] *= strengths["engine_experts"]
    return scaled


def expert_spreads(strengths: Strengths) -> Columns:
    """Return the prior spreads of a pair's expert parts about those of its engine."""
    own: Columns = spreads(strengths) @ OWN_EXPERTS * strengths["pair_experts"]
    return own


def weights_of(cases: Sequence[ServingCase], most: float) -> Columns:
    """Return the weight of each case; a pair's total weight is at most ``most``."""
    points = Counter(case.pair for case in cases)
    return np.array([min(1.0, most / points[case.pair]) for case in cases])


def where_true(flags: Iterable[bool]) -> Columns:
    """Return flags as a column of ones and zeros."""
    return np.array([float(flag) for flag in flags])


def fit_serving(
    cases: Sequence[ServingCase],
    strengths: Strengths,
    requested_pairs: Iterable[Pair] | None = None,
) -> ServingFit:
    """Return the common values and the additions of engines, families and pairs.

    ``requested_pairs`` restricts the fit of pairs to these.
    """
    fit, measured = fit_engines(cases, strengths), {case.pair for case in cases}
    pairs_to_fit = measured if requested_pairs is None else measured.intersection(requested_pairs)
    pairs: dict[Pair, Columns] = {}
    layouts: dict[Pair, Columns] = {}
    releases: dict[Pair, Columns] = {}
    for pair in sorted(pairs_to_fit):
        own = [case for case in cases if case.pair == pair]
        pairs[pair], layout_additions = fit_pair(own, fit, strengths)
        layouts |= {(pair[0], layout): added for layout, added in layout_additions.items()}
        releases |= {(pair[0], name): a for name, a in fit_releases(own, fit, strengths).items()}
    return replace(fit, pairs=pairs, layouts=layouts, releases=releases)


def fit_engines(cases: Sequence[ServingCase], strengths: Strengths) -> ServingFit:
    """Return the values of engines and families."""
    prior_values = pack_values({})
    if not cases:
        return ServingFit(prior_values)
    engines = sorted({case.engine for case in cases})
    families = sorted({family_of(case.group) for case in cases})
    pairs = sorted({case.pair for case in cases})
    base_spreads = spreads(strengths)
    everywhere, identity = np.ones(len(cases)), np.eye(len(PARTS))
    levels = [Level(everywhere, identity, base_spreads * strengths["shared"])]
    for engine in engines:
        members = where_true(case.engine == engine for case in cases)
        levels.append(Level(members, identity, engine_spreads(strengths)))
    for family in families:
        members = where_true(family_of(case.group) == family for case in cases)
        levels.append(Level(members, OF_DECODING, base_spreads[DECODE] * strengths["family"]))
    for pair in pairs:
        members = where_true(case.pair == pair for case in cases)
        levels.append(Level(members, OWN_EXPERTS, expert_spreads(strengths)))
    sweep, weights = sweep_of(cases), weights_of(cases, strengths["points"])
    base = np.tile(prior_values, (len(cases), 1))
    shared, *additions = descend(sweep, weights, base, levels, PAIRS_APART)
    added = dict(zip((*engines, *families), additions, strict=False))
    return ServingFit(
        prior_values + shared,
        {engine: added[engine] for engine in engines},
        {family: OF_DECODING @ added[family] for family in families},
    )


def fit_pair(
    cases: Sequence[ServingCase], fit: ServingFit, strengths: Strengths
) -> tuple[Columns, dict[str, Columns]]:
    """Return a pair's addition to its engine, and each measured layout's addition to the pair.

    A pair has its own waits and a common factor for its passes; in a layout every
    part may differ.
    """
    added, *layout_additions = descend_pair(cases, fit, pair_levels(cases, strengths))
    return PAIR_BASIS @ added, dict(zip(layouts_of(cases), layout_additions, strict=True))


def fit_releases(
    cases: Sequence[ServingCase], fit: ServingFit, strengths: Strengths
) -> dict[str, Columns]:
    """Return the additions of a pair and its layouts to the engine under each release, by place.

    A release has a common factor for decoding. Without several releases there is nothing to fit;
    points without a release count for the pair and its layouts.
    """
    releases, layouts = sorted({case.release for case in cases} - {""}), layouts_of(cases)
    if len({case.release for case in cases}) == 1:
        return {}
    levels = pair_levels(cases, strengths)
    for release in releases:
        members = where_true(case.release == release for case in cases)
        levels.append(Level(members, DECODE_SCALE, np.full(1, PAIR_SCALE_SPREAD)))
    added, *additions = descend_pair(cases, fit, levels)
    of_layouts = dict(zip(layouts, additions, strict=False))
    scales = zip(releases, additions[len(layouts) :], strict=True)
    pair = PAIR_BASIS @ added
    by_release = {release: pair + DECODE_SCALE @ scale for release, scale in scales}
    places = {
        release_key(cases[0].group, release): values for release, values in by_release.items()
    }
    for layout, own in of_layouts.items():
        places |= {
            release_key(layout, release): values + own for release, values in by_release.items()
        }
    return places


def layouts_of(cases: Iterable[ServingCase]) -> list[str]:
    """Return the layouts of cases in alphabetical order."""
    return sorted({case.layout for case in cases})


def pair_levels(cases: Sequence[ServingCase], strengths: Strengths) -> list[Level]:
    """Return the levels of one pair: one for all its cases, then one per layout."""
    own = spreads(strengths)
    own[[AWAITED, INTAKE]] = strengths["waits"]
    pair_spreads = np.concatenate(
        [np.full(2, PAIR_SCALE_SPREAD), own[[AWAITED, INTAKE]], expert_spreads(strengths)]
    )
    levels = [Level(np.ones(len(cases)), PAIR_BASIS, pair_spreads)]
    for layout in layouts_of(cases):
        members = where_true(case.layout == layout for case in cases)
        levels.append(Level(members, np.eye(len(PARTS)), own * strengths["layout"]))
    return levels


def descend_pair(
    cases: Sequence[ServingCase], fit: ServingFit, levels: Sequence[Level]
) -> list[Columns]:
    """Return each level's addition to the engine on the pair's chip family."""
    base = np.array([fit.engine_values(c.engine, family_of(c.group)) for c in cases])
    return descend(sweep_of(cases), np.ones(len(cases)), base, levels)


@dataclass(frozen=True)
class _Objective:
    """The loss of summed levels, with its first and second derivatives."""

    sweep: Sweep
    weights: Columns
    base: Columns
    levels: Sequence[Level]
    apart: float

    def values(self, added: Columns) -> Columns:
        """Return the parameters of every point, [points, parameters], not yet clipped.

        ``added`` are the additions of all levels to the base values, concatenated.
        """
        point_values, start = self.base.copy(), 0
        for level in self.levels:
            size = level.basis.shape[1]
            point_values += level.members[:, None] * (level.basis @ added[start : start + size])
            start += size
        return point_values

    def spreads(self) -> Columns:
        """Return the concatenated spreads of all levels."""
        return np.concatenate([level.spreads for level in self.levels])

    def wrong(self, values: Columns) -> Columns:
        """Return the errors of both times of every point, in units of noise, as they count."""
        scaled: Columns = self.sweep.wrong(values) / self.noise
        scaled[:, 1] *= self.sweep.counts_ttft
        return scaled

    @property
    def noise(self) -> Columns:
        """Return the log-ratio noise of both times between points with equal values."""
        return self.apart * np.array([TPOT_NOISE, TTFT_NOISE])

    def regret(self, added: Columns) -> float:
        """Return the loss: robust errors plus squared distances from zero."""
        wrong = self.wrong(clip_factors(self.values(added)))
        regrets = FREEDOM * np.log1p(wrong**2 / FREEDOM).sum(axis=1)
        return float(self.weights @ regrets) + float(((added / self.spreads()) ** 2).sum())

    def derivatives(self, added: Columns) -> tuple[Columns, Columns]:
        """Return half of the gradient and of the curvature of the loss."""
        unbounded = self.values(added)
        values = clip_factors(unbounded)
        wrong = self.wrong(values)
        slopes = self.sweep.slopes(values) / self.noise[:, None]
        slopes *= (values == unbounded)[:, None, :]
        slopes[:, 1] *= self.sweep.counts_ttft[:, None]
        robust_weights = self.weights[:, None] / (1 + wrong**2 / FREEDOM)
        pull = np.einsum("pt,ptv->pv", robust_weights * wrong, slopes)
        # Each point's slopes along the directions of all levels, concatenated.
        level_slopes = [
            level.members[:, None, None] * (slopes @ level.basis) for level in self.levels
        ]
        slopes_matrix = np.concatenate(level_slopes, axis=2).reshape(2 * len(values), -1)
        curvature = slopes_matrix.T @ (slopes_matrix * robust_weights.reshape(-1, 1))
        gradient = np.concatenate(
            [level.basis.T @ (level.members @ pull) for level in self.levels]
        )
        spread = self.spreads()
        curvature[np.diag_indices(len(spread))] += 1 / spread**2
        return gradient + added / spread**2, curvature


def descend(
    sweep: Sweep, weights: Columns, base: Columns, levels: Sequence[Level], apart: float = 1.0
) -> list[Columns]:
    """Return each level's addition at the minimum, by damped Gauss-Newton steps.

    ``apart`` scales the noise between points with equal values relative to repeated measurements.

    Source: Levenberg 1944, Marquardt 1963; robust weights from Student's t errors (Lange, Little
    and Taylor 1989).
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
