"""Roll-ups of a series per 15 s and per 5 min, and the upkeep of the store."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import structlog
from django.conf import settings
from django.db import DataError, IntegrityError, transaction
from django.db.models import Min
from numpy.typing import NDArray

from webapp.core.clock import now_ms
from webapp.jobs.models import Attempt
from webapp.metrics import store
from webapp.metrics.models import MetricBatch, MetricChunk, MetricSource
from webapp.metrics.store import RAW_STEP_MS, RawSeries, needs_seal, prune_raw, seal

STEPS_MS = (15_000, 300_000)
WINDOW_MS = 4 * 3600 * 1000


class Band(NamedTuple):
    """Buckets of a series: start times and statistics of their points."""

    t_ms: NDArray[np.int64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mean: NDArray[np.float64]
    points: NDArray[np.int64]  # number of points per bucket


def bucket(series: RawSeries, step_ms: int) -> Band:
    """Return a series as buckets of ``step_ms`` that begin at multiples of it."""
    order = np.argsort(series.t_ms, kind="stable")
    t_ms, value = series.t_ms[order], series.value[order]
    starts, first, count = np.unique(t_ms // step_ms, return_index=True, return_counts=True)
    return Band(
        starts * step_ms,
        np.minimum.reduceat(value, first),
        np.maximum.reduceat(value, first),
        _means(value, first, count),
        count.astype(np.int64),
    )


def _means(
    value: NDArray[np.float64], first: NDArray[np.intp], count: NDArray[np.intp]
) -> NDArray[np.float64]:
    """Return the mean of each bucket, also if the sum of its values overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        means = np.add.reduceat(value, first) / count
    if not np.isfinite(means).all():
        shares = np.add.reduceat(value / np.repeat(count, count), first)
        means = np.where(np.isfinite(means), means, shares)
    return means


def decode_band(chunk: MetricChunk) -> Band:
    """Return the buckets of a roll-up chunk."""
    t_ms, low, high, mean, count = store.decode(bytes(chunk.body))
    return Band(
        t_ms.astype(np.int64),
        low.astype(np.float64),
        high.astype(np.float64),
        mean.astype(np.float64),
        count.astype(np.int64),
    )


def roll_up(source: MetricSource, *, is_ended: bool) -> int:
    """Roll up every complete sealed four-hour window; at the end also the last partial one.

    A window with late points is computed again. Returns the number of chunks written.
    """
    raw = _raw_chunks(source)
    if not raw:
        return 0
    start = _floor(max(source.rolled_through_ms, min(chunk.t0_ms for chunk in raw)))
    sealed_ms = max(chunk.t1_ms for chunk in raw) + 1
    end = sealed_ms if is_ended else _floor(sealed_ms)
    if end <= source.rolled_through_ms or end <= start:
        return 0
    rows = [row for chunk in _by_metric(raw) for row in _windows(source, *chunk, start, end)]
    with transaction.atomic(using=settings.METRICS_DATABASE):
        MetricChunk.objects.filter(
            attempt_id=source.attempt_id,
            source=source.source,
            step_ms__in=STEPS_MS,
            t0_ms__gte=start,
        ).delete()
        MetricChunk.objects.bulk_create(rows)
        MetricSource.objects.filter(pk=source.pk).update(rolled_through_ms=end)
    return len(rows)


def _raw_chunks(source: MetricSource) -> list[MetricChunk]:
    """Return the raw chunks that overlap windows not yet rolled up."""
    rows = MetricChunk.objects.filter(
        attempt_id=source.attempt_id,
        source=source.source,
        step_ms=RAW_STEP_MS,
        t1_ms__gte=_floor(source.rolled_through_ms),
    )
    return list(rows.order_by("metric", "t0_ms"))


def _by_metric(chunks: list[MetricChunk]) -> list[tuple[str, RawSeries]]:
    names = dict.fromkeys(chunk.metric for chunk in chunks)
    return [(name, merge([chunk for chunk in chunks if chunk.metric == name])) for name in names]


def merge(chunks: list[MetricChunk]) -> RawSeries:
    """Return the points of a metric's raw chunks, without duplicates, by sequence number."""
    columns = [store.decode(bytes(chunk.body)) for chunk in chunks]
    seq, t_ms, value = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    numbers, first = np.unique(seq.astype(np.int64), return_index=True)
    return RawSeries(numbers, t_ms[first].astype(np.int64), value[first].astype(np.float64))


def _windows(
    source: MetricSource, metric: str, series: RawSeries, start: int, end: int
) -> list[MetricChunk]:
    rows = []
    for window in range(start, end, WINDOW_MS):
        inside = (series.t_ms >= window) & (series.t_ms < min(window + WINDOW_MS, end))
        if not inside.any():
            continue
        part = RawSeries(series.seq[inside], series.t_ms[inside], series.value[inside])
        rows += [_row(source, metric, window, step, bucket(part, step)) for step in STEPS_MS]
    return rows


def _row(source: MetricSource, metric: str, window: int, step_ms: int, band: Band) -> MetricChunk:
    return MetricChunk(
        attempt_id=source.attempt_id,
        source=source.source,
        metric=metric,
        step_ms=step_ms,
        t0_ms=window,
        t1_ms=int(band.t_ms[-1]) + step_ms,
        n=int(band.points.sum()),
        body=store.encode(band),
    )


def _floor(t_ms: int) -> int:
    return t_ms - t_ms % WINDOW_MS


# Maintain the metric store: seal due journals, roll them up, prune old raw data.


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
