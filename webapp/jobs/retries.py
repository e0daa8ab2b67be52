"""Which failures are the host's fault alone, so that the job may retry as a new attempt.

Failures caused by the job would recur: an out-of-memory job is never retried.
"""

from typing import Any

from django.db.models import F

from runners.reasons import Reason
from webapp.core.problems import InvalidProblem
from webapp.jobs.models import JobState

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


def fresh_start() -> dict[str, Any]:
    """Return the updates that reset a job for its next attempt."""
    return {
        "num_retries": F("num_retries") + 1,
        "host": None,
        "current_attempt": None,
        "started_at": None,
        "progress_done": None,
        "progress_total": None,
        "eta_seconds": None,
        "phase": "",
    }


def check_retries(retries: int) -> None:
    """Refuse an invalid number of retries.

    Raises:
        InvalidProblem: it is negative or too large.
    """
    if not 0 <= retries <= MOST_RETRIES:
        raise InvalidProblem(
            "max_retries", f"retries is {retries}; it can be 0 to {MOST_RETRIES}."
        )
