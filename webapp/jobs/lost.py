"""Attempts that a host claimed and that it no longer knows: two beats of grace, then an error."""

from collections.abc import Collection

from django.db import transaction
from django.db.models import F

from runners.reasons import Reason
from webapp.core.clock import now
from webapp.hosts.models import Host
from webapp.jobs.models import LIVE_STATES, Attempt, JobState
from webapp.jobs.transitions import transition

GRACE_BEATS = 2


def end_unknown_attempts(host: Host, seen: Collection[str]) -> list[Attempt]:
    """Count beats that miss a claimed attempt, and end those missed too often.

    ``seen`` is what the host found on its disk. Only a host that speaks can lose an attempt
    this way: silence counts nothing.
    """
    claimed = Attempt.objects.filter(
        host=host, claimed_at__isnull=False, ended_at=None, job__state__in=LIVE_STATES
    )
    claimed.filter(pk__in=seen, missed_beats__gt=0).update(missed_beats=0)
    claimed.exclude(pk__in=seen).update(missed_beats=F("missed_beats") + 1)
    lost = claimed.exclude(pk__in=seen).filter(missed_beats__gt=GRACE_BEATS)
    return [attempt for attempt in lost.select_related("job") if _end(attempt)]


def _end(attempt: Attempt) -> bool:
    reason = Reason.SUPERVISOR_LOST if attempt.acked_seq else Reason.NEVER_STARTED
    with transaction.atomic():
        moved = transition(
            attempt.job, JobState.ERROR, actor="system:reconcile", attempt=attempt, reason=reason
        )
        if moved:
            Attempt.objects.filter(pk=attempt.pk).update(ended_at=now())
    return moved
