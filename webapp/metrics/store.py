"""Write metric points: journal what hosts ship, seal it into chunks, forget old raw data.

A journal row is one shipped batch of one source, keyed by its first sequence number, so a
redelivered batch conflicts and is ignored. Sealing turns a source's journal into one chunk
per metric in one transaction. A point is known by its sequence number wherever it lies, so
reading never counts one twice.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import zstandard
from django.conf import settings
from django.db import transaction
from numpy.typing import NDArray

from webapp.core.clock import now
from webapp.metrics import codec
from webapp.metrics.models import MetricBatch, MetricChunk, MetricSource

RAW_STEP_MS = 0
SEAL_POINTS = 600
SEAL_AFTER_MS = 600_000


class Point(NamedTuple):
    """Named values at one instant, numbered by the attempt's event sequence."""

    seq: int
    t_ms: int
    source: str
    values: Mapping[str, float]


class RawSeries(NamedTuple):
    """One metric's points in the order of their numbers."""

    seq: NDArray[np.int64]
    t_ms: NDArray[np.int64]
    value: NDArray[np.float64]


def append(attempt_id: str, points: Sequence[Point], *, acked_seq: int | None = None) -> None:
    """Journal the points of one delivery; delivered again, it changes nothing.

    ``acked_seq`` is what the main database holds: rows beyond it were left by a delivery that
    did not commit there, will be delivered again, and are discarded first.
    """
    if not points:
        return
    with transaction.atomic(using=settings.METRICS_DATABASE):
        if acked_seq is not None:
            MetricBatch.objects.filter(attempt_id=attempt_id, seq__gt=acked_seq).delete()
        by_source = sorted(points, key=lambda point: point.source)
        for source, group in groupby(by_source, key=lambda point: point.source):
            _append_source(attempt_id, source, list(group))


def _append_source(attempt_id: str, source: str, points: list[Point]) -> None:
    row = MetricBatch(
        attempt_id=attempt_id,
        source=source,
        seq=points[0].seq,
        t0_ms=min(point.t_ms for point in points),
        t1_ms=max(point.t_ms for point in points),
        n=len(points),
        received_at=now(),
        body=_pack(points),
    )
    MetricBatch.objects.bulk_create([row], ignore_conflicts=True)
    _note_source(attempt_id, source, points)


def _note_source(attempt_id: str, source: str, points: list[Point]) -> None:
    known, _ = MetricSource.objects.get_or_create(attempt_id=attempt_id, source=source)
    names = dict.fromkeys(name for point in points for name in point.values)
    new = [name for name in names if name not in known.metrics]
    known.metrics = [*known.metrics, *new]
    known.last_received_at = now()
    known.save(update_fields=["metrics", "last_received_at"])


def _pack(points: list[Point]) -> bytes:
    text = json.dumps([[point.seq, point.t_ms, dict(point.values)] for point in points])
    return zstandard.ZstdCompressor(level=codec.LEVEL).compress(text.encode())


def unpack(batch: MetricBatch) -> list[Point]:
    """Return the points of a journal row."""
    text = zstandard.ZstdDecompressor().decompress(bytes(batch.body))
    return [Point(seq, t_ms, batch.source, values) for seq, t_ms, values in json.loads(text)]


def gather(points: Iterable[Point]) -> dict[str, RawSeries]:
    """Return the points as one series per metric, each point once, in order of number."""
    unique = {point.seq: point for point in points}
    rows: dict[str, list[tuple[int, int, float]]] = {}
    for _, point in sorted(unique.items()):
        for name, value in point.values.items():
            rows.setdefault(name, []).append((point.seq, point.t_ms, value))
    return {name: _columns(triples) for name, triples in rows.items()}


def _columns(triples: list[tuple[int, int, float]]) -> RawSeries:
    seq, t_ms, value = zip(*triples, strict=True)
    return RawSeries(
        np.array(seq, np.int64), np.array(t_ms, np.int64), np.array(value, np.float64)
    )


def seal(attempt_id: str, source: str, *, through_seq: int) -> int:
    """Move a source's journal up to ``through_seq`` into chunks; return the points moved.

    ``through_seq`` is what the main database acknowledged: nothing beyond it is final.
    """
    with transaction.atomic(using=settings.METRICS_DATABASE):
        lock = MetricSource.objects.select_for_update().get(attempt_id=attempt_id, source=source)
        journal = MetricBatch.objects.filter(
            attempt_id=attempt_id, source=source, seq__lte=through_seq
        ).order_by("seq")
        batches = list(journal)
        if not batches:
            return 0
        points = [point for batch in batches for point in unpack(batch)]
        MetricChunk.objects.bulk_create(
            _chunk(attempt_id, source, name, series) for name, series in gather(points).items()
        )
        journal.filter(seq__in=[batch.seq for batch in batches]).delete()
        lock.sealed_through_seq = max(lock.sealed_through_seq, *(point.seq for point in points))
        oldest = min(batch.t0_ms for batch in batches)
        lock.rolled_through_ms = min(lock.rolled_through_ms, oldest)
        lock.save(update_fields=["sealed_through_seq", "rolled_through_ms"])
    return len(points)


def _chunk(attempt_id: str, source: str, metric: str, series: RawSeries) -> MetricChunk:
    t0_ms = int(series.t_ms.min())
    key = {
        "attempt_id": attempt_id,
        "source": source,
        "metric": metric,
        "step_ms": RAW_STEP_MS,
        "t0_ms": t0_ms,
    }
    return MetricChunk(
        **key,
        gen=MetricChunk.objects.filter(**key).count(),
        t1_ms=int(series.t_ms.max()),
        n=len(series.seq),
        body=codec.encode(series),
    )


def needs_seal(attempt_id: str, source: str, *, is_ended: bool) -> bool:
    """Return whether the journal of a source is long or old enough to be sealed."""
    rows = list(
        MetricBatch.objects.filter(attempt_id=attempt_id, source=source).values_list(
            "n", "t0_ms", "t1_ms"
        )
    )
    if not rows:
        return False
    points = sum(n for n, _, _ in rows)
    age_ms = max(t1 for _, _, t1 in rows) - min(t0 for _, t0, _ in rows)
    return is_ended or points >= SEAL_POINTS or age_ms >= SEAL_AFTER_MS


def prune_raw(*, before_ms: int) -> int:
    """Delete raw chunks that ended before an instant; their roll-ups stay. Return how many."""
    rows, _ = MetricChunk.objects.filter(step_ms=RAW_STEP_MS, t1_ms__lt=before_ms).delete()
    return rows
