"""The checks of a preflight as lists on a page, read from the job's events."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from runners.reasons import Reason
from webapp.core.wording import capitalised
from webapp.jobs.allocation import MAX_PREFLIGHTS
from webapp.jobs.models import Event, Job, JobState


@dataclass(frozen=True)
class Checked:
    """One line of a checklist."""

    name: str
    is_ok: bool
    sentence: str
    remedy: str

    @property
    def status(self) -> str:
        """Return the state whose shape ticks the line."""
        return "ready" if self.is_ok else "failed"


@dataclass(frozen=True)
class Look:
    """One look at a host: whose it was, when, and every check of it."""

    title: str
    at: datetime
    checks: tuple[Checked, ...]


@dataclass(frozen=True)
class Preflight:
    """Where a job's preflight stands: a sentence, and the latest looks."""

    sentence: str
    looks: tuple[Look, ...]


def checks_of(event: Event) -> tuple[Checked, ...]:
    """Return the checks that stand in an event, those that failed first."""
    found = [
        Checked(
            capitalised(str(check.get("name", ""))),
            bool(check.get("ok")),
            str(check.get("sentence", "")),
            str(check.get("remedy", "")),
        )
        for check in event.detail.get("checks", ())
    ]
    return tuple(sorted(found, key=lambda check: check.is_ok))


def preflight_of(job: Job, events: Sequence[Event]) -> Preflight | None:
    """Return the preflight of a job that is in one or came back from one, else None."""
    is_back = job.state == JobState.QUEUED or job.reason == Reason.PREFLIGHT_FAILED
    looked = [event for event in events if event.kind == "job.state" and event.detail]
    looked = [event for event in looked if event.detail.get("checks")]
    if not looked or not (is_back or job.state == JobState.PREFLIGHT):
        return None
    last = looked[-1]
    if job.state == JobState.PREFLIGHT:
        sentence = f"By its last beat {_host(job)} is fit. It looks itself now, then it starts."
        return Preflight(sentence, (_look(last),))
    return Preflight(_outcome(job, events), (_look(last),))


def _host(job: Job) -> str:
    return job.place


def _outcome(job: Job, events: Sequence[Event]) -> str:
    failed = sum(1 for event in events if event.reason == Reason.PREFLIGHT_FAILED)
    if job.state == JobState.QUEUED:
        return f"Try {failed} of {MAX_PREFLIGHTS} failed; the next one comes in half a minute."
    return f"{failed} tries failed, so the job ended. Mend this and clone it."


def _look(event: Event) -> Look:
    by_host = event.actor.startswith("host:")
    title = "What the host found itself" if by_host else "By the host's last beat"
    return Look(title, event.at, checks_of(event))
