"""What published serving sweeps say about each engine, with what held-out sweeps leave."""

import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from planner.evidence import table
from planner.fitting import Columns
from planner.serving_cases import ServingCase, serving_case, told_apart
from planner.serving_fitting import (
    ServingFit,
    fit_serving,
    serving_errors,
    strengths_without,
)
from planner.serving_model import HABITS, PARTS, natural
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
# The groups that the collection of these measurements advises to leave out as a whole: the pair
# of shape and chip, the device and the engine ("" for every engine).
ADVISED = (
    ("94x4096x128/hopper", "h200-sxm-141gb", "vllm"),
    ("64x5120x0/hopper", "h100-sxm5-80gb", "vllm"),
    ("60x4096x512/blackwell", "b200-sxm", "sglang"),
    ("61x7168x256/hopper", "h200-sxm-141gb", ""),
    ("32x4096x0/hopper", "h200-sxm-141gb", "sglang"),
)


@cache
def serving_cases() -> tuple[ServingCase, ...]:
    """Return every row of the serving tables that was measured as it says."""
    return told_apart(serving_case(row) for name in TABLES for row in table(name))


def fold_of(case: ServingCase) -> str:
    """Return which fifth of the sweeps a point belongs to: a sweep is never torn apart."""
    return str(zlib.crc32(case.sweep.encode()) % FOLDS)


def group_of(case: ServingCase) -> str:
    """Return the pair of model and chip architecture that a point was measured on."""
    return case.group


def advised_of(case: ServingCase) -> str:
    """Return the advised group that a point belongs to, or nothing."""
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

    The strengths of the priors are those that were chosen without the part's pair.
    """
    tpots, ttfts = [], []
    order: list[ServingCase] = []
    for part in sorted({part_of(case) for case in cases} - {""}):
        rest = [case for case in cases if part_of(case) != part]
        left = [case for case in cases if part_of(case) == part]
        strengths = strengths_without(part.partition(" ")[0])
        fit = fit_serving(rest, strengths, {case.pair for case in left})
        tpot, ttft = serving_errors(left, fit)
        tpots.append(tpot)
        ttfts.append(ttft)
        order += left
    return np.concatenate(tpots), np.concatenate(ttfts), tuple(order)


def spread(errors: Columns) -> float:
    """Return the log spread whose 80 % interval covers four of five of these errors."""
    reach = float(np.quantile(np.abs(np.log1p(errors)), COVERED))
    return float(f"{reach / Z_80:.{DIGITS}g}")


def spread_name(error_class: ErrorClass, kind: str) -> str:
    """Return what a spread is filed under.

    >>> spread_name("same family", "dense"), spread_name("same family", "sparse")
    ('same family', 'same family, sparse')
    """
    return f"{error_class}, {kind}" if kind == SPARSE else error_class


def spreads(cases: tuple[ServingCase, ...]) -> dict[str, dict[str, float]]:
    """Return the spreads of both times by error class and kind of model."""
    found: dict[str, dict[str, float]] = {"tpot_spreads": {}, "ttft_spreads": {}}
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
                found[field][name] = rounded(spread(errors[of_kind]))
    return found


def rounded(value: float) -> float:
    """Return a factor with as many digits as its evidence can carry."""
    return float(f"{value:.{DIGITS}g}")


def named(values: Columns, names: Sequence[str]) -> dict[str, float]:
    """Return factors or habits by name."""
    found = natural(values)
    return {name: rounded(found[name]) for name in names}


def engine_fields(fit: ServingFit, engine: str) -> dict[str, Any]:
    """Return the fields of one engine: its factors and habits, and those of where it was measured.

    A place is a family of chips, a pair of model and family, or a layout of a pair; of the last
    two also under a release of the engine.
    """
    families = {family: fit.engine_values(engine, family) for family in sorted(fit.families)}
    groups = sorted(group for owner, group in fit.pairs if owner == engine)
    places = {group: fit.place_values(engine, group) for group in groups}
    for owner, layout in sorted(fit.layouts):
        if owner == engine:
            places[layout] = fit.place_values(engine, group_of_layout(layout), layout)
    for owner, place in sorted(fit.told):
        if owner == engine:
            places[place] = fit.told_values(engine, place)
    everywhere = {"any": fit.engine_values(engine)}
    factors, habits = {**everywhere, **families, **places}, {**everywhere, **places}
    found: dict[str, Any] = {
        "serving_factors": {name: named(values, PARTS) for name, values in factors.items()},
        "arrival_factors": {name: named(values, HABITS) for name, values in habits.items()},
    }
    if engine:
        found["fitted_groups"] = groups
    return found


def group_of_layout(layout: str) -> str:
    """Return the group that a layout was measured in.

    >>> group_of_layout("32x4096x0/hopper/h100-sxm5-80gb/bf16/4-1-1")
    '32x4096x0/hopper'
    """
    shape, family, _ = layout.split("/", 2)
    return f"{shape}/{family}"


def build_serving_factors(common: str) -> dict[str, dict[str, Any]]:
    """Return the serving fields of every engine, and of what they have in common."""
    cases = serving_cases()
    fit, widths = fit_serving(cases, strengths_without("")), spreads(cases)
    found = {common: {**engine_fields(fit, ""), **widths}}
    for engine in sorted({case.engine for case in cases}):
        found[engine] = {**engine_fields(fit, engine), **widths}
    return found


def advised_report(summary: Callable[[Columns], JsonObject]) -> JsonObject:
    """Return the errors on the groups that the collection advises to leave out."""
    tpots, ttfts, _ = held_out(serving_cases(), advised_of)
    return {
        "time per output token, advised groups": summary(tpots),
        "time to first token, advised groups": summary(ttfts),
    }
