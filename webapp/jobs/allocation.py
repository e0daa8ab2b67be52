"""Who gets a host next: the oldest queued job, once the host is ready and free.

A host runs one job at a time. Runs at submit, at every end of a job, at every beat and from
the ticker; being called once too often changes nothing.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.db import transaction

from runners.reasons import Reason
from runners.timing import scaled
from webapp.core.clock import now
from webapp.hosts.contact import Contact, contact_of
from webapp.hosts.models import Host, HostState
from webapp.jobs.models import LIVE_STATES, Attempt, Command, Event, Job, JobState
from webapp.jobs.preflight import run_checks
from webapp.jobs.transitions import transition

ACTOR = "system:allocator"
MAX_PREFLIGHTS = 3
PREFLIGHT_RETRY = timedelta(seconds=scaled(30, least=1))


def allocate_host(host: Host) -> Job | None:
    """Give a free host to the next queued job and return that job, or None."""
    with transaction.atomic():
        host = Host.objects.select_for_update(no_key=True).get(pk=host.pk)
        if not is_free(host):
            return None
        for job in _waiting(host):
            if _may_try(job):
                return job if _take(job, host) else None
    return None


def is_free(host: Host) -> bool:
    """Return whether the host may take new work now."""
    return (
        host.state == HostState.READY
        and contact_of(host) is Contact.LIVE
        and not Job.objects.filter(host=host, state__in=LIVE_STATES).exists()
    )


def _waiting(host: Host) -> list[Job]:
    queued = Job.objects.filter(host=host, state=JobState.QUEUED, deleted_at=None)
    return list(queued.select_related("current_attempt").order_by("queued_at", "pk"))


def _failed_preflights(job: Job) -> list[Event]:
    events = Event.objects.filter(
        kind="job.state", subject=job.pk, from_state=JobState.PREFLIGHT, to_state=JobState.QUEUED
    )
    return list(events.order_by("-id"))


def _may_try(job: Job) -> bool:
    failed = _failed_preflights(job)
    return not failed or failed[0].at + PREFLIGHT_RETRY <= now()


def _take(job: Job, host: Host) -> bool:
    """Move the job to preflight and ring the host, or send it back with the failed checks."""
    attempt = job.current_attempt
    checks = run_checks(job, host)
    detail = {"checks": [check.as_detail() for check in checks]}
    if attempt is None or not transition(
        job, JobState.PREFLIGHT, actor=ACTOR, attempt=attempt, detail=detail
    ):
        return False
    failed = [check for check in checks if not check.is_ok]
    if failed:
        send_back(job, attempt, [check.as_detail() for check in failed])
        return False
    Command.objects.create(host=host, kind="start", attempt=attempt, next_at=now())
    return True


def send_back(
    job: Job, attempt: Attempt, failed: Sequence[Mapping[str, Any]], actor: str = ACTOR
) -> bool:
    """Queue a job again whose host is not fit for it, or end it after the third time."""
    is_last = len(_failed_preflights(job)) + 1 >= MAX_PREFLIGHTS
    return transition(
        job,
        JobState.ERROR if is_last else JobState.QUEUED,
        actor=actor,
        attempt=attempt,
        reason=Reason.PREFLIGHT_FAILED,
        detail={"checks": list(failed)},
    )
