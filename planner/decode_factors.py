"""What published single streams say about each engine, and what left-out cards show."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from planner.catalog.engines import COMMON_SERVING
from planner.decode_fitting import (
    PARTS,
    StreamCase,
    fit_family,
    fit_streams,
    fitted,
    stream_cases,
)
from planner.fitting import Columns
from planner.specs.base import JsonObject

COVERED = 0.8
Z_80 = 1.2816
DIGITS = 4
MIN_ROWS = 10
PASSES = ("decode", "prefill")
# Whole cards of one source that stand for cards that nobody measured.
KEPT_APART = ("l40s", "rtx-6000-ada")


def rounded(value: float) -> float:
    """Return a factor with as many digits as its evidence can carry."""
    return float(f"{value:.{DIGITS}g}")


def named(group: str, factors: Columns) -> dict[str, float]:
    """Return the factors that differ from 1 by the part that they multiply."""
    pairs = zip(PARTS, factors, strict=True)
    return {f"{group}_{part}": rounded(float(value)) for part, value in pairs if value != 1.0}


def engine_factors(cases: Sequence[StreamCase]) -> dict[str, dict[str, float]]:
    """Return one engine's factors by kind of device and by chip family."""
    found: dict[str, dict[str, float]] = {}
    for group in PASSES:
        same = [case for case in cases if case.group == group]
        for kind in sorted({case.kind for case in same}):
            of_kind = [case for case in same if case.kind == kind]
            whole = fit_streams(of_kind)
            found.setdefault(kind, {}).update(named(group, whole))
            for family in sorted({case.family for case in of_kind} - {kind}):
                own = (case for case in of_kind if case.family == family)
                found.setdefault(family, {}).update(named(group, fit_family(own, group, whole)))
    return {place: filled(factors, found, cases, place) for place, factors in found.items()}


def common_factors(cases: Sequence[StreamCase]) -> dict[str, dict[str, float]]:
    """Return what all engines have in common on each kind of device."""
    found: dict[str, dict[str, float]] = {}
    for kind in sorted({case.kind for case in cases}):
        for group in PASSES:
            same = [case for case in cases if (case.kind, case.group) == (kind, group)]
            if same:
                found.setdefault(kind, {}).update(named(group, fit_streams(same)))
    return found


def filled(
    factors: dict[str, float],
    found: dict[str, dict[str, float]],
    cases: Sequence[StreamCase],
    place: str,
) -> dict[str, float]:
    """Return a family's factors with its kind's where only one pass of it was measured."""
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
    found = []
    for part in sorted({part_of(case) for case in cases}):
        rest = [case for case in cases if part_of(case) != part]
        known: dict[tuple[tuple[str, str, str], str], Columns] = {}
        for case in (case for case in cases if part_of(case) == part):
            key = (case.place, case.family)
            if key not in known:
                known[key] = fitted(rest, case)
            found.append((case, case.error(known[key])))
    return found


def cards_of(cases: Sequence[StreamCase], place: tuple[str, str, str]) -> set[str]:
    """Return the cards that an engine's kind of pass was measured on."""
    return {case.device for case in cases if case.place == place}


@cache
def _fitted_at(place: tuple[str, str, str], family: str) -> Columns:
    cases = stream_cases()
    target = next(c for c in cases if c.place == place and c.family == family)
    return fitted(cases, target)


def fitted_here(case: StreamCase) -> Columns:
    """Return the factors of a case's engine on its chip, all rows taken together."""
    return _fitted_at(case.place, case.family)


def device_of(case: StreamCase) -> str:
    """Return the card that a row was measured on."""
    return case.device


def source_of(case: StreamCase) -> str:
    """Return who measured the row."""
    return case.source


def spread_of(errors: Sequence[float]) -> float:
    """Return the log spread whose 80 % interval covers four of five of these errors."""
    reach = float(np.quantile(np.abs(np.log1p(errors)), COVERED))
    return rounded(reach / Z_80)


def build_stream_factors() -> dict[str, dict[str, Any]]:
    """Return the fields of every engine that describe its single streams."""
    cases = stream_cases()
    found: dict[str, dict[str, Any]] = {COMMON_SERVING: {"stream_factors": common_factors(cases)}}
    unseen = left_out(cases, device_of)
    for engine in sorted({case.engine for case in cases}):
        own = [case for case in cases if case.engine == engine]
        found[engine] = {"stream_factors": engine_factors(own)}
        shared = {place for place in {c.place for c in own} if len(cards_of(own, place)) > 1}
        errors = [error for case, error in unseen if case.place in shared]
        if len(errors) >= MIN_ROWS:
            found[engine]["stream_spread"] = spread_of(errors)
    return found


def stream_report(summary: Callable[[list[float]], JsonObject]) -> JsonObject:
    """Return the held-out errors of single streams, by what was left out."""
    cases = stream_cases()
    cards, sources = left_out(cases, device_of), left_out(cases, source_of)
    found: JsonObject = {}
    for group in PASSES:
        errors = [error for case, error in cards if case.group == group]
        apart = [e for c, e in cards if c.group == group and c.device in KEPT_APART]
        other = [error for case, error in sources if case.group == group]
        found[f"{group} of one stream, unseen card"] = summary(errors)
        found[f"{group} of one stream, L40S and RTX 6000 Ada"] = summary(apart)
        found[f"{group} of one stream, unseen source"] = summary(other)
    return found
