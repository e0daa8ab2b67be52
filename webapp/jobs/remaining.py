"""The jobs at a site stop: ended with it, running elsewhere, or queued."""

from datetime import datetime
from typing import NamedTuple

from runners.reasons import Reason
from webapp.core.wording import listed
from webapp.jobs.models import LIVE_STATES, Attempt, Job, JobState

MOST_NAMED = 10


class Remaining(NamedTuple):
    """Jobs by outcome; a job on several hosts may be in two lists."""

    ended: list[str]  # by the site stop
    unreported: list[str]  # parts on this machine whose end is not stored yet
    elsewhere: list[str]  # parts on other hosts, which continue
    num_waiting: int


def remaining(own_host: str, since: datetime) -> Remaining:
    """Return the remaining jobs seen from one host; ``since`` is when the stop began."""
    ended = Job.objects.filter(reason=Reason.SITE_STOPPED, ended_at__gte=since).order_by("pk")
    claimed = Attempt.objects.filter(
        job__state__in=LIVE_STATES, claimed_at__isnull=False, ended_at=None
    )
    claimed = claimed.select_related("job", "host").order_by("job_id", "node_rank")
    waiting = Job.objects.filter(state=JobState.QUEUED, deleted_at=None).count()
    assigned = Job.objects.filter(state=JobState.PREFLIGHT).exclude(
        pk__in=[attempt.job_id for attempt in claimed]
    )
    return Remaining(
        [_name(job) for job in ended],
        [_name(each.job) for each in claimed if each.host_id == own_host],
        [f"{_name(each.job)} on {each.host}" for each in claimed if each.host_id != own_host],
        waiting + assigned.count(),
    )


def sentences(found: Remaining) -> list[str]:
    """Return the messages for the person who stops the site, one sentence per kind."""
    messages = []
    if found.ended:
        messages.append(f"Ended with it, as their pages say: {_some(found.ended)}.")
    if found.unreported:
        messages.append(
            f"Asked to stop; their pages show it when Slipway is back: {_some(found.unreported)}."
        )
    if found.elsewhere:
        messages.append(
            "Still running on other hosts, which report when Slipway runs again: "
            f"{_some(found.elsewhere)}."
        )
    if found.num_waiting:
        jobs = "1 job waits" if found.num_waiting == 1 else f"{found.num_waiting} jobs wait"
        messages.append(f"{jobs} in the queue until Slipway runs again.")
    return messages or ["No job was running or waiting."]


def _name(job: Job) -> str:
    return f"{job.name} ({job.pk})"


def _some(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return listed([*names[:MOST_NAMED], *([f"{more} more"] if more > 0 else [])])
