"""Keep the metric store small: seal what is due, roll it up, forget old raw data."""

from datetime import timedelta

from webapp.core.clock import now_ms
from webapp.jobs.models import Attempt
from webapp.metrics.models import MetricBatch, MetricSource
from webapp.metrics.rollup import roll_up
from webapp.metrics.store import needs_seal, prune_raw, seal

RAW_LIFETIME = timedelta(days=30)


def seal_due() -> int:
    """Seal every source whose journal is due, roll it up, and return the points sealed."""
    waiting = MetricBatch.objects.values_list("attempt_id", "source").distinct()
    return sum(_seal(attempt_id, source) for attempt_id, source in waiting)


def _seal(attempt_id: str, source: str) -> int:
    attempt = Attempt.objects.filter(pk=attempt_id).first()
    if attempt is None:
        return 0
    is_ended = attempt.ended_at is not None
    if not needs_seal(attempt_id, source, is_ended=is_ended):
        return 0
    sealed = seal(attempt_id, source, through_seq=attempt.acked_seq)
    known = MetricSource.objects.get(attempt_id=attempt_id, source=source)
    roll_up(known, is_ended=is_ended)
    return sealed


def prune_old() -> int:
    """Delete raw chunks older than a month; their roll-ups stay. Return how many."""
    return prune_raw(before_ms=now_ms() - int(RAW_LIFETIME.total_seconds() * 1000))
