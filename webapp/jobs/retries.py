"""Which ends are the host's fault alone: those a job may try again, as a new attempt.

What the job itself caused would happen again: one that ran out of memory is never retried.
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
    """Return whether a job that would end so goes back to the queue instead."""
    return to in ENDS and reason in RETRYABLE and retries < most


def fresh_start() -> dict[str, Any]:
    """Return what a job forgets of its last attempt when it goes back to the queue."""
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
    """Refuse a number of retries that nobody should ask for.

    Raises:
        InvalidProblem: it is negative or too large.
    """
    if not 0 <= retries <= MOST_RETRIES:
        raise InvalidProblem(
            "max_retries", f"retries is {retries}; it can be 0 to {MOST_RETRIES}."
        )
