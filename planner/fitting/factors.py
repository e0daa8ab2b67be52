"""Build the factor file: each engine's factors from published measurements, with inputs.

``python -m planner calibrate`` prints it; the catalog stores the last version. Spreads come from
rows outside the fit: each model of a source is left out in turn.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeVar

from planner.catalog.engines import COMMON_SERVING, COMMON_TRAINING, harnessed
from planner.errors import PlannerError
from planner.fitting.decode_fitting import build_stream_factors, stream_report
from planner.fitting.evidence import digest, latest, table, usable
from planner.fitting.generation_peaks import generation_factors
from planner.fitting.held_out import left_out_rows, report, summary
from planner.fitting.left_out import PEAK, STEP, LeftOut, Verdict, spread_of
from planner.fitting.robust_fit import Columns, MemoryCase, fields_of, fitted_memory, memory_case
from planner.fitting.serving.factors import (
    SEEN,
    TABLES,
    UNSEEN,
    advised_report,
    build_serving_factors,
)
from planner.fitting.serving.throughput import throughput_factors, throughput_report
from planner.fitting.step_fitting import PARTS, StepCase, StepFactors, step_case
from planner.specs.base import JsonObject

Case = TypeVar("Case", MemoryCase, StepCase)
FactorsOf = Callable[[str, str], Columns]
VERSION = "factors-2"
MEMORY_INPUTS = ("memory", "memory_fit")
INPUTS = (*MEMORY_INPUTS, "training", *TABLES, "inference_other")
DIGITS = 4
COVERED = 0.8
MIN_ROWS = 10


@cache
def memory_cases() -> tuple[MemoryCase, ...]:
    """Return every usable row of the two memory tables."""
    return tuple(memory_case(row) for name in MEMORY_INPUTS for row in usable(table(name)))


def by_engine(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Return the cases of each engine, engines in alphabetical order."""
    cases_by_engine: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        cases_by_engine[case.engine].append(case)
    return dict(sorted(cases_by_engine.items()))


def memory_factors(cases: Sequence[MemoryCase], engine: str) -> dict[str, float]:
    """Return the fields of one engine that describe its training memory."""
    fitted = fields_of(fitted_memory(cases, engine))
    return {name: rounded(value) for name, value in fitted.items()}


def spreads(rows: Sequence[LeftOut], figure: str, engine: str) -> dict[str, float]:
    """Return the log spreads of one engine's figure, by error class.

    An engine with few rows takes the spread over all engines.
    """
    spread_by_class: dict[str, float] = {}
    for error_class in (SEEN, UNSEEN):
        class_rows = [
            row for row in rows if (row.figure, row.error_class) == (figure, error_class)
        ]
        own = [row for row in class_rows if row.engine == engine]
        enough = error_class == SEEN and len(own) >= MIN_ROWS
        spread_by_class[error_class] = rounded(spread_of(own if enough else class_rows))
    return spread_by_class


def tool_spread(rows: Sequence[LeftOut], engine: str) -> float:
    """Return the spread of peaks over an engine's tools, each predicted from the others."""
    unseen_peaks = [row for row in rows if (row.figure, row.error_class) == (PEAK, UNSEEN)]
    return rounded(spread_of([row for row in unseen_peaks if harnessed(row.engine) == engine]))


def rounded(value: float) -> float:
    """Return a factor rounded to its significant digits."""
    return float(f"{value:.{DIGITS}g}")


@cache
def step_cases() -> tuple[StepCase, ...]:
    """Return every usable training row with a model of the catalog."""
    cases = []
    for row in usable(latest(table("training"))):
        if not row["step_seconds"]:
            continue
        with suppress(PlannerError):
            cases.append(step_case(row))
    return tuple(cases)


def step_factors(cases: Sequence[StepCase], factors: FactorsOf) -> dict[str, dict[str, float]]:
    """Return an engine's factors on any chip, on each chip family and on each chip."""
    chips = sorted({(case.architecture, case.device) for case in cases})
    families = {family: named(factors(family, "")) for family, _ in chips}
    own = {chip: named(factors(family, chip)) for family, chip in chips}
    return {"any": named(factors("", "")), **families, **own}


def named(factors: Columns) -> dict[str, float]:
    """Return the factors by the part that they multiply."""
    return {part: rounded(float(value)) for part, value in zip(PARTS, factors, strict=True)}


@cache
def predictions() -> tuple[tuple[LeftOut, ...], dict[str, list[Verdict]]]:
    """Return the prediction of every row with its part left out, and every verdict."""
    rows, verdicts = left_out_rows(memory_cases(), step_cases())
    return tuple(rows), verdicts


def training_engines() -> dict[str, Any]:
    """Return every engine's fields for training memory and steps."""
    rows, _ = predictions()
    steps = step_cases()
    fitted = StepFactors(steps)
    fields_by_engine: dict[str, Any] = {
        COMMON_TRAINING: {
            "training_factors": step_factors(steps, partial(fitted.pooled.factors, "")),
            "step_spreads": {UNSEEN: spreads(rows, STEP, "")[UNSEEN]},
            "memory_spreads": {UNSEEN: spreads(rows, PEAK, "")[UNSEEN]},
        }
    }
    cases = memory_cases()
    for engine in by_engine(cases):
        widths = spreads(rows, PEAK, engine)
        if any(harnessed(other) == engine for other in by_engine(cases)):
            widths[SEEN] = tool_spread(rows, engine)
        fields_by_engine[engine] = {**memory_factors(cases, engine), "memory_spreads": widths}
    for engine, runs in by_engine(steps).items():
        fields = fields_by_engine.setdefault(engine, {})
        fields["training_factors"] = step_factors(steps, partial(fitted.of, engine))
        fields["trained_on"] = sorted({run.architecture for run in runs})
        fields["step_spreads"] = spreads(rows, STEP, engine)
    return fields_by_engine


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
