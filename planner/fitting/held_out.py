"""Prediction errors on rows left out of the fit, for the factor file."""

from collections.abc import Iterable, Sequence

import numpy as np

from planner.fitting.generation_peaks import left_out_generation, peak_cases
from planner.fitting.generation_peaks import model_of as generating_model
from planner.fitting.generation_peaks import source_of as generating_source
from planner.fitting.left_out import (
    LeftOut,
    Verdict,
    is_covered,
    left_out_peaks,
    left_out_serving,
    left_out_steps,
    model_of,
    source_of,
)
from planner.fitting.robust_fit import Columns, MemoryCase
from planner.fitting.serving.factors import SEEN, UNSEEN
from planner.fitting.step_fitting import StepCase
from planner.specs.base import JsonObject
from planner.specs.estimate import ErrorClass

P90 = 0.9
# The left-out part of each class of figure.
PARTS: dict[tuple[str, ErrorClass], str] = {
    ("training", SEEN): "unseen model",
    ("training", UNSEEN): "unseen source",
    ("generation", SEEN): "unseen model",
    ("generation", UNSEEN): "unseen source",
    ("time", SEEN): "unseen sweep",
    ("time", UNSEEN): "unseen pair",
}


def summary(errors: Iterable[float] | Columns) -> JsonObject:
    """Return count, mean, median and 90th percentile of absolute relative errors."""
    absolute = np.abs(np.asarray(list(errors), dtype=float))
    return {
        "n": len(absolute),
        "mean": round(float(absolute.mean()), 4),
        "median": round(float(np.median(absolute)), 4),
        "p90": round(float(np.quantile(absolute, P90)), 4),
    }


def rightness(verdicts: Sequence[Verdict]) -> JsonObject:
    """Return the number of verdicts, the share of correct ones, and both kinds of error.

    >>> rightness([(True, True), (True, False)])
    {'n': 2, 'right': 0.5, 'said_fits_ran_out': 1, 'refused_ran': 0}
    """
    return {
        "n": len(verdicts),
        "right": round(float(np.mean([fits == ran for fits, ran in verdicts])), 4),
        "said_fits_ran_out": sum(fits and not ran for fits, ran in verdicts),
        "refused_ran": sum(ran and not fits for fits, ran in verdicts),
    }


def title_of(row: LeftOut) -> str:
    """Return the report title of a row: its figure and the left-out part.

    >>> title_of(LeftOut("training step", "same family", "", "", "", "", 1.0, 1.0))
    'training step, unseen model'
    """
    return f"{row.figure}, {PARTS[row.figure.split()[0], row.error_class]}"


def groups_of(rows: Sequence[LeftOut]) -> dict[str, list[LeftOut]]:
    """Return rows by report title, in their own order."""
    groups: dict[str, list[LeftOut]] = {}
    for row in rows:
        groups.setdefault(title_of(row), []).append(row)
    return groups


def classes_of(rows: Sequence[LeftOut]) -> dict[str, list[LeftOut]]:
    """Return rows by report title, with dense and sparse models also separate."""
    classes = groups_of(rows)
    for title, group in tuple(classes.items()):
        for kind in sorted({row.kind for row in group} - {""}):
            classes[f"{title}, {kind}"] = [row for row in group if row.kind == kind]
    return classes


def coverage(rows: Sequence[LeftOut], among: Sequence[LeftOut] = ()) -> float:
    """Return the share of rows inside intervals fitted to other parts.

    ``among`` are the rows that determine the intervals, by default the rows themselves.
    """
    return round(float(np.mean([is_covered(row, among or rows) for row in rows])), 4)


def left_out_rows(
    memory: Sequence[MemoryCase], steps: Sequence[StepCase]
) -> tuple[list[LeftOut], dict[str, list[Verdict]]]:
    """Return every prediction of a left-out row, and each (predicted, actual) verdict."""
    rows: list[LeftOut] = []
    verdicts = {}
    classes: tuple[tuple[ErrorClass, str], ...] = ((SEEN, "model"), (UNSEEN, "source"))
    for error_class, what in classes:
        part = model_of if error_class == SEEN else source_of
        peaks, right = left_out_peaks(memory, part, error_class)
        rows += [*left_out_steps(steps, part, error_class), *peaks]
        verdicts[f"training verdict, unseen {what}"] = right
        generating = generating_model if error_class == SEEN else generating_source
        peaks, right = left_out_generation(peak_cases(), generating, error_class)
        rows += peaks
        verdicts[f"generation verdict, unseen {what}"] = right
    return rows + left_out_serving(), verdicts


def report(rows: Sequence[LeftOut], verdicts: dict[str, list[Verdict]]) -> JsonObject:
    """Return errors and coverage of left-out rows, by report title."""
    errors_by_title: JsonObject = {}
    groups = groups_of(rows)
    for title, group in sorted(classes_of(rows).items()):
        among = groups.get(title.rpartition(", ")[0], group)
        errors_by_title[title] = {
            **summary(row.error for row in group),
            "covered": coverage(group, among),
        }
    return errors_by_title | {title: rightness(right) for title, right in sorted(verdicts.items())}
