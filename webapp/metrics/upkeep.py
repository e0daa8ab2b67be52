"""Maintain the metric store: seal due journals, roll them up, prune old raw data."""

import time
from collections.abc import Callable
from datetime import timedelta

import structlog
from django.db import DataError, IntegrityError
from django.db.models import Min

from webapp.core.clock import now_ms
from webapp.jobs.models import Attempt
from webapp.metrics.models import MetricBatch, MetricSource
from webapp.metrics.rollup import roll_up
from webapp.metrics.store import needs_seal, prune_raw, seal

log = structlog.get_logger(__name__)
RAW_LIFETIME = timedelta(days=30)


TURN_SECONDS = 5.0  # per turn; the remainder follows in the next turn


def seal_due(clock: Callable[[], float] = time.monotonic) -> int:
    """Seal sources whose journal is due, roll them up, and return the points sealed.

    The oldest journal comes first, and a turn ends after ``TURN_SECONDS``, so that an attempt
    with many points does not block others. A source that cannot be sealed is logged and skipped.
    """
    journals = MetricBatch.objects.values("attempt_id", "source").annotate(at=Min("received_at"))
    started, sealed = clock(), 0
    for attempt_id, source in list(journals.order_by("at").values_list("attempt_id", "source")):
        if clock() - started > TURN_SECONDS:
            break
        try:
            sealed += _seal(attempt_id, source)
        except (ArithmeticError, DataError, IntegrityError, LookupError, TypeError, ValueError):
            log.warning("journal not sealed", attempt=attempt_id, source=source, exc_info=True)
    return sealed


def _seal(attempt_id: str, source: str) -> int:
    attempt = Attempt.objects.filter(pk=attempt_id).first()
    if attempt is None:
        return 0
    is_ended = attempt.ended_at is not None
    if not needs_seal(attempt_id, source, is_ended=is_ended):
        return 0
    sealed = seal(attempt_id, source, through_seq=attempt.acked_seq)
    stored = MetricSource.objects.get(attempt_id=attempt_id, source=source)
    roll_up(stored, is_ended=is_ended)
    return sealed


def prune_old() -> int:
    """Delete raw chunks older than a month; their roll-ups stay. Return how many."""
    return prune_raw(before_ms=now_ms() - int(RAW_LIFETIME.total_seconds() * 1000))
