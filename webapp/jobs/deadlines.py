"""What time does to jobs: a start that nobody took, and turns that came free."""

from datetime import timedelta

from django.db import transaction

from runners.reasons import Reason
from runners.timing import scaled
from webapp.core.clock import now
from webapp.hosts.models import Pool
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.holding import devices_release
from webapp.jobs.models import Attempt, Command, Event, Job, JobState
from webapp.jobs.transitions import transition

START_TIMEOUT = timedelta(seconds=scaled(120, least=8))


def allocate_all() -> list[Job]:
    """Serve every pool in which somebody waits; return the jobs that got devices."""
    waiting = Pool.objects.filter(jobs__state=JobState.QUEUED, jobs__deleted_at=None).distinct()
    return [job for pool in waiting for job in allocate_pool(pool)]


def end_unclaimed() -> list[Job]:
    """End jobs whose host did not claim them in time; a late claim is then refused."""
    unclaimed = Job.objects.filter(
        state=JobState.PREFLIGHT, current_attempt__claimed_at=None
    ).select_related("current_attempt")
    return [job for job in unclaimed if _is_overdue(job) and _end(job)]


def _is_overdue(job: Job) -> bool:
    since = (
        Event.objects.filter(kind="job.state", subject=job.pk, to_state=JobState.PREFLIGHT)
        .order_by("-id")
        .values_list("at", flat=True)
        .first()
    )
    return since is not None and now() - since > START_TIMEOUT


def _end(job: Job) -> bool:
    attempt = job.current_attempt
    if attempt is None:
        return False
    with transaction.atomic():
        moved = transition(
            job,
            JobState.ERROR,
            actor="system:ticker",
            attempt=attempt,
            reason=Reason.START_TIMEOUT,
        )
        if moved:
            Attempt.objects.filter(pk=attempt.pk).update(ended_at=now())
            Command.objects.filter(attempt=attempt).exclude(state="acked").update(state="dead")
            devices_release(attempt)
    return moved
