"""Builds the factor file: what published measurements say about each engine, with its inputs.

``python -m planner calibrate`` prints it; the catalog holds the last one. Spreads come from rows
that the factors were not fitted to: each model of a source is left out in turn.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeVar

from planner.catalog.engines import COMMON_SERVING, COMMON_TRAINING, harnessed
from planner.decode_factors import build_stream_factors, stream_report
from planner.errors import PlannerError
from planner.evidence import digest, latest, table, usable
from planner.fitting import Columns, MemoryCase, fields_of, fitted_memory, memory_case
from planner.generation_peaks import generation_factors
from planner.held_out import left_out_rows, report, summary
from planner.left_out import PEAK, STEP, LeftOut, Verdict, spread_of
from planner.serving_factors import (
    SEEN,
    TABLES,
    UNSEEN,
    advised_report,
    build_serving_factors,
)
from planner.specs.base import JsonObject
from planner.step_fitting import PARTS, StepCase, step_case
from planner.step_levels import StepFactors
from planner.throughput_fitting import throughput_factors, throughput_report

Case = TypeVar("Case", MemoryCase, StepCase)
FactorsOf = Callable[[str, str], Columns]
VERSION = "factors-2"
MEMORY_INPUTS = ("memory", "memory_fit")
INPUTS = (*MEMORY_INPUTS, "training", *TABLES, "inference_other")
DIGITS = 4
COVERED = 0.8
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


def memory_factors(cases: Sequence[MemoryCase], engine: str) -> dict[str, float]:
    """Return the fields of one engine that describe its training memory."""
    fitted = fields_of(fitted_memory(cases, engine))
    return {name: rounded(value) for name, value in fitted.items()}


def spreads(rows: Sequence[LeftOut], figure: str, engine: str) -> dict[str, float]:
    """Return the log spreads of a figure of one engine by error class.

    An engine with few rows of its own takes what all engines' rows leave.
    """
    found: dict[str, float] = {}
    for error_class in (SEEN, UNSEEN):
        same = [row for row in rows if (row.figure, row.error_class) == (figure, error_class)]
        own = [row for row in same if row.engine == engine]
        enough = error_class == SEEN and len(own) >= MIN_ROWS
        found[error_class] = rounded(spread_of(own if enough else same))
    return found


def tool_spread(rows: Sequence[LeftOut], engine: str) -> float:
    """Return the spread of peaks that an engine's tools leave, each foreseen from the others."""
    told = [row for row in rows if (row.figure, row.error_class) == (PEAK, UNSEEN)]
    return rounded(spread_of([row for row in told if harnessed(row.engine) == engine]))


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


def step_factors(cases: Sequence[StepCase], factors: FactorsOf) -> dict[str, dict[str, float]]:
    """Return the factors of an engine on any chip, on each chip family and on each chip."""
    chips = sorted({(case.architecture, case.device) for case in cases})
    families = {family: named(factors(family, "")) for family, _ in chips}
    own = {chip: named(factors(family, chip)) for family, chip in chips}
    return {"any": named(factors("", "")), **families, **own}


def named(factors: Columns) -> dict[str, float]:
    """Return the factors by the part that they multiply."""
    return {part: rounded(float(value)) for part, value in zip(PARTS, factors, strict=True)}


@cache
def predictions() -> tuple[tuple[LeftOut, ...], dict[str, list[Verdict]]]:
    """Return what is predicted of every row without its part, and every verdict."""
    rows, verdicts = left_out_rows(memory_cases(), step_cases())
    return tuple(rows), verdicts


def training_engines() -> dict[str, Any]:
    """Return the fields of every engine that describe its training memory and its steps."""
    rows, _ = predictions()
    steps = step_cases()
    fitted = StepFactors(steps)
    found: dict[str, Any] = {
        COMMON_TRAINING: {
            "training_factors": step_factors(steps, partial(fitted.pooled.factors, "")),
            "step_spreads": {UNSEEN: spreads(rows, STEP, "")[UNSEEN]},
            "memory_spreads": {UNSEEN: spreads(rows, PEAK, "")[UNSEEN]},
        }
    }
    held_cases = memory_cases()
    for engine in by_engine(held_cases):
        widths = spreads(rows, PEAK, engine)
        if any(harnessed(other) == engine for other in by_engine(held_cases)):
            widths[SEEN] = tool_spread(rows, engine)
        found[engine] = {**memory_factors(held_cases, engine), "memory_spreads": widths}
    for engine, runs in by_engine(steps).items():
        fields = found.setdefault(engine, {})
        fields["training_factors"] = step_factors(steps, partial(fitted.of, engine))
        fields["trained_on"] = sorted({run.architecture for run in runs})
        fields["step_spreads"] = spreads(rows, STEP, engine)
    return found


def build_factors() -> JsonObject:
    """Return the whole factor file as a document; the same inputs give the same document."""
    engines = training_engines()
    for engine, fields in build_serving_factors(COMMON_SERVING).items():
        engines.setdefault(engine, {}).update(fields)
    for engine, fields in build_stream_factors().items():
        engines.setdefault(engine, {}).update(fields)
    for engine, fields in generation_factors(predictions()[0]).items():
        engines.setdefault(engine, {}).update(fields)
    for engine, places in throughput_factors().items():
        engines.setdefault(engine, {})["full_factors"] = places
    return {
        "version": VERSION,
        "inputs": {f"{name}.csv": digest(name) for name in INPUTS},
        "held_out": {
            **report(*predictions()),
            **advised_report(summary),
            **stream_report(summary),
            **throughput_report(summary),
        },
        "engines": dict(sorted(engines.items())),
    }
