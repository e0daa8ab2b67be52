"""State transitions of jobs, and which failures are retried; nothing else changes a state."""

from collections.abc import Mapping
from typing import Any

import structlog
from django.db import transaction
from django.db.models import F

from runners.shared.reasons import FAILED, STOPPED, Reason
from webapp.audit.models import event_record
from webapp.core.clock import now
from webapp.core.problems import InvalidProblem
from webapp.jobs.models import FINAL_STATES, Attempt, Job, JobState
from webapp.live.stream import jobs_topic, publish_all

# Which failures are the host's fault alone, so that the job may retry as a new attempt.
#
# Failures caused by the job would recur: an out-of-memory job is never retried.


MOST_RETRIES = 5
RETRYABLE = frozenset(
    {
        Reason.START_TIMEOUT,
        Reason.NEVER_STARTED,
        Reason.SUPERVISOR_LOST,
        Reason.HOST_REBOOTED,
        Reason.GPU_FAULT,
        Reason.KILLED_EXTERNALLY,
        Reason.RANK_LOST,
    }
)
ENDS = frozenset({JobState.ERROR, JobState.FAILED})


def is_retried(to: JobState, reason: str, *, retries: int, most: int) -> bool:
    """Return whether a job that would end this way is queued again instead."""
    return to in ENDS and reason in RETRYABLE and retries < most


NO_PROGRESS = dict.fromkeys(("progress_done", "progress_total", "progress_at", "eta_seconds"))


def fresh_start() -> dict[str, Any]:
    """Return the updates that reset a job for its next attempt."""
    return {
        "num_retries": F("num_retries") + 1,
        "host": None,
        "current_attempt": None,
        "started_at": None,
        **NO_PROGRESS,
        "phase": "",
    }


def check_retries(retries: int) -> None:
    """Refuse an invalid number of retries.

    Raises:
        InvalidProblem: ``retries`` is negative or too large.
    """
    if not 0 <= retries <= MOST_RETRIES:
        raise InvalidProblem(
            "max_retries", f"retries is {retries}; it can be 0 to {MOST_RETRIES}."
        )


log = structlog.get_logger(__name__)

ALLOWED: Mapping[JobState, frozenset[JobState]] = {
    JobState.DRAFT: frozenset({JobState.QUEUED}),
    JobState.QUEUED: frozenset(
        {JobState.PREFLIGHT, JobState.ERROR, JobState.EXPIRED, JobState.STOPPED}
    ),
    JobState.PREFLIGHT: frozenset(
        {JobState.STARTING, JobState.QUEUED, JobState.ERROR, JobState.STOPPED}
    ),
    JobState.STARTING: frozenset(
        {
            JobState.RUNNING,
            JobState.QUEUED,
            JobState.STOPPING,
            JobState.SUCCEEDED,
            JobState.FAILED,
            JobState.ERROR,
            JobState.STOPPED,
        }
    ),
    JobState.RUNNING: frozenset(
        {
            JobState.QUEUED,
            JobState.STOPPING,
            JobState.SUCCEEDED,
            JobState.FAILED,
            JobState.ERROR,
            JobState.STOPPED,
        }
    ),
    JobState.STOPPING: frozenset(
        {
            JobState.QUEUED,  # a failed part ended the other parts: retry
            JobState.SUCCEEDED,
            JobState.FAILED,
            JobState.ERROR,
            JobState.STOPPED,
        }
    ),
    **{state: frozenset[JobState]() for state in FINAL_STATES},
}


def sources_of(to: JobState) -> frozenset[JobState]:
    """Return the states from which ``to`` can be reached."""
    return frozenset(source for source, targets in ALLOWED.items() if to in targets)


def transition(
    job: Job,
    to: JobState,
    *,
    actor: str,
    attempt: Attempt | None = None,
    source: JobState | None = None,
    reason: str = "",
    detail: Mapping[str, Any] | None = None,
) -> bool:
    """Move a job to a state and return whether it moved; ``job`` is refreshed afterwards.

    ``attempt`` is given when an attempt reports or causes the transition: the job then moves
    only if that attempt, with that fence, is its current one. ``source`` restricts the previous
    state to one. A job that failed because of its host and has retries left is queued again
    instead of ending.
    """
    with transaction.atomic():
        row = Job.objects.select_for_update()
        before, retries, most = row.values_list("state", "num_retries", "max_retries").get(
            pk=job.pk
        )
        is_retry = is_retried(to, reason, retries=retries, most=most) and not _was_stopped(attempt)
        if is_retry and JobState.QUEUED in ALLOWED[JobState(before)]:
            to = JobState.QUEUED
            detail = {**(detail or {}), "retry": retries + 1, "of": most}
        is_allowed = before in sources_of(to) and source in {None, before}
        extra = fresh_start() if to == JobState.QUEUED and is_retry else {}
        rows = _guarded_update(job, to, before, attempt, reason, extra) if is_allowed else 0
        if not rows:
            log.info("stale transition", job=job.pk, to=str(to), state=before)
            if attempt is not None:
                Attempt.objects.filter(pk=attempt.pk).update(
                    stale_transitions=F("stale_transitions") + 1
                )
            return False
        job.refresh_from_db()
        event_record(
            job,
            "job.state",
            actor,
            attempt_id=attempt.pk if attempt else (job.current_attempt_id or ""),
            from_state=before,
            to_state=job.state,
            reason=reason,
            detail=dict(detail or {}),
        )
        transaction.on_commit(lambda: publish_job_state(job))
    return True


def _was_stopped(attempt: Attempt | None) -> bool:
    """Return whether an attempt was ordered to stop for more than a gang member's failure."""
    if attempt is None:
        return False
    orders = Attempt.objects.filter(pk=attempt.pk).values_list("stop_reason", flat=True)
    return not set(orders) <= {"", Reason.PEER_ENDED}


def _guarded_update(
    job: Job,
    to: JobState,
    before: str,
    attempt: Attempt | None,
    reason: str,
    extra: Mapping[str, Any],
) -> int:
    rows = Job.objects.filter(pk=job.pk, state=before)
    if attempt is not None:
        rows = rows.filter(current_attempt=attempt.pk, current_attempt__fence=attempt.fence)
    return rows.update(state=to, reason=reason, **{**_times(to, before), **extra})


def _times(to: JobState, before: str) -> dict[str, Any]:
    instant = now()
    if to == JobState.QUEUED and before == JobState.PREFLIGHT:
        return {}  # keeps its queue position
    if to == JobState.QUEUED:
        return {"queued_at": instant}
    if to == JobState.RUNNING:
        return {"started_at": instant}
    if to in FINAL_STATES:
        return {"ended_at": instant, "eta_seconds": None}
    return {}


def final_state(reason: Reason) -> JobState:
    """Return the final state of a job whose attempt ended with this reason."""
    if reason is Reason.OK:
        return JobState.SUCCEEDED
    if reason in FAILED:
        return JobState.FAILED
    if reason in STOPPED:
        return JobState.STOPPED
    return JobState.EXPIRED if reason is Reason.QUEUE_TIMEOUT else JobState.ERROR


def publish_job_state(job: Job) -> None:
    """Publish a job's new state to its page and its team's list."""
    data = {
        "job": job.pk,
        "attempt": job.current_attempt_id,
        "state": job.state,
        "label": job.get_state_display(),
        "reason": job.reason,
        "host": job.host_id,
    }
    publish_all(
        [(f"job:{job.pk}", "job.state", data), (jobs_topic(job.team_id), "job.state", data)]
    )
