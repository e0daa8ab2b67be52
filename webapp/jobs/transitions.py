"""States of attempts and jobs, their transitions, and reasons."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import structlog
from django.db import transaction
from django.db.models import F

from runners.shared.reasons import FAILED, STOPPED, Reason
from webapp.audit.models import event_record
from webapp.core.clock import now
from webapp.core.problems import InvalidProblem
from webapp.jobs.models import FINAL_STATES, Attempt, Job, JobState
from webapp.live.stream import jobs_topic, publish_all

# ---------------------------------------------------------------------------
# State transitions of jobs, and which failures are retried; nothing else changes a state.
# ---------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------
# Sentence and next step for each reason code.
# ---------------------------------------------------------------------------


class Words(NamedTuple):
    """The sentence and the next step of a reason."""

    sentence: str
    next_step: str


WORDS: Mapping[Reason, Words] = {
    Reason.OK: Words("The job succeeded.", "See its figures, or plan the next job."),
    Reason.OOM_GPU: Words(
        "The GPU ran out of memory.",
        "Plan again with a smaller batch, a narrower weight dtype or more devices.",
    ),
    Reason.OOM_HOST: Words(
        "The host ran out of main memory and the system ended the job.",
        "Plan again with a smaller batch or a narrower weight dtype, or free memory on the host.",
    ),
    Reason.NCCL_TIMEOUT: Words(
        "A rank waited for the others until NCCL's timeout, and the job was aborted.",
        "The rank without a report is the one that hung: see its log, check the links between the "
        "devices on the host's page, then clone the job.",
    ),
    Reason.NCCL_ERROR: Words(
        "NCCL, the library by which the ranks talk, reported an error.",
        "Set NCCL_DEBUG=INFO for the host's agent and clone the job: its log then names the "
        "interface, the device or the shared memory that failed.",
    ),
    Reason.RANK_LOST: Words(
        "A part of the job lost its connection to the others.",
        "See in the logs of each host which one stopped answering, check the network between "
        "them, then clone the job.",
    ),
    Reason.KERNEL_FAILED: Words(
        "A kernel on the GPU failed: a wrong address, an index out of range or an assertion.",
        "Set CUDA_LAUNCH_BLOCKING=1 for the host's agent to see the operator, check that token "
        "ids and labels are below their number of classes, then clone the job. On one GPU "
        "alone, cordon it.",
    ),
    Reason.EXIT_NONZERO: Words(
        "The job's program reported a failure.",
        "Read the last lines of its log; they name the cause.",
    ),
    Reason.SIGNAL: Words(
        "The job's program crashed.",
        "Read the last lines of its log, then clone the job to see if it happens again.",
    ),
    Reason.MAX_DURATION: Words(
        "The job reached the longest duration that it was allowed.",
        "Clone it with fewer steps or a longer limit.",
    ),
    Reason.MODEL_OR_DATA_MISSING: Words(
        "The model or the data was not found on the host.",
        "Check that the folder is there and is below one of the host's model folders.",
    ),
    Reason.BAD_INPUT: Words(
        "The job cannot run with the model, the data or the choices that it was given.",
        "The last line of its log names it and the remedy; then plan or clone it again.",
    ),
    Reason.PREFLIGHT_FAILED: Words(
        "The host did not meet what the job needs.",
        "The events list the failed checks; free the missing resource or choose another host.",
    ),
    Reason.ENGINE_START_FAILED: Words(
        "The engine did not start.",
        "Read the log for the missing piece, install it on the host and clone the job.",
    ),
    Reason.ENGINE_LOST: Words(
        "The engine behind the endpoint crashed repeatedly.",
        "The last lines of its log say how it ended; plan with fewer requests at once, or with "
        "another engine.",
    ),
    Reason.ENVIRONMENT_FAILED: Words(
        "The environment that the job runs in could not be built on the host.",
        "The last lines of its log name the cause; correct it, then build the environment on the "
        "host's page.",
    ),
    Reason.DOWNLOAD_FAILED: Words(
        "The model could not be downloaded to the host.",
        "The last line of its log names the cause. What arrived is kept: a clone of the job goes "
        "on from there.",
    ),
    Reason.START_TIMEOUT: Words(
        "The host did not claim the job within two minutes.",
        "See on the host's page whether its agent runs, then clone the job.",
    ),
    Reason.NEVER_STARTED: Words(
        "The host claimed the job but never started its process.",
        "See the problems on the host's page, then clone the job.",
    ),
    Reason.SUPERVISOR_LOST: Words(
        "The process that watched the job on the host is gone, and its end was not seen.",
        "See the host's own logs, then clone the job.",
    ),
    Reason.HOST_REBOOTED: Words(
        "The host restarted while the job ran.",
        "Clone the job with retries: after the next restart it resumes from its last checkpoint.",
    ),
    Reason.DISK_FULL: Words(
        "The host's disk is full.", "Free disk space on the host, then clone the job."
    ),
    Reason.GPU_FAULT: Words(
        "A GPU reported a hardware fault.",
        "Cordon the GPU and check the driver's log before you try again.",
    ),
    Reason.GPU_DRIVER_MISMATCH: Words(
        "The GPU, its driver and the libraries of the job are incompatible with each other.",
        "Restart the host if its driver was just updated; otherwise install the driver that "
        "torch's CUDA version needs, or a torch that was built for this GPU.",
    ),
    Reason.KILLED_EXTERNALLY: Words(
        "Something outside this product ended the job.",
        "Ask who else works on the host, then clone the job.",
    ),
    Reason.VERSION_INCOMPATIBLE: Words(
        "The host's agent has a version that this server does not work with.",
        "Install the server's version on the host and start its agent again.",
    ),
    Reason.INTERNAL: Words(
        "The product itself failed here.",
        "Read the log, report what you find, and clone the job.",
    ),
    Reason.STOPPED_BY_USER: Words("Its owner stopped the job.", "Clone it to run it again."),
    Reason.STOPPED_BY_OPERATOR: Words(
        "An operator stopped the job.", "Ask the operator of the host before you clone it."
    ),
    Reason.SITE_STOPPED: Words(
        "It was ended because Slipway was stopped on the machine that ran it.",
        "`manage.py up` was stopped there, which ends the jobs of its own machine. Clone the job "
        "to run it again.",
    ),
    Reason.QUOTA: Words(
        "The team's quota was used up.", "Wait for the next period or ask an admin for more."
    ),
    Reason.SUPERSEDED: Words("A newer attempt replaced this attempt.", "See the newer attempt."),
    Reason.PEER_ENDED: Words(
        "It was stopped because the part of the job on another host had ended.",
        "See the host that the job's reason names.",
    ),
    Reason.LOST_AND_ABANDONED_BY_USER: Words(
        "The host was unreachable and a person gave the job up.",
        "When the host is back, it stops the remaining processes. Clone the job to run it again.",
    ),
    Reason.QUEUE_TIMEOUT: Words(
        "The job waited in the queue longer than allowed.",
        "Choose a host with a shorter queue, or clone the job.",
    ),
}


def words_for(reason: str) -> Words:
    """Return the sentence and next step of a reason code."""
    return WORDS[Reason(reason)]


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
