"""Builds the factor file: what published measurements say about each engine, with its inputs.

``python -m planner calibrate`` prints it; the catalog holds the last one. Spreads come from rows
that the factors were not fitted to: each model of a source is left out in turn.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any, TypeVar

import numpy as np

from planner.catalog.engines import COMMON_SERVING, COMMON_TRAINING
from planner.decode_factors import build_stream_factors, stream_report
from planner.errors import PlannerError
from planner.evidence import SUPERSEDED, digest, latest, table, usable
from planner.fitting import MEMORY_FACTORS, Columns, MemoryCase, fit_memory, memory_case
from planner.held_out import report, summary
from planner.serving_factors import build_serving_factors
from planner.specs.base import JsonObject
from planner.step_fitting import PARTS, StepCase, fit_step, step_case
from planner.workload.intervals import Z_80

Case = TypeVar("Case", MemoryCase, StepCase)
VERSION = "factors-1"
MEMORY_INPUTS = ("memory", "memory_fit")
INPUTS = (*MEMORY_INPUTS, "training", "serving_dense", "inference_other")
DIGITS = 4
COVERED = 0.8
MIN_GROUPS = 2
MIN_ROWS = 10


def memory_cases() -> tuple[MemoryCase, ...]:
    """Return every usable row of the two memory tables."""
    return tuple(memory_case(row) for name in MEMORY_INPUTS for row in usable(table(name)))


def by_engine(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Return the cases of each engine, engines in alphabetical order."""
    found: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        found[case.engine].append(case)
    return dict(sorted(found.items()))


def held_out(cases: Sequence[MemoryCase]) -> list[tuple[MemoryCase, Columns]]:
    """Return each case of an engine with factors that were fitted without its model's rows."""
    pairs = []
    for group in sorted({case.group for case in cases}):
        factors = fit_memory(case for case in cases if case.group != group)
        pairs += [(case, factors) for case in cases if case.group == group]
    return pairs


def spread_of(pairs: Sequence[tuple[MemoryCase, Columns]]) -> float | None:
    """Return the log spread whose 80 % interval covers four of five of these peaks."""
    errors = [
        abs(float(np.log(case.peak_bytes(factors) / case.measured_bytes)))
        for case, factors in pairs
        if case.measured_bytes
    ]
    return float(np.quantile(errors, COVERED)) / Z_80 if len(errors) >= MIN_ROWS else None


def memory_factors(cases: Sequence[MemoryCase]) -> dict[str, float]:
    """Return the fields of one engine that describe its training memory."""
    fitted = dict(zip(MEMORY_FACTORS, fit_memory(cases), strict=True))
    # The fit sees the activations of quantised rows apart; an engine multiplies both ratios.
    fitted["quantised_activation_ratio"] /= fitted["activation_ratio"]
    found = {name: rounded(float(value)) for name, value in fitted.items()}
    if len({case.group for case in cases}) >= MIN_GROUPS:
        spread = spread_of(held_out(cases))
        if spread is not None:
            found["memory_spread"] = rounded(spread)
    return found


def rounded(value: float) -> float:
    """Return a factor with as many digits as its evidence can carry."""
    return float(f"{value:.{DIGITS}g}")


@cache
def step_cases() -> tuple[StepCase, ...]:
    """Return every usable row of the training table whose model the catalog knows."""
    found = []
    for row in usable(latest(table("training"))):
        if not row["step_seconds"]:
            continue
        with suppress(PlannerError):
            found.append(step_case(row))
    return tuple(found)


def pooled(cases: Sequence[StepCase]) -> Columns:
    """Return the factors that the engines of these cases have in common."""
    return fit_step([case for case in cases if not case.runs_ahead])


def step_factors(cases: Sequence[StepCase], prior: Columns) -> dict[str, dict[str, float]]:
    """Return the factors of one engine by chip architecture, and of all its chips together."""
    found = {}
    whole = fit_step(current(cases), prior)
    found["any"] = named(whole)
    for architecture in sorted({case.architecture for case in cases}):
        own = [case for case in cases if case.architecture == architecture]
        found[architecture] = named(fit_step(current(own), whole))
    return found


def current(cases: Sequence[StepCase]) -> list[StepCase]:
    """Return the runs of the newest code of an engine, or all where there is none newer."""
    newest = [case for case in cases if case.source not in SUPERSEDED]
    return newest or list(cases)


def named(factors: Columns) -> dict[str, float]:
    """Return the factors by the part that they multiply."""
    return {part: rounded(float(value)) for part, value in zip(PARTS, factors, strict=True)}


def held_out_steps(cases: Sequence[StepCase], prior: Columns) -> list[float]:
    """Return the relative errors of runs that were fitted without their model's runs."""
    errors = []
    for group in sorted({case.group for case in cases}):
        for case in [case for case in cases if case.group == group]:
            rest = [
                other
                for other in cases
                if other.group != group and other.architecture == case.architecture
            ]
            errors.append(case.error(_fitted(tuple(current(rest)), tuple(prior))))
    return errors


@lru_cache(maxsize=4)
def _fitted(cases: tuple[StepCase, ...], prior: tuple[float, ...]) -> Columns:
    return fit_step(cases, np.array(prior))


def training_factors(
    cases: Sequence[StepCase], prior: Columns
) -> dict[str, dict[str, dict[str, float]] | float]:
    """Return the fields of one engine that describe its training time."""
    found: dict[str, dict[str, dict[str, float]] | float] = {
        "training_factors": step_factors(cases, prior)
    }
    if len({case.group for case in cases}) >= MIN_GROUPS:
        errors = np.abs(np.log1p(held_out_steps(cases, prior)))
        found["step_spread"] = rounded(float(np.quantile(errors, COVERED)) / Z_80)
    return found


def build_factors() -> JsonObject:
    """Return the whole factor file as a document; the same inputs give the same document."""
    engines: dict[str, Any] = {
        engine: memory_factors(cases) for engine, cases in by_engine(memory_cases()).items()
    }
    steps, prior = by_engine(step_cases()), pooled(step_cases())
    unseen = [error for cases in steps.values() for error in held_out_steps(cases, prior)]
    engines[COMMON_TRAINING] = {"training_factors": {"any": named(prior)}}
    for engine, cases in steps.items():
        engines.setdefault(engine, {}).update(training_factors(cases, prior))
    for engine, fields in build_serving_factors(COMMON_SERVING).items():
        engines.setdefault(engine, {}).update(fields)
    for engine, fields in build_stream_factors().items():
        engines.setdefault(engine, {}).update(fields)
    return {
        "version": VERSION,
        "inputs": {f"{name}.csv": digest(name) for name in INPUTS},
        "held_out": {
            **report(memory_cases(), step_cases(), unseen),
            **stream_report(summary),
        },
        "engines": dict(sorted(engines.items())),
    }
