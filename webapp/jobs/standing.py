"""How a job stands in words, its host's silence included: the same wherever jobs are shown.

Silence ends no job and changes no state. It only says how old the last news is.
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


class Standing(NamedTuple):
    """A chip, and the words beside it while its host is silent."""

    state: str  # names the chip's look
    word: str = ""  # instead of the look's own
    note: str = ""


class Silence(NamedTuple):
    """The hosts of a live job that are not heard, and how long the longest is silent.

    Where some are out of contact, those that missed a beat or two are not counted.
    """

    hosts: list[Host]
    seconds: float
    is_lost: bool  # out of contact, and with them whoever speaks for the job

    @property
    def names(self) -> str:
        """Return the hosts' names in a row."""
        return listed([host.name for host in self.hosts])


def silence_of(job: Job) -> Silence | None:
    """Return which hosts of a live job are silent; None while every one is heard."""
    if job.state not in LIVE_STATES:
        return None
    hosts = _hosts_of(job)
    found = {kind: [each for each in hosts if contact_of(each) is kind] for kind in GRAVE}
    away = next((each for each in found.values() if each), [])
    if not away:
        return None
    longest = max(silent_seconds(host) or 0.0 for host in away)
    return Silence(away, longest, is_lost=hosts[0] in found[Contact.UNREACHABLE])


def _hosts_of(job: Job) -> list[Host]:
    """Return the hosts that still run a part of the job, the one that speaks for it first."""
    if job.num_hosts == 1 or job.current_attempt is None:
        return [job.host] if job.host else []
    return [each.host for each in members_of(job.current_attempt) if each.ended_at is None]


def standing_of(job: Job) -> Standing:
    """Return how a job stands, as far as is known."""
    silence = silence_of(job)
    if silence is None:
        return Standing(job.state)
    who = _who(silence) if job.num_hosts > 1 else ""
    words = f"silent {clock(silence.seconds)}"
    if not silence.is_lost:
        return Standing(job.state, note=f"{who}{words}")
    word = f"Last known: {JobState(job.state).label.lower()}"
    return Standing("lost", word, f"{who or 'host '}{words}")


def _who(silence: Silence) -> str:
    count = len(silence.hosts)
    return f"{count} hosts " if count > 1 else f"{silence.names} "


class Leftover(NamedTuple):
    """What is known of the attempt that somebody gave up on."""

    is_over: bool
    title: str
    text: str


def leftover_of(job: Job) -> Leftover | None:
    """Return what became of an abandoned job's parts; None for every other job."""
    given_up = _given_up(job)
    if not given_up:
        return None
    still = [part for part in given_up if part.ended_at is None]
    names = listed([part.host.name for part in still or given_up])
    if not still:
        return Leftover(
            is_over=True,
            title=f"Confirmed by {names}: nothing of it runs any more",
            text=" ".join(dict.fromkeys(_end_words(part) for part in given_up)),
        )
    return Leftover(
        is_over=False,
        title=f"Its attempt may still run {f'on {names}' if job.num_hosts > 1 else 'there'}",
        text=" ".join(_wait_words(part.host) for part in still),
    )


def _given_up(job: Job) -> list[Attempt]:
    reason = Reason.LOST_AND_ABANDONED_BY_USER
    if job.current_attempt is None or (job.num_hosts == 1 and job.reason != reason):
        return []
    return [each for each in members_of(job.current_attempt) if each.stop_reason == reason]


def _wait_words(host: Host) -> str:
    if contact_of(host) is Contact.LIVE:
        return f"{host.name} is back and was told to stop it; it has not said yet that it did."
    return (
        f"{host.name} has been silent for {clock(silent_seconds(host) or 0)}. It is told to stop "
        "the attempt as soon as it is heard. Until then nobody knows whether it runs."
    )


def _end_words(attempt: Attempt) -> str:
    record = attempt.exit_record
    if record.get("reason") == Reason.OK:
        return "It had ended well before it could be stopped; what it wrote lies on that host."
    return f"The attempt ended there: {str(record.get('reason') or 'unknown').replace('_', ' ')}."
