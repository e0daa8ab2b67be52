"""History of a plan: its jobs, with predicted and measured figures."""

from typing import NamedTuple

from django.db.models import QuerySet

from webapp.core.display import quantity
from webapp.figures.registry import definition_of
from webapp.jobs.models import Job, Measurement
from webapp.plans.models import Plan


class FigureComparison(NamedTuple):
    """One figure of one job, predicted and measured."""

    job: Job
    metric: str
    predicted: str
    measured: str
    ratio: float
    is_inside: bool


def jobs_of(plan: Plan) -> QuerySet[Job]:
    """Return the jobs launched from any version of a plan, newest first."""
    jobs = Job.objects.filter(plan__series=plan.series, deleted_at=None)
    jobs = jobs if plan.series else jobs.none()
    return jobs.select_related("host", "requested_host", "pool", "owner", "plan")


def measured_of(plan: Plan) -> list[FigureComparison]:
    """Return every predicted figure that jobs of any version measured."""
    if not plan.series:
        return []
    rows = Measurement.objects.filter(job__plan__series=plan.series, job__deleted_at=None)
    rows = rows.select_related("job")
    return [_comparison(row) for row in rows.order_by("-job__created_at", "id")]


def _comparison(row: Measurement) -> FigureComparison:
    low, high, definition = row.predicted_low, row.predicted_high, definition_of(row.metric)
    return FigureComparison(
        job=row.job,
        metric=definition.label,
        predicted=str(quantity(row.predicted, definition.unit)),
        measured=str(quantity(row.measured, definition.unit)),
        ratio=row.ratio,
        is_inside=low is not None and high is not None and low <= row.measured <= high,
    )
