"""Read a series for a chart: the coarsest level with a bucket per pixel, gaps preserved."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from webapp.metrics.models import MetricBatch, MetricChunk, MetricSource
from webapp.metrics.rollup import STEPS_MS, WINDOW_MS, Band, decode_band, merge
from webapp.metrics.store import RAW_STEP_MS, Point, RawSeries, gather, unpack

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
    bands = [decode_band(chunk) for chunk in rolled.order_by("t0_ms")]
    return _clip_band(_concatenate([*bands, _as_band(raw)]), span)


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
    return merge(chunks) if chunks else None


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


def _clip_band(band: Band, span: Range) -> Band:
    inside = (band.t_ms >= span.since_ms) & (band.t_ms <= span.until_ms)
    t_ms, low, high, mean, count = band
    return Band(t_ms[inside], low[inside], high[inside], mean[inside], count[inside])


def _as_band(series: RawSeries) -> Band:
    order = np.argsort(series.t_ms, kind="stable")
    value = series.value[order]
    count = np.ones(len(value), np.int64)
    return Band(series.t_ms[order], value, value, value, count)


def _concatenate(bands: list[Band]) -> Band:
    return Band(*(np.concatenate(parts) for parts in zip(*bands, strict=True)))


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
