"""Builds the factor file: what published measurements say about each engine, with its inputs.

``python -m planner calibrate`` prints it; the catalog holds the last one. Spreads come from rows
that the factors were not fitted to: each model of a source is left out in turn.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.evidence import digest, table, usable
from planner.fitting import MEMORY_FACTORS, Columns, MemoryCase, fit_memory, memory_case
from planner.specs.base import JsonObject
from planner.workload.intervals import Z_80

VERSION = "factors-1"
INPUTS = ("memory", "memory_fit")
DIGITS = 4
COVERED = 0.8
MIN_GROUPS = 2
MIN_ROWS = 10


def memory_cases() -> tuple[MemoryCase, ...]:
    """Return every usable row of the two memory tables."""
    return tuple(memory_case(row) for name in INPUTS for row in usable(table(name)))


def by_engine(cases: Sequence[MemoryCase]) -> dict[str, list[MemoryCase]]:
    """Return the cases of each engine, engines in alphabetical order."""
    found: dict[str, list[MemoryCase]] = defaultdict(list)
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


def build_factors() -> JsonObject:
    """Return the whole factor file as a document; the same inputs give the same document."""
    engines: dict[str, Any] = {
        engine: memory_factors(cases) for engine, cases in by_engine(memory_cases()).items()
    }
    return {
        "version": VERSION,
        "inputs": {f"{name}.csv": digest(name) for name in INPUTS},
        "engines": engines,
    }
