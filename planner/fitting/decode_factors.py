"""Single-stream factors of each engine from published speeds, with errors on left-out GPUs."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from planner.catalog.engines import COMMON_SERVING
from planner.fitting.decode_fitting import (
    PARTS,
    StreamCase,
    fit_family,
    fit_streams,
    fitted,
    stream_cases,
)
from planner.fitting.robust_fit import Columns
from planner.specs.base import JsonObject

COVERED = 0.8
Z_80 = 1.2816
DIGITS = 4
MIN_ROWS = 10
PASSES = ("decode", "prefill")
# GPUs left out as a whole, to represent unmeasured GPUs.
KEPT_APART = ("l40s", "rtx-6000-ada")


def rounded(value: float) -> float:
    """Return a factor rounded to its significant digits."""
    return float(f"{value:.{DIGITS}g}")


def named(group: str, factors: Columns) -> dict[str, float]:
    """Return the factors that differ from 1, by the part that they multiply."""
    pairs = zip(PARTS, factors, strict=True)
    return {f"{group}_{part}": rounded(float(value)) for part, value in pairs if value != 1.0}


def engine_factors(cases: Sequence[StreamCase]) -> dict[str, dict[str, float]]:
    """Return one engine's factors by kind of device and by chip family."""
    factors_by_place: dict[str, dict[str, float]] = {}
    for group in PASSES:
        same = [case for case in cases if case.group == group]
        for kind in sorted({case.kind for case in same}):
            of_kind = [case for case in same if case.kind == kind]
            kind_factors = fit_streams(of_kind)
            factors_by_place.setdefault(kind, {}).update(named(group, kind_factors))
            for family in sorted({case.family for case in of_kind} - {kind}):
                own = (case for case in of_kind if case.family == family)
                factors_by_place.setdefault(family, {}).update(
                    named(group, fit_family(own, group, kind_factors))
                )
    return {
        place: filled(factors, factors_by_place, cases, place)
        for place, factors in factors_by_place.items()
    }


def common_factors(cases: Sequence[StreamCase]) -> dict[str, dict[str, float]]:
    """Return the factors common to all engines on each kind of device."""
    factors_by_kind: dict[str, dict[str, float]] = {}
    for kind in sorted({case.kind for case in cases}):
        for group in PASSES:
            same = [case for case in cases if (case.kind, case.group) == (kind, group)]
            if same:
                factors_by_kind.setdefault(kind, {}).update(named(group, fit_streams(same)))
    return factors_by_kind


def filled(
    factors: dict[str, float],
    found: dict[str, dict[str, float]],
    cases: Sequence[StreamCase],
    place: str,
) -> dict[str, float]:
    """Return a family's factors, with its device kind's for passes that were not measured."""
    kind = next((case.kind for case in cases if case.family == place), place)
    passes = {name.partition("_")[0] for name in factors}
    missing = {
        name: value
        for name, value in found.get(kind, {}).items()
        if name.partition("_")[0] not in passes
    }
    return dict(sorted({**missing, **factors}.items()))


def left_out(
    cases: Sequence[StreamCase], part_of: Callable[[StreamCase], str]
) -> list[tuple[StreamCase, float]]:
    """Return the error of each case, fitted without its part."""
    errors = []
    for part in sorted({part_of(case) for case in cases}):
        rest = [case for case in cases if part_of(case) != part]
        fitted_by_key: dict[tuple[tuple[str, str, str], str], Columns] = {}
        for case in (case for case in cases if part_of(case) == part):
            key = (case.place, case.family)
            if key not in fitted_by_key:
                fitted_by_key[key] = fitted(rest, case)
            errors.append((case, case.error(fitted_by_key[key])))
    return errors


def cards_of(cases: Sequence[StreamCase], place: tuple[str, str, str]) -> set[str]:
    """Return the GPUs on which an engine's kind of pass was measured."""
    return {case.device for case in cases if case.place == place}


@cache
def _fitted_at(place: tuple[str, str, str], family: str) -> Columns:
    cases = stream_cases()
    target = next(c for c in cases if c.place == place and c.family == family)
    return fitted(cases, target)


def fitted_here(case: StreamCase) -> Columns:
    """Return the factors of a case's engine on its chip, fitted to all rows."""
    return _fitted_at(case.place, case.family)


def device_of(case: StreamCase) -> str:
    """Return the GPU that a row was measured on."""
    return case.device


def source_of(case: StreamCase) -> str:
    """Return the source of a row."""
    return case.source


def spread_of(errors: Sequence[float]) -> float:
    """Return the log spread whose 80 % interval covers four fifths of these errors."""
    log_error = float(np.quantile(np.abs(np.log1p(errors)), COVERED))
    return rounded(log_error / Z_80)


def build_stream_factors() -> dict[str, dict[str, Any]]:
    """Return the fields of every engine that describe its single streams."""
    cases = stream_cases()
    fields_by_engine: dict[str, dict[str, Any]] = {
        COMMON_SERVING: {"stream_factors": common_factors(cases)}
    }
    unseen = left_out(cases, device_of)
    for engine in sorted({case.engine for case in cases}):
        own = [case for case in cases if case.engine == engine]
        fields_by_engine[engine] = {"stream_factors": engine_factors(own)}
        compared_places = {
            place for place in {c.place for c in own} if len(cards_of(own, place)) > 1
        }
        errors = [error for case, error in unseen if case.place in compared_places]
        if len(errors) >= MIN_ROWS:
            fields_by_engine[engine]["stream_spread"] = spread_of(errors)
    return fields_by_engine


def stream_report(summary: Callable[[list[float]], JsonObject]) -> JsonObject:
    """Return the held-out errors of single streams, by what was left out."""
    cases = stream_cases()
    cards, sources = left_out(cases, device_of), left_out(cases, source_of)
    errors_by_title: JsonObject = {}
    for group in PASSES:
        errors = [error for case, error in cards if case.group == group]
        kept_apart = [e for c, e in cards if c.group == group and c.device in KEPT_APART]
        source_errors = [error for case, error in sources if case.group == group]
        errors_by_title[f"{group} of one stream, unseen card"] = summary(errors)
        errors_by_title[f"{group} of one stream, L40S and RTX 6000 Ada"] = summary(kept_apart)
        errors_by_title[f"{group} of one stream, unseen source"] = summary(source_errors)
    return errors_by_title
