"""Write metric points: journal received batches, seal them into chunks, prune old raw data.

A journal row is one batch of one source, keyed by its first sequence number, so that a
redelivered batch conflicts and is ignored. Sealing turns a source's journal into one chunk
per metric in one transaction. Points are identified by sequence number, so that reading
never counts one twice.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import zstandard
from django.conf import settings
from django.db import connections, transaction
from numpy.typing import NDArray

from webapp.core.clock import now
from webapp.metrics import codec
from webapp.metrics.models import MetricBatch, MetricChunk, MetricSource

RAW_STEP_MS = 0
SEAL_POINTS = 600
SEAL_AFTER_MS = 600_000
MAX_SOURCES = 64  # per attempt
MAX_METRICS = 500  # names per source; each becomes a row of chunks


class Point(NamedTuple):
    """Named values at one instant, numbered by the attempt's event sequence."""

    seq: int
    t_ms: int
    source: str
    values: Mapping[str, float]


class RawSeries(NamedTuple):
    """One metric's points by sequence number."""

    seq: NDArray[np.int64]
    t_ms: NDArray[np.int64]
    value: NDArray[np.float64]


class Delivery(NamedTuple):
    """Points of one attempt, and the last event number in the main database."""

    attempt_id: str
    points: Sequence[Point]
    acked_seq: int | None = None


def append(attempt_id: str, points: Sequence[Point], *, acked_seq: int | None = None) -> list[str]:
    """Journal the points of one delivery; a repeated delivery changes nothing.

    ``acked_seq`` is the last number in the main database: rows beyond it come from a delivery
    that was not committed there and will be repeated; they are discarded first.

    Returns:
        For each source or metric beyond the limits, why it was left out.
    """
    return append_all([Delivery(attempt_id, points, acked_seq)]).get(attempt_id, [])


def append_all(deliveries: Iterable[Delivery]) -> dict[str, list[str]]:
    """Journal deliveries of different attempts in one transaction, as ``append`` does for one.

    Returns:
        For each attempt with omissions, what was left out and why.
    """
    nonempty = [each for each in deliveries if each.points]
    if not nonempty:
        return {}
    surplus: dict[str, list[str]] = defaultdict(list)
    with transaction.atomic(using=settings.METRICS_DATABASE):
        _discard(each for each in nonempty if each.acked_seq is not None)
        by_source: dict[tuple[str, str], list[Point]] = defaultdict(list)
        for each in nonempty:
            for point in each.points:
                by_source[each.attempt_id, point.source].append(point)
        sources = _known_sources(by_source)
        rows = []
        for (attempt_id, name), points in sorted(by_source.items()):
            source = sources.get((attempt_id, name)) or _new_source(attempt_id, name)
            if source is None:
                why = f"metric: source {name} is beyond the {MAX_SOURCES} of one attempt"
            else:
                accepted, why = _within_names(source, points)
                rows.append(_journal_row(source, accepted))
            surplus[attempt_id] += [why] if why else []
        MetricBatch.objects.bulk_create(rows, ignore_conflicts=True)
        MetricSource.objects.filter(pk__in=[each.pk for each in sources.values()]).update(
            last_received_at=now()
        )
    return surplus


def _discard(deliveries: Iterable[Delivery]) -> None:
    """Delete journal rows beyond the numbers in the main database."""
    with connections[settings.METRICS_DATABASE].cursor() as cursor:
        cursor.executemany(
            f"DELETE FROM {MetricBatch._meta.db_table} WHERE attempt_id = %s AND seq > %s",  # noqa: S608 - the name of a model's table
            [(each.attempt_id, each.acked_seq) for each in deliveries],
        )


def _known_sources(keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], MetricSource]:
    requested = set(keys)
    rows = MetricSource.objects.filter(
        attempt_id__in={attempt_id for attempt_id, _ in requested},
        source__in={name for _, name in requested},
    )
    by_key = {(row.attempt_id, row.source): row for row in rows}
    return {key: by_key[key] for key in requested if key in by_key}


def _new_source(attempt_id: str, name: str) -> MetricSource | None:
    """Return a new source's row, or None at the attempt's limit of sources."""
    if MetricSource.objects.filter(attempt_id=attempt_id).count() >= MAX_SOURCES:
        return None
    source, _ = MetricSource.objects.get_or_create(
        attempt_id=attempt_id, source=name, defaults={"last_received_at": now()}
    )
    return source


def _within_names(source: MetricSource, points: list[Point]) -> tuple[list[Point], str]:
    """Return the points without names beyond the source's limit, and a reason if any."""
    names = dict.fromkeys(name for point in points for name in point.values)
    new = [name for name in names if name not in source.metrics]
    if not new:
        return points, ""
    room = max(0, MAX_METRICS - len(source.metrics))
    source.metrics = [*source.metrics, *new[:room]]
    source.save(update_fields=["metrics"])
    if len(new) <= room:
        return points, ""
    extra = set(new[room:])
    accepted = [
        point._replace(values={k: v for k, v in point.values.items() if k not in extra})
        for point in points
    ]
    return accepted, f"metric: source {source.source} has more than {MAX_METRICS} names"


def _journal_row(source: MetricSource, points: list[Point]) -> MetricBatch:
    return MetricBatch(
        attempt_id=source.attempt_id,
        source=source.source,
        seq=points[0].seq,
        t0_ms=min(point.t_ms for point in points),
        t1_ms=max(point.t_ms for point in points),
        n=len(points),
        received_at=now(),
        body=_pack(points),
    )


def _pack(points: list[Point]) -> bytes:
    text = json.dumps([[point.seq, point.t_ms, dict(point.values)] for point in points])
    return zstandard.ZstdCompressor(level=codec.LEVEL).compress(text.encode())


def unpack(batch: MetricBatch) -> list[Point]:
    """Return the points of a journal row."""
    text = zstandard.ZstdDecompressor().decompress(bytes(batch.body))
    return [Point(seq, t_ms, batch.source, values) for seq, t_ms, values in json.loads(text)]


def gather(points: Iterable[Point]) -> dict[str, RawSeries]:
    """Return one series per metric, without duplicates, by sequence number."""
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

    ``through_seq`` is the number acknowledged by the main database; later rows are not final.
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
    """Return whether a source's journal is long or old enough to be sealed."""
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
