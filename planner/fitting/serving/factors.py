"""Serving factors of each engine from published sweeps, with the errors on left-out sweeps."""

import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from planner.fitting.evidence import table
from planner.fitting.robust_fit import Columns
from planner.fitting.serving.cases import ServingCase, consistent_groups, serving_case
from planner.fitting.serving.fitting import (
    ServingFit,
    fit_serving,
    serving_errors,
    strengths_without,
)
from planner.fitting.serving.model import HABITS, PARTS, natural
from planner.specs.base import JsonObject
from planner.specs.estimate import ErrorClass

TABLES = ("serving_dense", "serving_sparse")
FOLDS = 5
COVERED = 0.8
Z_80 = 1.2816
DIGITS = 4
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
    for part in sorted({part_of(case) for case in cases} - {""}):
        rest = [case for case in cases if part_of(case) != part]
        left_out = [case for case in cases if part_of(case) == part]
        strengths = strengths_without(part.partition(" ")[0])
        fit = fit_serving(rest, strengths, {case.pair for case in left_out})
        tpot, ttft = serving_errors(left_out, fit)
        tpots.append(tpot)
        ttfts.append(ttft)
        order += left_out
    return np.concatenate(tpots), np.concatenate(ttfts), tuple(order)


def spread(errors: Columns) -> float:
    """Return the log spread whose 80 % interval covers four fifths of these errors."""
    log_error = float(np.quantile(np.abs(np.log1p(errors)), COVERED))
    return float(f"{log_error / Z_80:.{DIGITS}g}")


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
            name = spread_name(error_class, kind)
            for field, errors in (("tpot_spreads", tpots), ("ttft_spreads", ttfts)):
                spread_fields[field][name] = rounded(spread(errors[of_kind]))
    return spread_fields


def rounded(value: float) -> float:
    """Return a factor rounded to its significant digits."""
    return float(f"{value:.{DIGITS}g}")


def named(values: Columns, names: Sequence[str]) -> dict[str, float]:
    """Return factors or arrival parameters by name."""
    by_name = natural(values)
    return {name: rounded(by_name[name]) for name in names}


def engine_fields(fit: ServingFit, engine: str) -> dict[str, Any]:
    """Return the fields of one engine: factors and arrival parameters, overall and by place.

    A place is a chip family, a pair of model and family, or a layout of a pair; the latter two
    also per release of the engine.
    """
    families = {family: fit.engine_values(engine, family) for family in sorted(fit.families)}
    groups = sorted(group for owner, group in fit.pairs if owner == engine)
    places = {group: fit.place_values(engine, group) for group in groups}
    for owner, layout in sorted(fit.layouts):
        if owner == engine:
            places[layout] = fit.place_values(engine, group_of_layout(layout), layout)
    for owner, place in sorted(fit.told):
        if owner == engine:
            places[place] = fit.release_values(engine, place)
    everywhere = {"any": fit.engine_values(engine)}
    factors, habits = {**everywhere, **families, **places}, {**everywhere, **places}
    fields: dict[str, Any] = {
        "serving_factors": {name: named(values, PARTS) for name, values in factors.items()},
        "arrival_factors": {name: named(values, HABITS) for name, values in habits.items()},
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
    tpots, ttfts, _ = held_out(serving_cases(), advised_of)
    return {
        "time per output token, advised groups": summary(tpots),
        "time to first token, advised groups": summary(ttfts),
    }
