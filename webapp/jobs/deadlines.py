"""Ends of attempts without a report: not claimed in time, or missing from heartbeats."""

import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta

from django.db import transaction
from django.db.models import F, Q

from runners.messages import ExitRecord
from runners.reasons import Reason
from runners.timing import scaled
from webapp.core.clock import now, now_ms
from webapp.hosts.contact import LONGEST_GAP_SECONDS, Contact, contact_of
from webapp.hosts.models import RUNS_JOBS, Host, Pool
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.gangs import member_ended, members_of, missing_words, release_unstarted
from webapp.jobs.models import LIVE_STATES, Attempt, Event, Job, JobState
from webapp.jobs.reservations import devices_release
from webapp.jobs.transitions import transition

# End claimed attempts that are missing from two consecutive heartbeats of their host.


GRACE_BEATS = 2


def end_unknown_attempts(seen: Mapping[str, Collection[str]]) -> list[Attempt]:
    """Count heartbeats that miss a claimed attempt, and end those missed too often.

    ``seen`` maps host ids to the attempts found on the host's disk. Only received heartbeats
    count; a silent host loses no attempt.
    """
    claimed = Attempt.objects.filter(
        Q(job__state__in=LIVE_STATES) | Q(job__num_hosts__gt=1),
        host__in=seen,
        claimed_at__isnull=False,
        ended_at=None,
    )
    missed: list[Attempt] = []
    present: list[Attempt] = []
    for attempt in claimed.select_related("job"):
        (present if attempt.pk in seen[attempt.host_id] else missed).append(attempt)
    if recovered := [attempt.pk for attempt in present if attempt.missed_beats]:
        Attempt.objects.filter(pk__in=recovered).update(missed_beats=0)
    if missed:
        rows = Attempt.objects.filter(pk__in=[attempt.pk for attempt in missed])
        rows.update(missed_beats=F("missed_beats") + 1)
    return [each for each in missed if each.missed_beats >= GRACE_BEATS and _end_lost(each)]


def _end_lost(attempt: Attempt) -> bool:
    reason = Reason.SUPERVISOR_LOST if attempt.acked_seq else Reason.NEVER_STARTED
    if attempt.job.is_shared_out:
        return _end_member(attempt, reason)
    with transaction.atomic():
        moved = transition(
            attempt.job, JobState.ERROR, actor="system:reconcile", attempt=attempt, reason=reason
        )
        if moved:
            Attempt.objects.filter(pk=attempt.pk).update(ended_at=now())
            devices_release(attempt)
    return moved


def _end_member(attempt: Attempt, reason: Reason) -> bool:
    """End one host's part of a job; the job's policy decides about the others."""
    record = ExitRecord(
        exit_code=None, signal=None, reason=reason, by="reaper",
        started_at_ms=None, ended_at_ms=now_ms(),
    )  # fmt: skip
    with transaction.atomic():
        Job.objects.select_for_update().get(pk=attempt.job_id)
        attempt.ended_at, attempt.exit_record = now(), record.model_dump(mode="json")
        attempt.save(update_fields=["ended_at", "exit_record"])
        devices_release(attempt)
        member_ended(attempt, record)
    return True


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
