"""How far predictions are off on rows that were left out of the fit, for the factor file."""

from collections.abc import Iterable, Sequence

import numpy as np

from planner.fitting import Columns, MemoryCase
from planner.generation_peaks import left_out_generation, peak_cases
from planner.generation_peaks import model_of as generating_model
from planner.generation_peaks import source_of as generating_source
from planner.left_out import (
    LeftOut,
    Verdict,
    is_covered,
    left_out_peaks,
    left_out_serving,
    left_out_steps,
    model_of,
    source_of,
)
from planner.serving_factors import SEEN, UNSEEN
from planner.specs.base import JsonObject
from planner.specs.estimate import ErrorClass
from planner.step_fitting import StepCase

P90 = 0.9
# What "left out" means for each class of figure.
PARTS: dict[tuple[str, ErrorClass], str] = {
    ("training", SEEN): "unseen model",
    ("training", UNSEEN): "unseen source",
    ("generation", SEEN): "unseen model",
    ("generation", UNSEEN): "unseen source",
    ("time", SEEN): "unseen sweep",
    ("time", UNSEEN): "unseen pair",
}


def summary(errors: Iterable[float] | Columns) -> JsonObject:
    """Return count, mean, median and ninetieth percentile of absolute relative errors."""
    kept = np.abs(np.asarray(list(errors), dtype=float))
    return {
        "n": len(kept),
        "mean": round(float(kept.mean()), 4),
        "median": round(float(np.median(kept)), 4),
        "p90": round(float(np.quantile(kept, P90)), 4),
    }


def rightness(verdicts: Sequence[Verdict]) -> JsonObject:
    """Return the count of verdicts, the share of right ones and how many were wrong each way.

    >>> rightness([(True, True), (True, False)])
    {'n': 2, 'right': 0.5, 'said_fits_ran_out': 1, 'refused_ran': 0}
    """
    return {
        "n": len(verdicts),
        "right": round(float(np.mean([said == ran for said, ran in verdicts])), 4),
        "said_fits_ran_out": sum(said and not ran for said, ran in verdicts),
        "refused_ran": sum(ran and not said for said, ran in verdicts),
    }


def title_of(row: LeftOut) -> str:
    """Return what a row is reported under: its figure, and what was left out.

    >>> title_of(LeftOut("training step", "same family", "", "", "", "", 1.0, 1.0))
    'training step, unseen model'
    """
    return f"{row.figure}, {PARTS[row.figure.split()[0], row.error_class]}"


def groups_of(rows: Sequence[LeftOut]) -> dict[str, list[LeftOut]]:
    """Return rows by what they are reported under, in their own order."""
    found: dict[str, list[LeftOut]] = {}
    for row in rows:
        found.setdefault(title_of(row), []).append(row)
    return found


def classes_of(rows: Sequence[LeftOut]) -> dict[str, list[LeftOut]]:
    """Return rows by what they are reported under, those of dense and sparse models also apart."""
    found = groups_of(rows)
    for title, group in tuple(found.items()):
        for kind in sorted({row.kind for row in group} - {""}):
            found[f"{title}, {kind}"] = [row for row in group if row.kind == kind]
    return found


def coverage(rows: Sequence[LeftOut], among: Sequence[LeftOut] = ()) -> float:
    """Return the share of rows inside intervals that were learnt from other parts.

    ``among`` are the rows that intervals are learnt from: the rows themselves, or more.
    """
    return round(float(np.mean([is_covered(row, among or rows) for row in rows])), 4)


def left_out_rows(
    memory: Sequence[MemoryCase], steps: Sequence[StepCase]
) -> tuple[list[LeftOut], dict[str, list[Verdict]]]:
    """Return every prediction of a left-out row, and each verdict: what was said, what was."""
    rows: list[LeftOut] = []
    verdicts = {}
    both: tuple[tuple[ErrorClass, str], ...] = ((SEEN, "model"), (UNSEEN, "source"))
    for error_class, what in both:
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
    """Return errors and coverage of left-out rows by what they are reported under."""
    found: JsonObject = {}
    whole = groups_of(rows)
    for title, group in sorted(classes_of(rows).items()):
        among = whole.get(title.rpartition(", ")[0], group)
        found[title] = {
            **summary(row.error for row in group),
            "covered": coverage(group, among),
        }
    return found | {title: rightness(right) for title, right in sorted(verdicts.items())}
