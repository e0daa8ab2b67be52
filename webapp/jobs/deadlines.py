"""Periodic work: end jobs that were not claimed in time, and allocate free devices."""

import time
from collections.abc import Callable, Collection
from datetime import timedelta

from django.db import transaction

from runners.reasons import Reason
from runners.timing import scaled
from webapp.core.clock import now
from webapp.hosts.contact import Contact, contact_of
from webapp.hosts.models import RUNS_JOBS, Host, Pool
from webapp.hosts.sweep import LONGEST_GAP_SECONDS
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.gangs import members_of, missing_words, release_unstarted
from webapp.jobs.models import Event, Job, JobState
from webapp.jobs.transitions import transition

START_TIMEOUT = timedelta(seconds=scaled(120, least=8))


def allocate_all() -> list[Job]:
    """Allocate in every pool with queued jobs; return the jobs that received devices."""
    waiting = Pool.objects.filter(jobs__state=JobState.QUEUED, jobs__deleted_at=None).distinct()
    return [job for pool in waiting for job in allocate_pool(pool)]


class StartDeadline:
    """End jobs that hosts in contact left unclaimed; a silent host ends none.

    Counts only hosts in contact for the whole timeout: after a gap of the host or of this
    server, the timeout starts again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = clock()
        self._heard_since: dict[str, float] = {}

    def step(self) -> list[Job]:
        """End overdue jobs and return them."""
        instant = self._clock()
        if instant - self._looked_at > LONGEST_GAP_SECONDS:
            self._heard_since.clear()
        self._looked_at = instant
        hosts = Host.objects.filter(kind__in=RUNS_JOBS).only("last_seen_at")
        reachable = [host.pk for host in hosts if contact_of(host) is Contact.LIVE]
        self._heard_since = {pk: self._heard_since.get(pk, instant) for pk in reachable}
        timeout = START_TIMEOUT.total_seconds()
        return end_unclaimed(
            [pk for pk, since in self._heard_since.items() if instant - since >= timeout]
        )


def end_unclaimed(hosts: Collection[str] | None = None) -> list[Job]:
    """End jobs that their hosts did not all claim in time; later claims are refused.

    With ``hosts``, only jobs with a part on one of them. A gang does not start while a claim is
    missing, so that a silent host no longer blocks the others.
    """
    waiting = Job.objects.filter(state=JobState.PREFLIGHT).select_related("current_attempt")
    unclaimed = [job for job in waiting if hosts is None or _has_part(job, hosts)]
    return [job for job in unclaimed if _is_overdue(job) and _end(job)]


def _has_part(job: Job, hosts: Collection[str]) -> bool:
    leader = job.current_attempt
    return leader is not None and any(each.host_id in hosts for each in members_of(leader))


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
            detail={"sentence": missing_words(attempt)},
        )
        if moved:
            release_unstarted(attempt)
    return moved
