"""A job's state as text, including the silence of its host, the same on all pages.

A silent host changes no state of a job; the text only states how old the last report is.
"""

from typing import NamedTuple

from runners.reasons import Reason
from webapp.core.units import clock
from webapp.core.wording import listed
from webapp.hosts.contact import Contact, contact_of, silent_seconds
from webapp.hosts.models import Host
from webapp.jobs.gangs import members_of
from webapp.jobs.models import LIVE_STATES, Attempt, Job, JobState

GRAVE = (Contact.UNREACHABLE, Contact.DEGRADED)  # the gravest first


class StateLabel(NamedTuple):
    """A status chip, and a note while the job's host is silent."""

    state: str  # selects the chip's style
    word: str = ""  # replaces the style's own word
    note: str = ""


class Silence(NamedTuple):
    """The silent hosts of a live job, and the longest silence.

    If some are unreachable, hosts that only missed a heartbeat or two are not counted.
    """

    hosts: list[Host]
    seconds: float
    is_lost: bool  # unreachable, including the gang's leader

    @property
    def names(self) -> str:
        """Return the hosts' names as a list in words."""
        return listed([host.name for host in self.hosts])


def silence_of(job: Job) -> Silence | None:
    """Return the silent hosts of a live job; None if all are in contact."""
    if job.state not in LIVE_STATES:
        return None
    hosts = _hosts_of(job)
    by_contact = {kind: [each for each in hosts if contact_of(each) is kind] for kind in GRAVE}
    silent = next((each for each in by_contact.values() if each), [])
    if not silent:
        return None
    longest = max(silent_seconds(host) or 0.0 for host in silent)
    return Silence(silent, longest, is_lost=hosts[0] in by_contact[Contact.UNREACHABLE])


def _hosts_of(job: Job) -> list[Host]:
    """Return the hosts that still run a part of the job, the leader's first."""
    if job.num_hosts == 1 or job.current_attempt is None:
        return [job.host] if job.host else []
    return [each.host for each in members_of(job.current_attempt) if each.ended_at is None]


def state_label_of(job: Job) -> StateLabel:
    """Return a job's last known state as a label."""
    silence = silence_of(job)
    if silence is None:
        return StateLabel(job.state)
    who = _who(silence) if job.num_hosts > 1 else ""
    words = f"silent {clock(silence.seconds)}"
    if not silence.is_lost:
        return StateLabel(job.state, note=f"{who}{words}")
    word = f"Last known: {JobState(job.state).label.lower()}"
    return StateLabel("lost", word, f"{who or 'host '}{words}")


def _who(silence: Silence) -> str:
    count = len(silence.hosts)
    return f"{count} hosts " if count > 1 else f"{silence.names} "


class Leftover(NamedTuple):
    """What is known about the attempt of an abandoned job."""

    is_over: bool
    title: str
    text: str


def leftover_of(job: Job) -> Leftover | None:
    """Return the fate of an abandoned job's parts; None for every other job."""
    given_up = _given_up(job)
    if not given_up:
        return None
    running = [part for part in given_up if part.ended_at is None]
    names = listed([part.host.name for part in running or given_up])
    if not running:
        return Leftover(
            is_over=True,
            title=f"Confirmed by {names}: nothing of it runs any more",
            text=" ".join(dict.fromkeys(_end_words(part) for part in given_up)),
        )
    return Leftover(
        is_over=False,
        title=f"Its attempt may still run {f'on {names}' if job.num_hosts > 1 else 'there'}",
        text=" ".join(_wait_words(part.host) for part in running),
    )


def _given_up(job: Job) -> list[Attempt]:
    reason = Reason.LOST_AND_ABANDONED_BY_USER
    if job.current_attempt is None or (job.num_hosts == 1 and job.reason != reason):
        return []
    return [each for each in members_of(job.current_attempt) if each.stop_reason == reason]


def _wait_words(host: Host) -> str:
    if contact_of(host) is Contact.LIVE:
        return f"{host.name} is back and was told to stop it; it has not confirmed yet."
    return (
        f"{host.name} has been silent for {clock(silent_seconds(host) or 0)}. It is told to stop "
        "the attempt at its next heartbeat. Until then it is unknown whether it runs."
    )


def _end_words(attempt: Attempt) -> str:
    record = attempt.exit_record
    if record.get("reason") == Reason.OK:
        return "It had succeeded before it could be stopped; its output is on that host."
    return f"The attempt ended there: {str(record.get('reason') or 'unknown').replace('_', ' ')}."
