"""How a job stands in words, its host's silence included: the same wherever jobs are shown.

Silence ends no job and changes no state. It only says how old the last news is.
"""

from typing import NamedTuple

from runners.reasons import Reason
from webapp.core.units import clock
from webapp.hosts.contact import Contact, contact_of, silent_seconds
from webapp.jobs.models import LIVE_STATES, Attempt, Job, JobState


class Standing(NamedTuple):
    """A chip, and the words beside it while its host is silent."""

    state: str  # names the chip's look
    word: str = ""  # instead of the look's own
    note: str = ""


def standing_of(job: Job) -> Standing:
    """Return how a job stands, as far as is known."""
    host = job.host
    if host is None or job.state not in LIVE_STATES:
        return Standing(job.state)
    contact, silent = contact_of(host), silent_seconds(host)
    if silent is None or contact is Contact.LIVE:
        return Standing(job.state)
    if contact is Contact.DEGRADED:
        return Standing(job.state, note=f"silent {clock(silent)}")
    word = f"Last known: {JobState(job.state).label.lower()}"
    return Standing("lost", word, f"host silent {clock(silent)}")


class Leftover(NamedTuple):
    """What is known of the attempt that somebody gave up on."""

    is_over: bool
    title: str
    text: str


def leftover_of(job: Job) -> Leftover | None:
    """Return what became of an abandoned job's attempt; None for every other job."""
    attempt = job.current_attempt
    if job.reason != Reason.LOST_AND_ABANDONED_BY_USER or attempt is None:
        return None
    host = attempt.host
    if attempt.ended_at is not None:
        return Leftover(
            is_over=True,
            title=f"Confirmed by {host.name}: nothing of it runs any more",
            text=_end_words(attempt),
        )
    silent = silent_seconds(host)
    if contact_of(host) is Contact.LIVE:
        text = f"{host.name} is back and was told to stop it; it has not said yet that it did."
    else:
        text = (
            f"{host.name} has been silent for {clock(silent or 0)}. It is told to stop the "
            "attempt as soon as it is heard. Until then nobody knows whether it runs."
        )
    return Leftover(is_over=False, title="Its attempt may still run there", text=text)


def _end_words(attempt: Attempt) -> str:
    record = attempt.exit_record
    if record.get("reason") == Reason.OK:
        return "It had ended well before it could be stopped; what it wrote lies on that host."
    return f"The attempt ended there: {str(record.get('reason') or 'unknown').replace('_', ' ')}."
