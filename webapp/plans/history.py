"""What became of a plan: the jobs launched from it, predicted beside measured."""

from typing import NamedTuple

from django.db.models import QuerySet

from webapp.core.display import quantity
from webapp.jobs.models import Job, Measurement
from webapp.plans.models import Plan

METRIC_WORDS = {
    "tokens_per_second": "Tokens per second",
    "step_seconds": "Step time",
    "peak_memory_bytes": "Peak memory",
    "ttft_seconds": "First token",
    "tpot_seconds": "Each further token",
    "prefill_tokens_per_second": "Prefill speed",
    "decode_tokens_per_second": "Decode speed",
}


class Met(NamedTuple):
    """One figure of one job: what was said, what came."""

    job: Job
    metric: str
    predicted: str
    measured: str
    ratio: float
    is_inside: bool


def jobs_of(plan: Plan) -> QuerySet[Job]:
    """Return the jobs that were launched from a plan, newest first."""
    return plan.jobs.filter(deleted_at=None).select_related(
        "host", "requested_host", "pool", "owner"
    )


def measured_of(plan: Plan) -> list[Met]:
    """Return every predicted figure that a job of the plan measured."""
    rows = Measurement.objects.filter(job__plan=plan, job__deleted_at=None).select_related("job")
    return [_met(row) for row in rows.order_by("-job__created_at", "id")]


def _met(row: Measurement) -> Met:
    low, high = row.predicted_low, row.predicted_high
    return Met(
        job=row.job,
        metric=METRIC_WORDS.get(row.metric, row.metric.replace("_", " ")),
        predicted=str(quantity(row.predicted, row.unit)),
        measured=str(quantity(row.measured, row.unit)),
        ratio=row.ratio,
        is_inside=low is not None and high is not None and low <= row.measured <= high,
    )
