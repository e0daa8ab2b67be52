"""Metrics: store, roll up and read points."""

import json
import struct
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate, groupby, takewhile
from typing import NamedTuple

import numpy as np
import structlog
import zstandard
from django.conf import settings
from django.db import connections, transaction
from django.db.models import QuerySet
from numpy.typing import NDArray

from webapp.core.clock import now, now_ms
from webapp.metrics.models import MetricBatch, MetricChunk, MetricSource

# ---------------------------------------------------------------------------
# Write metric points: journal received batches, seal them into compressed chunks.
# ---------------------------------------------------------------------------


# Lossless codec for columns of numbers in one compressed blob.
#
# Integers: second differences, zig-zag, the smallest width that holds them, bytes shuffled.
# Floats: the same on ``value * 10**k`` if that is exact for k <= 3, else the XOR with the previous
# value, as float32 if that is lossless. All columns share one zstd frame; byte 0 names the codec,
# so that others can be added.


CODEC_ZSTD_COLUMNS = 1
LEVEL = 3
MAX_DECIMALS = 3
_EXACT_INTEGER = float(2**52)
_KIND_INTEGERS = 0
_KIND_DECIMALS = 10  # plus k
_KIND_XOR32 = 32
_KIND_XOR64 = 64
_HEADER = struct.Struct("<HI")  # columns, rows
_COLUMN = struct.Struct("<BBI")  # kind, width in bytes, payload bytes
_WIDTHS = (1, 2, 4, 8)

Column = NDArray[np.int64] | NDArray[np.float64]


def encode(columns: Sequence[Column]) -> bytes:
    """Return the blob of int64 and float64 columns of equal length."""
    rows = len(columns[0])
    if any(len(column) != rows for column in columns):
        lengths = [len(column) for column in columns]
        raise ValueError(f"columns of one blob need one length, got {lengths}")
    parts = [_HEADER.pack(len(columns), rows), *(_encode_column(column) for column in columns)]
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(b"".join(parts))
    return bytes([CODEC_ZSTD_COLUMNS]) + frame


def decode(blob: bytes) -> list[Column]:
    """Return the columns of a blob.

    Raises:
        ValueError: byte 0 names an unknown codec.
    """
    if not blob or blob[0] != CODEC_ZSTD_COLUMNS:
        raise ValueError(f"unknown metric codec {blob[:1].hex() or 'of an empty blob'}")
    raw = zstandard.ZstdDecompressor().decompress(bytes(blob[1:]))
    count, rows = _HEADER.unpack_from(raw)
    offset = _HEADER.size
    columns: list[Column] = []
    for _ in range(count):
        kind, width, size = _COLUMN.unpack_from(raw, offset)
        offset += _COLUMN.size
        columns.append(_decode_column(kind, width, raw[offset : offset + size], rows))
        offset += size
    return columns


def _encode_column(column: Column) -> bytes:
    if np.issubdtype(column.dtype, np.integer):
        return _pack_words(_KIND_INTEGERS, _differences(column.astype(np.int64)))
    floats = column.astype(np.float64)
    for decimals in range(MAX_DECIMALS + 1):
        scaled = _as_decimals(floats, decimals)
        if scaled is not None:
            return _pack_words(_KIND_DECIMALS + decimals, _differences(scaled))
    single = _as_single(floats)
    if single is not None:
        return _pack_words(_KIND_XOR32, _xor(single.view(np.uint32)).astype(np.uint64))
    return _pack_words(_KIND_XOR64, _xor(floats.view(np.uint64)))


def _as_decimals(floats: NDArray[np.float64], decimals: int) -> NDArray[np.int64] | None:
    """Return ``floats * 10**decimals`` as integers, or None if that is not exact."""
    factor = 10.0**decimals
    if not np.isfinite(floats).all() or (np.abs(floats) > _EXACT_INTEGER / factor).any():
        return None
    scaled = np.rint(floats * factor)
    restored = scaled.astype(np.int64).astype(np.float64) / factor
    is_exact = np.array_equal(restored.view(np.uint64), floats.view(np.uint64))
    return scaled.astype(np.int64) if is_exact else None


def _as_single(floats: NDArray[np.float64]) -> NDArray[np.float32] | None:
    with np.errstate(over="ignore", invalid="ignore"):
        single = floats.astype(np.float32)
        restored = single.astype(np.float64)
    is_exact = np.array_equal(restored.view(np.uint64), floats.view(np.uint64))
    return single if is_exact else None


def _differences(integers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return zig-zagged second differences; overflow wraps and is reversible."""
    steps = np.diff(integers, prepend=np.int64(0))
    steps = np.diff(steps, prepend=np.int64(0))
    return ((steps << 1) ^ (steps >> 63)).view(np.uint64)


def _integers(zigzag: NDArray[np.uint64]) -> NDArray[np.int64]:
    one = np.uint64(1)
    steps = ((zigzag >> one) ^ (np.uint64(0) - (zigzag & one))).view(np.int64)
    return np.cumsum(np.cumsum(steps, dtype=np.int64), dtype=np.int64)


def _xor(bits: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    before = np.concatenate([np.zeros(1, bits.dtype), bits[:-1]])
    mixed: NDArray[np.unsignedinteger] = np.bitwise_xor(bits, before)
    return mixed


def _pack_words(kind: int, words: NDArray[np.unsignedinteger]) -> bytes:
    largest = int(words.max()) if len(words) else 0
    width = next(width for width in _WIDTHS if largest < 1 << (8 * width))
    narrow = words.astype(f"<u{width}")
    shuffled = narrow.view(np.uint8).reshape(-1, width).T.tobytes()
    return _COLUMN.pack(kind, width, len(shuffled)) + shuffled


def _decode_column(kind: int, width: int, payload: bytes, rows: int) -> Column:
    shuffled = np.frombuffer(payload, np.uint8).reshape(width, rows)
    words = np.ascontiguousarray(shuffled.T).view(f"<u{width}").reshape(rows).astype(np.uint64)
    if kind == _KIND_INTEGERS:
        return _integers(words)
    if kind == _KIND_XOR64:
        return np.bitwise_xor.accumulate(words).view(np.float64)
    if kind == _KIND_XOR32:
        single = np.bitwise_xor.accumulate(words.astype(np.uint32)).view(np.float32)
        return single.astype(np.float64)
    return _integers(words).astype(np.float64) / 10.0 ** (kind - _KIND_DECIMALS)


RAW_STEP_MS = 0
SEAL_POINTS = 600
SEAL_AFTER_MS = 600_000
MAX_SOURCES = 64  # per attempt
MAX_METRICS = 500  # names per source; each becomes a row of chunks
SEALED_VALUES = 1_000_000  # in one transaction; about 200 MB while they are sorted
SEAL_SECONDS = 5.0  # of one source


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
    """Points of one attempt, and the last event number in the main database.

    Rows beyond ``acked_seq`` come from a delivery that was not committed there and will be
    repeated; they are discarded first. None: nothing is discarded.
    """

    attempt_id: str
    points: Sequence[Point]
    acked_seq: int | None = None


def append(deliveries: Iterable[Delivery]) -> dict[str, list[str]]:
    """Journal deliveries of different attempts in one transaction; repeated ones change nothing.

    Returns:
        For each attempt with a source or metric beyond the limits, why each was left out.
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
        stored = MetricSource.objects.filter(
            attempt_id__in={attempt_id for attempt_id, _ in by_source},
            source__in={name for _, name in by_source},
        )
        by_key = {(row.attempt_id, row.source): row for row in stored}
        sources = {key: by_key[key] for key in by_source if key in by_key}
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
    return zstandard.ZstdCompressor(level=LEVEL).compress(text.encode())


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

    ``through_seq`` is the number acknowledged by the main database; later rows are not final. At
    most ``SEALED_VALUES`` values are in memory at once; what is left after ``SEAL_SECONDS`` stays
    journalled until the next call.
    """
    ends_at, sealed = time.monotonic() + SEAL_SECONDS, 0
    while num_points := _seal_oldest(attempt_id, source, through_seq):
        sealed += num_points
        if time.monotonic() > ends_at:
            break
    return sealed


def _seal_oldest(attempt_id: str, source: str, through_seq: int) -> int:
    with transaction.atomic(using=settings.METRICS_DATABASE):
        lock = MetricSource.objects.select_for_update().get(attempt_id=attempt_id, source=source)
        journal = MetricBatch.objects.filter(
            attempt_id=attempt_id, source=source, seq__lte=through_seq
        ).order_by("seq")
        batches = _oldest(journal, max_points=SEALED_VALUES // max(1, len(lock.metrics)))
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


def _oldest(journal: QuerySet[MetricBatch], *, max_points: int) -> list[MetricBatch]:
    """Return the oldest batches of a journal with so many points, but at least one batch."""
    totals = accumulate(journal.values_list("n", flat=True))
    num_batches = sum(1 for _ in takewhile(lambda total: total <= max_points, totals))
    return list(journal[: max(1, num_batches)])


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
        body=encode(series),
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


def forget(attempt_id: str) -> None:
    """Delete every point stored under an id, of what is watched no longer."""
    with transaction.atomic(using=settings.METRICS_DATABASE):
        for model in (MetricBatch, MetricChunk, MetricSource):
            model.objects.filter(attempt_id=attempt_id).delete()


def prune_raw(*, before_ms: int) -> int:
    """Delete raw chunks that ended before an instant; their roll-ups stay. Return how many."""
    rows, _ = MetricChunk.objects.filter(step_ms=RAW_STEP_MS, t1_ms__lt=before_ms).delete()
    return rows


# ---------------------------------------------------------------------------
# Roll-ups of a series per 15 s and per 5 min, and the upkeep of the store.
# ---------------------------------------------------------------------------


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
    t_ms, low, high, mean, count = decode(bytes(chunk.body))
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
    # The chunks that overlap windows not yet rolled up.
    chunks = MetricChunk.objects.filter(
        attempt_id=source.attempt_id,
        source=source.source,
        step_ms=RAW_STEP_MS,
        t1_ms__gte=_floor(source.rolled_through_ms),
    )
    raw = list(chunks.order_by("metric", "t0_ms"))
    if not raw:
        return 0
    start = _floor(max(source.rolled_through_ms, min(chunk.t0_ms for chunk in raw)))
    sealed_ms = max(chunk.t1_ms for chunk in raw) + 1
    end = sealed_ms if is_ended else _floor(sealed_ms)
    if end <= source.rolled_through_ms or end <= start:
        return 0
    rows = []
    for name, chunks_of_name in groupby(raw, key=lambda chunk: chunk.metric):
        points = merge_chunks(list(chunks_of_name))
        rows += _windows(source, name, points, start, end)
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


def merge_chunks(chunks: list[MetricChunk]) -> RawSeries:
    """Return the raw points of one metric, joined from its chunks.

    Points are sorted by sequence number, each number once; times are in ms since 1970.
    """
    columns = [decode(bytes(chunk.body)) for chunk in chunks]
    seq, t_ms, value = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    numbers, first = np.unique(seq.astype(np.int64), return_index=True)
    return RawSeries(numbers, t_ms[first].astype(np.int64), value[first].astype(np.float64))


def _windows(
    source: MetricSource, metric: str, series: RawSeries, start: int, end: int
) -> list[MetricChunk]:
    """Return the roll-ups of the windows that hold points.

    Empty windows cost nothing: a host whose clock jumps by decades leaves 100,000 of them.
    """
    inside = np.flatnonzero((series.t_ms >= start) & (series.t_ms < end))
    if not len(inside):
        return []
    order = inside[np.argsort(series.t_ms[inside], kind="stable")]
    windows, first = np.unique(series.t_ms[order] // WINDOW_MS, return_index=True)
    rows = []
    for window, at in zip(windows.tolist(), np.split(order, first[1:]), strict=True):
        part = RawSeries(series.seq[at], series.t_ms[at], series.value[at])
        rows += [
            _row(source, metric, window * WINDOW_MS, step, bucket(part, step)) for step in STEPS_MS
        ]
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
        body=encode(band),
    )


def _floor(t_ms: int) -> int:
    return t_ms - t_ms % WINDOW_MS


# Maintain the metric store: seal due journals, roll them up, prune old raw data.


log = structlog.get_logger(__name__)
RAW_LIFETIME = timedelta(days=30)


def prune_old() -> int:
    """Delete raw chunks older than a month; their roll-ups stay. Return how many."""
    return prune_raw(before_ms=now_ms() - int(RAW_LIFETIME.total_seconds() * 1000))


# ---------------------------------------------------------------------------
# Read a series for a chart: the coarsest level with a bucket per pixel, gaps preserved.
# ---------------------------------------------------------------------------


GAP_PERIODS = 3
FOREVER_MS = 2**62


class Series(NamedTuple):
    """A line with its min-max band for a chart; NaN marks gaps."""

    source: str
    metric: str
    t_ms: NDArray[np.int64]
    value: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


class Range(NamedTuple):
    """An interval of time, both ends included, in milliseconds since the Unix epoch."""

    since_ms: int = 0
    until_ms: int = FOREVER_MS


def read_series(
    attempt_id: str, metrics: Iterable[str], span: Range | None = None, *, points: int = 600
) -> list[Series]:
    """Return the requested metrics of an attempt, at most about ``points`` buckets each."""
    span = span or Range()
    requested = set(metrics)
    series = []
    for source in MetricSource.objects.filter(attempt_id=attempt_id).order_by("source"):
        names = [name for name in source.metrics if name in requested]
        if names:
            series += _read_source(source, names, span, points)
    return series


def read_raw(attempt_id: str, source: str, metric: str, span: Range | None = None) -> RawSeries:
    """Return every point of one metric by sequence number: chunks and journal together."""
    stored = MetricSource.objects.filter(attempt_id=attempt_id, source=source).first()
    if stored is None:
        return _empty()
    span = span or Range()
    journal = gather(_journal(stored, span))
    return _clip(_join(_chunks(stored, metric, span), journal.get(metric)), span)


def _read_source(source: MetricSource, names: list[str], span: Range, points: int) -> list[Series]:
    journal = gather(_journal(source, span))
    step_ms = _level(source, span, points)
    series = []
    for name in names:
        band = _band(source, name, span, step_ms, journal.get(name))
        if len(band.t_ms):
            series.append(_with_gaps(source.source, name, _reduce(band, points)))
    return series


def _level(source: MetricSource, span: Range, points: int) -> int:
    """Return the coarsest step that leaves at least one bucket for each of ``points``."""
    rolled, raw = _ends(source, STEPS_MS[0]), _ends(source, RAW_STEP_MS)
    if rolled is None:
        return RAW_STEP_MS
    first, last = rolled
    if raw is not None and raw[0] - first < WINDOW_MS:
        first = raw[0]  # a roll-up begins with its window, hours before the first point
    length = min(span.until_ms, last) - max(span.since_ms, first)
    fitting = [step for step in STEPS_MS if length / step >= points]
    finest = RAW_STEP_MS if raw is not None else STEPS_MS[0]  # raw points are pruned after a month
    return max(fitting, default=finest)


def _ends(source: MetricSource, step_ms: int) -> tuple[int, int] | None:
    """Return the time range of one level's chunks, or None if there are none."""
    chunks = MetricChunk.objects.filter(
        attempt_id=source.attempt_id, source=source.source, step_ms=step_ms
    )
    ends = list(chunks.values_list("t0_ms", "t1_ms"))
    return (min(t0 for t0, _ in ends), max(t1 for _, t1 in ends)) if ends else None


def _band(
    source: MetricSource, name: str, span: Range, step_ms: int, journal: RawSeries | None
) -> Band:
    if step_ms == RAW_STEP_MS:
        return _as_band(_clip(_join(_chunks(source, name, span), journal), span))
    border = source.rolled_through_ms
    rolled = MetricChunk.objects.filter(
        attempt_id=source.attempt_id,
        source=source.source,
        metric=name,
        step_ms=step_ms,
        t0_ms__lte=min(span.until_ms, border),
        t1_ms__gte=span.since_ms,
    )
    tail = Range(max(span.since_ms, border), span.until_ms)
    raw = _clip(_join(_chunks(source, name, tail), journal), tail)
    bands = [*(decode_band(chunk) for chunk in rolled.order_by("t0_ms")), _as_band(raw)]
    band = Band(*(np.concatenate(parts) for parts in zip(*bands, strict=True)))
    inside = (band.t_ms >= span.since_ms) & (band.t_ms <= span.until_ms)
    t_ms, low, high, mean, count = band
    return Band(t_ms[inside], low[inside], high[inside], mean[inside], count[inside])


def _journal(source: MetricSource, span: Range) -> list[Point]:
    batches = MetricBatch.objects.filter(
        attempt_id=source.attempt_id,
        source=source.source,
        t0_ms__lte=span.until_ms,
        t1_ms__gte=span.since_ms,
    )
    return [point for batch in batches for point in unpack(batch)]


def _chunks(source: MetricSource, name: str, span: Range) -> RawSeries | None:
    chunks = list(
        MetricChunk.objects.filter(
            attempt_id=source.attempt_id,
            source=source.source,
            metric=name,
            step_ms=RAW_STEP_MS,
            t0_ms__lte=span.until_ms,
            t1_ms__gte=span.since_ms,
        )
    )
    return merge_chunks(chunks) if chunks else None


def _join(sealed: RawSeries | None, journal: RawSeries | None) -> RawSeries:
    parts = [part for part in (sealed, journal) if part is not None]
    if not parts:
        return _empty()
    seq = np.concatenate([part.seq for part in parts])
    numbers, first = np.unique(seq, return_index=True)
    t_ms = np.concatenate([part.t_ms for part in parts])[first]
    return RawSeries(numbers, t_ms, np.concatenate([part.value for part in parts])[first])


def _empty() -> RawSeries:
    return RawSeries(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float64))


def _clip(series: RawSeries, span: Range) -> RawSeries:
    inside = (series.t_ms >= span.since_ms) & (series.t_ms <= span.until_ms)
    return RawSeries(series.seq[inside], series.t_ms[inside], series.value[inside])


def _as_band(series: RawSeries) -> Band:
    order = np.argsort(series.t_ms, kind="stable")
    value = series.value[order]
    count = np.ones(len(value), np.int64)
    return Band(series.t_ms[order], value, value, value, count)


def _reduce(band: Band, points: int) -> Band:
    """Return the band with at most ``points`` buckets; extremes kept, means weighted."""
    rows = len(band.t_ms)
    if rows <= points:
        return band
    first = np.linspace(0, rows, points, endpoint=False).astype(np.int64)
    count = np.add.reduceat(band.points, first)
    mean = np.add.reduceat(band.mean * band.points, first) / count
    return Band(
        band.t_ms[first],
        np.minimum.reduceat(band.low, first),
        np.maximum.reduceat(band.high, first),
        mean,
        count,
    )


def _with_gaps(source: str, metric: str, band: Band) -> Series:
    """Return the band with a NaN in every gap of three periods or more."""
    steps = np.diff(band.t_ms)
    period = float(np.median(steps)) if len(steps) else 0.0
    after = np.flatnonzero(steps > GAP_PERIODS * period) + 1 if period else np.empty(0, np.int64)
    times = np.insert(band.t_ms, after, (band.t_ms[after - 1] + band.t_ms[after]) // 2)
    value, low, high = (
        np.insert(column, after, np.nan) for column in (band.mean, band.low, band.high)
    )
    return Series(source, metric, times, value, low, high)
