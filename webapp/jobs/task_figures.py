"""Results of lm-evaluation-harness tasks, next to the original model's."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from webapp.core.units import number
from webapp.jobs.models import Job

BEFORE = "original_"
CHANGES = ("difference", "ratio")
ENDINGS = ("stderr", *(f"{each}{end}" for each in CHANGES for end in ("", "_low", "_high")))
DIGITS = 4
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


@dataclass(frozen=True)
class TaskRow:
    """One metric of one task; strings are empty if there is no original."""

    task: str
    metric: str
    value: str
    before: str
    change: str
    verdict: str
    how: str


def metrics_of(measured: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ``task/metric`` names of a result, without derived values."""
    for name in measured:
        task, slash, metric = name.partition("/")
        is_before = name.startswith(BEFORE) and name.removeprefix(BEFORE) in measured
        is_part = any(
            metric.endswith(f"_{end}") and name.removesuffix(f"_{end}") in measured
            for end in ENDINGS
        )
        if slash and task and metric and not is_before and not is_part:
            yield name


def task_rows(job: Job) -> list[TaskRow]:
    """Return every metric of every task that the job ran."""
    measured: Mapping[str, Any] = job.result.get("measured", {})
    notes: Mapping[str, str] = job.result.get("notes", {})
    return [_row(name, measured, notes) for name in metrics_of(measured)]


def _row(name: str, measured: Mapping[str, Any], notes: Mapping[str, str]) -> TaskRow:
    task, _, metric = name.partition("/")
    kind = next((each for each in CHANGES if f"{name}_{each}" in measured), "")
    return TaskRow(
        task=task,
        metric=metric,
        value=_with_error(name, measured),
        before=_with_error(f"{BEFORE}{name}", measured),
        change=_change(name, kind, measured) if kind else "",
        verdict=notes.get(f"{name}_{kind}", "").partition(":")[0] if kind else "",
        how=notes.get(name, ""),
    )


def _with_error(name: str, measured: Mapping[str, Any]) -> str:
    if measured.get(name) is None:
        return ""
    error = measured.get(f"{name}_stderr")
    spread = "" if error is None else f" {PLUS_MINUS} {number(error, 2)}"
    return f"{number(measured[name], DIGITS)}{spread}"


def _change(name: str, kind: str, measured: Mapping[str, Any]) -> str:
    ends = [measured.get(f"{name}_{kind}{end}") for end in ("", "_low", "_high")]
    if None in ends:
        return ""
    middle, low, high = (number(float(each), 3) for each in ends if each is not None)
    factor = "factor " if kind == "ratio" else ""
    return f"{factor}{middle}, 95 % interval {low} to {high}"
