"""A training's actual rows, and the plan's prediction for such rows.

A plan assumes that every position of a row is text: token lengths of samples are unknown
before a job has read them. Separate samples leave padding, up to the longest of a batch.
"""

from collections.abc import Mapping
from typing import NamedTuple

import structlog
from pydantic import TypeAdapter, ValidationError

from planner.specs.plan import PlanRequest
from planner.specs.strategy import Strategy
from planner.specs.workload import TrainWorkload
from runners.jobspec import HostText, ModelSpec, TrainSpec
from webapp.core.display import quantity
from webapp.core.units import percent
from webapp.jobs.models import Job
from webapp.plans.planning import estimate_as_planned
from webapp.plans.verdict import Value, figure_values

log = structlog.get_logger(__name__)
FULL = 0.98  # of a plan's positions: smaller differences are not reported
SHOWN = {"step_seconds": ("seconds", "a step"), "tokens_per_second": ("tokens_per_second", "")}
_SPEC: TypeAdapter[ModelSpec] = TypeAdapter(ModelSpec)


class RowsRead(NamedTuple):
    """The mean row of a training: length in positions, and share of padding."""

    length: int
    padding: float

    def instead_of(self, workload: TrainWorkload) -> TrainWorkload:
        """Return a copy of a workload with these rows."""
        changes = {"sequence_length": self.length, "padding_ratio": self.padding or None}
        return workload.model_copy(update=changes)


def reads_full_rows(spec: TrainSpec) -> bool:
    """Return whether every row is a chunk of one long text."""
    return isinstance(spec.data, HostText) and spec.objective == "next_token"


def rows_read(spec: TrainSpec, measured: Mapping[str, float]) -> RowsRead | None:
    """Return a job's actual rows; None if they match the plan or are not reported."""
    steps, tokens = measured.get("steps"), measured.get("tokens")
    padding = measured.get("padding_share")
    if reads_full_rows(spec) or spec.length_schedule or not steps or not tokens:
        return None
    if padding is None or not 0.0 <= padding < 1.0:
        return None
    rows = steps * spec.micro_batch_size * spec.gradient_accumulation_steps
    length = tokens / rows / (1.0 - padding)
    return RowsRead(min(spec.sequence_length, max(1, round(length))), padding)


def as_read(job: Job) -> str:
    """Return the plan's prediction for the rows that a job read, as text, if they differ.

    Empty for a job whose stored request has an outdated format.
    """
    measured = job.result.get("measured") or {}
    if job.kind != "train" or "padding_share" not in measured or not job.plan_request:
        return ""
    try:
        return _row_length_note(job, measured)
    except ValidationError as error:
        log.warning("a job is not planned again", job=job.pk, why=str(error))
        return ""


def _row_length_note(job: Job, measured: Mapping[str, float]) -> str:
    spec, request = _SPEC.validate_python(job.spec), PlanRequest.model_validate(job.plan_request)
    workload = request.workload
    if not isinstance(spec, TrainSpec) or not isinstance(workload, TrainWorkload):
        return ""
    rows = rows_read(spec, measured)
    if rows is None or rows.length * (1.0 - rows.padding) >= FULL * workload.sequence_length:
        return ""
    strategy = Strategy.model_validate((job.estimate or {}).get("strategy") or {})
    estimate = estimate_as_planned(request, rows.instead_of(workload), strategy)
    predictions = [
        _words(figure_values(estimate, name), *SHOWN[name]) for name in SHOWN if estimate
    ]
    if not any(predictions):
        return ""
    return (
        f"The plan takes every row for {workload.sequence_length:,} tokens of text; those of this "
        f"data had {rows.length:,} positions on the average, {percent(rows.padding)} of them "
        f"padding. For such rows it says {' and '.join(filter(None, predictions))}."
    )


def _words(value: Value | None, unit: str, each: str) -> str:
    if value is None:
        return ""
    middle, low, high = value
    text = f"{quantity(middle, unit)} {each}".rstrip()
    return f"{text} ({quantity(low, unit)} to {quantity(high, unit)})" if low and high else text
