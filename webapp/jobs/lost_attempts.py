"""End claimed attempts that are missing from two consecutive heartbeats of their host."""

from collections.abc import Collection, Mapping

from django.db import transaction
from django.db.models import F, Q

from runners.messages import ExitRecord
from runners.reasons import Reason
from webapp.core.clock import now, now_ms
from webapp.jobs.gangs import member_ended
from webapp.jobs.holding import devices_release
from webapp.jobs.models import LIVE_STATES, Attempt, Job, JobState
from webapp.jobs.transitions import transition

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
    return [each for each in missed if each.missed_beats >= GRACE_BEATS and _end(each)]


def _end(attempt: Attempt) -> bool:
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
