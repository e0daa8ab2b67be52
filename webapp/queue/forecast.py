"""Forecasts of job durations and ends, each with a margin."""

from collections.abc import Callable
from typing import Any

from webapp.core.clock import now
from webapp.jobs.models import Attempt, Job, JobState

MARGIN = 1.25
START_SECONDS = 60.0  # claim, preflight on the host, imports
STOP_SECONDS = 30.0
NUM_EARLIER = 5


Earlier = Callable[[Job], float | None]


def remembered() -> Earlier:
    """Return ``earlier_seconds`` with a cache per pool, kind and model."""
    cached: dict[tuple[str, str, str], float | None] = {}

    def ask(job: Job) -> float | None:
        sort = (job.pool_id, job.kind, job.model_name)
        if sort not in cached:
            cached[sort] = earlier_seconds(job)
        return cached[sort]

    return ask


def length_seconds(job: Job, earlier: Earlier | None = None) -> float | None:
    """Return a job's maximum duration with margin, or None if unknown.

    ``earlier`` replaces ``earlier_seconds``, for example with a cached version.
    """
    expected = stated_seconds(job) or (earlier or earlier_seconds)(job)
    bounds = [job.max_duration_seconds] if job.max_duration_seconds else []
    if expected is not None:
        bounds.append(expected * MARGIN + START_SECONDS)
    return min(bounds, default=None)


def stated_seconds(job: Job) -> float | None:
    """Return the duration stated by the job's spec: a budget, or steps of predicted length."""
    spec: dict[str, Any] = job.spec
    step = (job.prediction.get("step_seconds") or {}).get("high") or spec.get("step_seconds")
    steps = spec.get("max_steps") or spec.get("steps")
    bounds = [float(spec["time_budget_seconds"])] if spec.get("time_budget_seconds") else []
    if step and steps:
        bounds.append(float(step) * float(steps))
    return min(bounds, default=None)


def earlier_seconds(job: Job) -> float | None:
    """Return the longest duration of the last successful similar jobs in this pool."""
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


def left_seconds(attempt: Attempt, earlier: Earlier | None = None) -> float | None:
    """Return the forecast time until an attempt releases its devices.

    None if unknown, or if it exceeded its forecast.
    """
    job = attempt.job
    if job.state == JobState.STOPPING:
        return STOP_SECONDS
    elapsed = (now() - (attempt.started_at or attempt.created_at)).total_seconds()
    bounds = [job.max_duration_seconds - elapsed] if job.max_duration_seconds else []
    if job.state == JobState.RUNNING and job.eta_seconds is not None:
        bounds.append(job.eta_seconds * MARGIN)
    elif (length := length_seconds(job, earlier)) is not None and length > elapsed:
        bounds.append(length - elapsed)
    soonest = min(bounds, default=None)
    return soonest if soonest is not None and soonest > 0 else None
