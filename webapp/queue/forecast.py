"""How long jobs take and when they end: forecasts, each with a margin, never a promise."""

from typing import Any

from webapp.core.clock import now
from webapp.jobs.models import Attempt, Job, JobState

MARGIN = 1.25
START_SECONDS = 60.0  # claim, preflight on the host, imports
STOP_SECONDS = 30.0
NUM_EARLIER = 5


def length_seconds(job: Job) -> float | None:
    """Return how long a job takes at most, with margin, or None where nothing tells."""
    expected = stated_seconds(job) or _earlier_seconds(job)
    bounds = [job.max_duration_seconds] if job.max_duration_seconds else []
    if expected is not None:
        bounds.append(expected * MARGIN + START_SECONDS)
    return min(bounds, default=None)


def stated_seconds(job: Job) -> float | None:
    """Return what the job's own document bounds: a budget, or steps of predicted length."""
    spec: dict[str, Any] = job.spec
    step = (job.prediction.get("step_seconds") or {}).get("high") or spec.get("step_seconds")
    steps = spec.get("max_steps") or spec.get("steps")
    bounds = [float(spec["time_budget_seconds"])] if spec.get("time_budget_seconds") else []
    if step and steps:
        bounds.append(float(step) * float(steps))
    return min(bounds, default=None)


def _earlier_seconds(job: Job) -> float | None:
    """Return the longest of the last jobs that did the same well in this pool."""
    same = Job.objects.filter(
        pool=job.pool_id,
        kind=job.kind,
        model_name=job.model_name,
        state=JobState.SUCCEEDED,
        started_at__isnull=False,
    ).order_by("-ended_at")
    times = same.values_list("started_at", "ended_at")[:NUM_EARLIER]
    lengths = [(end - start).total_seconds() for start, end in times if start and end]
    return max(lengths, default=None)


def left_seconds(attempt: Attempt) -> float | None:
    """Return in how long an attempt that holds devices is forecast to let go of them.

    None where nothing tells, or where it has outlasted its forecast.
    """
    job = attempt.job
    if job.state == JobState.STOPPING:
        return STOP_SECONDS
    elapsed = (now() - (attempt.started_at or attempt.created_at)).total_seconds()
    left = [job.max_duration_seconds - elapsed] if job.max_duration_seconds else []
    if job.state == JobState.RUNNING and job.eta_seconds is not None:
        left.append(job.eta_seconds * MARGIN)
    elif (length := length_seconds(job)) is not None and length > elapsed:
        left.append(length - elapsed)
    soonest = min(left, default=None)
    return soonest if soonest is not None and soonest > 0 else None
