"""The gate on accuracy: no class of rows is missed by more than before, no answer is lost.

``planner/validation/accuracy_baseline.json`` holds the relative error of each published row as it
was accepted last, by class. ``python -m planner accuracy --gate`` asks all rows again and says
what is worse; ``--baseline`` prints the file anew.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import numpy as np

from planner.fitting import tails, unfitted
from planner.fitting.accuracy import predicted, serving_row_errors, training_errors
from planner.fitting.answered_rows import AnsweredRows
from planner.fitting.evidence import (
    DECODE,
    FOLDER,
    PREFILL,
    inference_request,
    number,
    speed_rows,
    table,
)
from planner.fitting.left_out import kept_rows
from planner.fitting.published_speeds import fresh_speeds, published_speeds, title_of
from planner.fitting.serving_throughput import measured_of, throughput_rows

FILE = FOLDER / "accuracy_baseline.json"
# A class fails if its mean error rises by more than both: points, and share of what it was.
POINTS, SHARE = 0.02, 0.10
# More rows of a class are named by their number alone.
NAMED = 5
DECIMALS = 3
# Relative error of each row by class, then the row's name.
Errors = Mapping[str, Mapping[str, float]]
Scored = Iterator[tuple[str, str, float]]


def _left_out() -> Scored:
    for row in kept_rows():
        yield title_of(row), f"{row.row_id} {row.engine}", row.error


def _fitted() -> Scored:
    for name, figure in (("training", "step_seconds"), ("memory", "peak_memory_bytes")):
        for row, error in training_errors(table(name), figure):
            yield f"{unfitted.FIGURES[figure]}, fitted".lower(), row["row_id"], error
    for row, time, error in serving_row_errors():
        figure = unfitted.FIGURES[f"{time}_seconds"].lower()
        yield f"{figure}, fitted", row["row_id"], error
    streams = tuple(row for row in speed_rows() if row["metric"] in {DECODE, PREFILL})
    for row, answer in AnsweredRows().among(streams, inference_request):
        said = getattr(answer.performance, row["metric"])
        figure = unfitted.FIGURES[row["metric"]].lower()
        yield f"{figure}, fitted", row["row_id"], said / number(row, "value") - 1


def _unfitted() -> Scored:
    for row, figure, _, found in unfitted.comparisons(AnsweredRows()):
        yield f"{figure.lower()}, in no fit", row["row_id"], found.error
    for name, speeds in (("published", published_speeds()), ("fresh", fresh_speeds()[0])):
        for speed in speeds:
            yield f"{name} speeds", speed.row["id"], speed.error
    for row in throughput_rows():
        if rate := predicted(row):
            yield "throughput tables", row["row_id"], rate / measured_of(row) - 1


def _tails() -> Scored:
    for row, time, name, tail in tails.tail_rows(AnsweredRows()):
        title = f"{tails.TIMES[time].lower()}, {tails.load_of(row)}, {name}"
        yield title, row["row_id"], tail.value - 1


READERS = (_left_out, _fitted, _unfitted, _tails)


def by_class(scored: Iterable[tuple[str, str, float]]) -> dict[str, dict[str, float]]:
    """Return the error of each row by class, both in alphabetical order."""
    errors: dict[str, dict[str, float]] = {}
    for title, row, error in scored:
        errors.setdefault(title, {})[row] = round(error, DECIMALS)
    return {title: dict(sorted(rows.items())) for title, rows in sorted(errors.items())}


def errors_today() -> dict[str, dict[str, float]]:
    """Return the relative error of every row that is answered today, by class."""
    return by_class(one for reader in READERS for one in reader())


@cache
def baseline() -> Errors:
    """Return the errors that were accepted last."""
    stored: Errors = json.loads(FILE.read_text(encoding="utf-8"))
    return stored


def mean_error(errors: Mapping[str, float], rows: set[str]) -> float:
    """Return the mean absolute relative error of these rows."""
    return float(np.mean([abs(errors[row]) for row in rows]))


def worsened(before: Errors, after: Errors) -> list[str]:
    """Return in words the classes that are missed by more than before, and the answers lost.

    Errors are compared on the rows that both have, so that new rows change no class.

    >>> worsened({"steps": {"a": 0.10, "b": -0.2}}, {"steps": {"a": 0.14}})
    ['steps: mean error 14.0% of 1 rows, before 10.0%', 'steps: no answer any more: b']
    """
    words = []
    for title, old in before.items():
        new = after.get(title, {})
        shared, lost = old.keys() & new.keys(), sorted(old.keys() - new.keys())
        if shared:
            was, now = mean_error(old, shared), mean_error(new, shared)
            if now > was + POINTS and now > was * (1 + SHARE):
                words.append(
                    f"{title}: mean error {now:.1%} of {len(shared)} rows, before {was:.1%}"
                )
        if lost:
            more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
            words.append(f"{title}: no answer any more: {', '.join(lost[:NAMED])}{more}")
    return words


def to_json(errors: Errors) -> str:
    """Return the file of a baseline: a line for each class."""
    lines = (f"{json.dumps(title)}: {json.dumps(rows)}" for title, rows in errors.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"
