"""Serving factors of each engine, with errors on left-out sweeps, and their prior strengths."""

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.fitting.evidence import leave_one_group_out, round_factor, table
from planner.fitting.serving_fitting import (
    ServingFit,
    Strengths,
    fit_engines,
    fit_serving,
    serving_errors,
    strengths_without,
)
from planner.fitting.serving_model import (
    ServingCase,
    consistent_groups,
    natural,
    serving_case,
)
from planner.fitting.step_fitting import Columns
from planner.specs.base import JsonObject
from planner.specs.estimate import ErrorClass

TABLES = ("serving_dense", "serving_sparse", "serving_inferencex")
FOLDS = 5
COVERED = 0.8
Z_80 = 1.2816
SEEN: ErrorClass = "same family"
UNSEEN: ErrorClass = "datasheet only"
DENSE, SPARSE = "dense", "sparse"
# Groups that the data collection recommends leaving out as a whole: model shape and chip, device,
# engine ("" for every engine).
ADVISED = (
    ("94x4096x128/hopper", "h200-sxm-141gb", "vllm"),
    ("64x5120x0/hopper", "h100-sxm5-80gb", "vllm"),
    ("60x4096x512/blackwell", "b200-sxm", "sglang"),
    ("61x7168x256/hopper", "h200-sxm-141gb", ""),
    ("32x4096x0/hopper", "h200-sxm-141gb", "sglang"),
)


@cache
def serving_cases() -> tuple[ServingCase, ...]:
    """Return every consistent row of the serving tables."""
    return consistent_groups(serving_case(row) for name in TABLES for row in table(name))


def fold_of(case: ServingCase) -> str:
    """Return the fold of a point; all points of a sweep are in one fold."""
    return str(zlib.crc32(case.sweep.encode()) % FOLDS)


def group_of(case: ServingCase) -> str:
    """Return the (model, chip architecture) pair that a point was measured on."""
    return case.group


def advised_of(case: ServingCase) -> str:
    """Return the recommended left-out group of a point, or an empty string."""
    for group, device, engine in ADVISED:
        if (case.group, case.device) == (group, device) and engine in {"", case.engine}:
            return f"{group} {engine}".strip()
    return ""


def kind_of(case: ServingCase) -> str:
    """Return whether a point's model is dense or a mixture of experts."""
    return SPARSE if case.is_sparse else DENSE


@cache
def held_out(
    cases: tuple[ServingCase, ...], part_of: Callable[[ServingCase], str]
) -> tuple[Columns, Columns, tuple[ServingCase, ...]]:
    """Return both errors of each point, fitted without its part, and the points in order.

    Prior strengths are those chosen without the part's pair.
    """
    tpots, ttfts = [], []
    order: list[ServingCase] = []
    for part, left_out, rest in leave_one_group_out(cases, part_of):
        if not part:
            continue
        strengths = strengths_without(part.partition(" ")[0])
        fit = fit_serving(rest, strengths, {case.pair for case in left_out})
        tpot, ttft = serving_errors(left_out, fit)
        tpots.append(tpot)
        ttfts.append(ttft)
        order += left_out
    return np.concatenate(tpots), np.concatenate(ttfts), tuple(order)


def counts_ttft(cases: Sequence[ServingCase]) -> npt.NDArray[np.bool_]:
    """Return whether it is known how the clients of each point sent their requests."""
    return np.array([case.counts_ttft > 0 for case in cases], dtype=bool)


def interval_spread(errors: Columns) -> float:
    """Return the log spread whose 80 % interval covers four fifths of these errors."""
    log_error = float(np.quantile(np.abs(np.log1p(errors)), COVERED))
    return round_factor(log_error / Z_80)


def spread_name(error_class: ErrorClass, kind: str) -> str:
    """Return the key of a spread.

    >>> spread_name("same family", "dense"), spread_name("same family", "sparse")
    ('same family', 'same family, sparse')
    """
    return f"{error_class}, {kind}" if kind == SPARSE else error_class


def spreads(cases: tuple[ServingCase, ...]) -> dict[str, dict[str, float]]:
    """Return the spreads of both times by error class and kind of model."""
    spread_fields: dict[str, dict[str, float]] = {"tpot_spreads": {}, "ttft_spreads": {}}
    parts: tuple[tuple[ErrorClass, Callable[[ServingCase], str]], ...] = (
        (SEEN, fold_of),
        (UNSEEN, group_of),
    )
    for error_class, part_of in parts:
        tpots, ttfts, order = held_out(cases, part_of)
        for kind in sorted({kind_of(case) for case in order}):
            of_kind = np.array([kind_of(case) == kind for case in order])
            name, counted = spread_name(error_class, kind), of_kind & counts_ttft(order)
            for field, errors in (
                ("tpot_spreads", tpots[of_kind]),
                ("ttft_spreads", ttfts[counted]),
            ):
                spread_fields[field][name] = round_factor(interval_spread(errors))
    return spread_fields


def factors_by_name(values: Columns) -> dict[str, float]:
    """Return factors by name."""
    return {name: round_factor(factor) for name, factor in natural(values).items()}


def engine_fields(fit: ServingFit, engine: str) -> dict[str, Any]:
    """Return the fields of one engine: factors, overall and by place.

    A place is a chip family, a pair of model and family, or a layout of a pair; the latter two
    also per release of the engine.
    """
    families = {family: fit.engine_values(engine, family) for family in sorted(fit.families)}
    groups = sorted(group for owner, group in fit.pairs if owner == engine)
    places = {group: fit.place_values(engine, group) for group in groups}
    for owner, layout in sorted(fit.layouts):
        if owner == engine:
            places[layout] = fit.place_values(engine, group_of_layout(layout), layout)
    for owner, place in sorted(fit.releases):
        if owner == engine:
            places[place] = fit.release_values(engine, place)
    everywhere = {"any": fit.engine_values(engine)}
    factors = {**everywhere, **families, **places}
    fields: dict[str, Any] = {
        "serving_factors": {name: factors_by_name(values) for name, values in factors.items()},
    }
    if engine:
        fields["fitted_groups"] = groups
    return fields


def group_of_layout(layout: str) -> str:
    """Return the group of a layout.

    >>> group_of_layout("32x4096x0/hopper/h100-sxm5-80gb/bf16/4-1-1")
    '32x4096x0/hopper'
    """
    shape, family, _ = layout.split("/", 2)
    return f"{shape}/{family}"


def build_serving_factors(common: str) -> dict[str, dict[str, Any]]:
    """Return the serving fields of every engine, and of their common factors."""
    cases = serving_cases()
    fit, widths = fit_serving(cases, strengths_without("")), spreads(cases)
    fields_by_engine = {common: {**engine_fields(fit, ""), **widths}}
    for engine in sorted({case.engine for case in cases}):
        fields_by_engine[engine] = {**engine_fields(fit, engine), **widths}
    return fields_by_engine


def advised_report(summary: Callable[[Columns], JsonObject]) -> JsonObject:
    """Return the errors on the groups that the data collection recommends leaving out."""
    tpots, ttfts, order = held_out(serving_cases(), advised_of)
    return {
        "time per output token, advised groups": summary(tpots),
        "time to first token, advised groups": summary(ttfts[counts_ttft(order)]),
    }


# Choose the prior strengths of the serving fit by cross-validation.
#
# Each pair of model and chip is left out in turn and predicted from the others. A strength changes
# only if the mean error decreases by more than its standard error over the pairs. The choice is
# repeated with each pair excluded entirely: the accuracy page's figures for an unseen pair use
# strengths chosen without it. The freedom of layouts within a pair is chosen in the same manner
# over the folds of sweeps that the page leaves out.


# Candidate values of each strength; the search starts at the first.
GRID: dict[str, tuple[float, ...]] = {
    "experts": (0.3, 0.15, 0.6),
    "further": (1.6, 0.8, 0.4),
    "issue": (0.25, 0.12, 0.5),
    "linear": (0.1, 0.2),
    "attention": (0.3, 0.15),
    "tensor_parallel": (0.2, 0.1, 0.4),
    "elementwise": (1.5, 0.7),
    "shared": (1.0, 0.5),
    "engine": (0.3, 0.15, 0.6),
    "engine_alike": (0.3, 1.0),
    "engine_experts": (1.0, 0.5, 2.0),
    "family": (0.5, 0.25, 1.0),
    "waits": (0.6, 1.0),
    "points": (10.0, 5.0, 20.0),
    "pair_experts": (1.0, 0.5, 2.0, 4.0),
}
# Freedom of a layout's parts relative to its pair, in spreads of the parts.
LAYOUT_GRID: dict[str, tuple[float, ...]] = {"layout": (1.0, 0.5, 2.0)}
FIXED = {
    "expert_exchange": 0.5,
    "scheduling": 0.3,
    # Hosts process their requests in Python or in C++, with or without one stream each.
    "requests": 1.0,
    "8bit": 0.2,
    "4bit": 0.2,
    "intake": 0.3,
    "steps_awaited": 0.4,
    "engine_waits": 0.4,
}
START: dict[str, float] = FIXED | {name: tried[0] for name, tried in GRID.items()}
TTFT_SHARE = 0.375  # ratio of the goals, 15 and 40 %
GROSSEST = 2.0  # errors beyond a factor of seven count the same


@dataclass(frozen=True)
class Search:
    """A cross-validation: left-out part, fit, unit of averaging, and candidate values."""

    part_of: Callable[[ServingCase], str]
    fit: Callable[[Sequence[ServingCase], Sequence[ServingCase], Strengths], ServingFit]
    unit_of: Callable[[ServingCase], str]
    grid: Mapping[str, tuple[float, ...]]


def of_engines(
    rest: Sequence[ServingCase], _: Sequence[ServingCase], strengths: Strengths
) -> ServingFit:
    """Return the fit of engines only, from which an unseen pair is predicted."""
    return fit_engines(rest, strengths)


def of_pairs(
    rest: Sequence[ServingCase], left: Sequence[ServingCase], strengths: Strengths
) -> ServingFit:
    """Return the fit that includes the other points of the left-out points' pairs."""
    return fit_serving(rest, strengths, {case.pair for case in left})


ENGINES = Search(group_of, of_engines, lambda case: f"{case.engine} {case.group}", GRID)
LAYOUTS = Search(fold_of, of_pairs, lambda case: case.sweep, LAYOUT_GRID)


def left_out_errors(
    cases: Sequence[ServingCase], strengths: Strengths, search: Search = ENGINES
) -> Columns:
    """Return the mean error of each unit, such as a pair, under a fit without its part."""
    distances: dict[str, list[float]] = defaultdict(list)
    for _, left_out, rest in leave_one_group_out(cases, search.part_of):
        errors = serving_errors(left_out, search.fit(rest, left_out, strengths))
        tpot, ttft = (np.abs(np.log1p(error)) for error in errors)
        combined = tpot + TTFT_SHARE * np.minimum(ttft, GROSSEST) * counts_ttft(left_out)
        for case, distance in zip(left_out, combined, strict=True):
            distances[search.unit_of(case)].append(float(distance))
    return np.array([float(np.mean(unit_errors)) for unit_errors in distances.values()])


def is_better(distances: Columns, best: Columns) -> bool:
    """Return whether the mean error decreases by more than its standard error.

    >>> is_better(np.array([0.1, 0.2]), np.array([0.2, 0.3]))
    True
    >>> is_better(np.array([0.1, 0.3]), np.array([0.3, 0.2]))
    False
    """
    gains = best - distances
    return bool(gains.mean() > gains.std(ddof=1) / np.sqrt(len(gains)))


def choose_strengths(
    cases: Sequence[ServingCase], search: Search = ENGINES, start: Strengths = START
) -> dict[str, float]:
    """Return the strengths of least error, by coordinate search."""
    best = {**start, **{name: candidates[0] for name, candidates in search.grid.items()}}
    least = left_out_errors(cases, best, search)
    for name, candidates in search.grid.items():
        for value in candidates[1:]:
            other = {**best, name: value}
            distances = left_out_errors(cases, other, search)
            if is_better(distances, least):
                best, least = other, distances
    return best


def chosen_without_each(
    cases: Sequence[ServingCase], search: Search, start: Strengths
) -> dict[str, dict[str, float]]:
    """Return the strengths chosen from all cases, and those chosen without each part."""
    strengths_by_part = {"none": choose_strengths(cases, search, start)}
    for part, _, rest in leave_one_group_out(cases, search.part_of):
        strengths_by_part[part] = choose_strengths(rest, search, start)
    return strengths_by_part


def build_priors(cases: Sequence[ServingCase]) -> dict[str, Any]:
    """Return the strengths of engines without each group, and of layouts without each fold."""
    engines = chosen_without_each(cases, ENGINES, START)
    layouts = chosen_without_each(cases, LAYOUTS, engines["none"])
    layout_only = {
        fold: {name: strengths[name] for name in LAYOUT_GRID}
        for fold, strengths in layouts.items()
    }
    return {"chosen": engines, "layouts": layout_only}
