"""What published serving sweeps say about each engine, with what held-out sweeps leave."""

import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from planner.catalog.engines import arrival_priors
from planner.evidence import table
from planner.fitting import Columns
from planner.serving_fitting import (
    PARTS,
    ServingCase,
    ServingFit,
    fit_serving,
    serving_case,
    serving_errors,
    told_apart,
)
from planner.specs.estimate import ErrorClass

TABLE = "serving_dense"
FOLDS = 5
COVERED = 0.8
Z_80 = 1.2816
DIGITS = 4
SEEN: ErrorClass = "same family"
UNSEEN: ErrorClass = "datasheet only"


@cache
def serving_cases() -> tuple[ServingCase, ...]:
    """Return every row of the serving table that was measured as it says."""
    return told_apart(serving_case(row) for row in table(TABLE))


def fold_of(case: ServingCase) -> str:
    """Return which fifth of the sweeps a point belongs to: a sweep is never torn apart."""
    return str(zlib.crc32(case.sweep.encode()) % FOLDS)


def group_of(case: ServingCase) -> str:
    """Return the pair of model and chip architecture that a point was measured on."""
    return case.group


def held_out(
    cases: Sequence[ServingCase], part_of: Callable[[ServingCase], str]
) -> tuple[Columns, Columns, list[ServingCase]]:
    """Return both errors of each point, fitted without its part, and the points in order."""
    tpots, ttfts, order = [], [], []
    for part in sorted({part_of(case) for case in cases}):
        rest = [case for case in cases if part_of(case) != part]
        pool = fit_serving(rest)
        for engine in sorted({case.engine for case in cases}):
            left = [c for c in cases if c.engine == engine and part_of(c) == part]
            if not left:
                continue
            own = fit_serving((c for c in rest if c.engine == engine), pool)
            tpot, ttft = serving_errors(left, own)
            tpots.append(tpot)
            ttfts.append(ttft)
            order += left
    return np.concatenate(tpots), np.concatenate(ttfts), order


def spread(errors: Columns) -> float:
    """Return the log spread whose 80 % interval covers four of five of these errors."""
    reach = float(np.quantile(np.abs(np.log1p(errors)), COVERED))
    return float(f"{reach / Z_80:.{DIGITS}g}")


def spreads(cases: Sequence[ServingCase]) -> dict[str, dict[str, float]]:
    """Return the spreads of both times by error class: a seen pair, and an unseen one."""
    seen, unseen = held_out(cases, fold_of), held_out(cases, group_of)
    return {
        "tpot_spreads": {SEEN: spread(seen[0]), UNSEEN: spread(unseen[0])},
        "ttft_spreads": {SEEN: spread(seen[1]), UNSEEN: spread(unseen[1])},
    }


def named(factors: Columns) -> dict[str, float]:
    """Return the factors by the part that they multiply."""
    return {part: float(f"{value:.{DIGITS}g}") for part, value in zip(PARTS, factors, strict=True)}


def engine_factors(cases: Sequence[ServingCase], prior: ServingFit) -> dict[str, Any]:
    """Return the fields of one engine: its factors, the pairs behind them and their habits."""
    fit = fit_serving(cases, prior)
    habits = {group: found._asdict() for (_, group), found in fit.habits.items()}
    return {
        "serving_factors": {"any": named(fit.factors)},
        "arrival_factors": {"any": arrival_priors(), **habits},
        "fitted_groups": sorted({case.group for case in cases}),
    }


def build_serving_factors(common: str) -> dict[str, dict[str, Any]]:
    """Return the serving fields of every engine, and of what they have in common."""
    cases = serving_cases()
    pool, widths = fit_serving(cases), spreads(cases)
    found: dict[str, dict[str, Any]] = {
        common: {"serving_factors": {"any": named(pool.factors)}, **widths}
    }
    for engine in sorted({case.engine for case in cases}):
        own = [case for case in cases if case.engine == engine]
        found[engine] = {**engine_factors(own, pool), **widths}
    return found
