"""One metric over the GPUs and hosts of a job: its mean, and the band from lowest to highest."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from webapp.charts.plots import (
    MAX_POINTS,
    ChartSpec,
    Figure,
    Series,
    charts_for,
    figure,
    value_text,
)
from webapp.core.figures import STEP_SERIES
from webapp.jobs.gangs import members_of
from webapp.jobs.job_charts import Drawn
from webapp.jobs.models import Attempt, Job
from webapp.jobs.points import GAP_MS, series_of
from webapp.metrics.models import MetricSource
from webapp.metrics.store import FOREVER_MS, Range, read_series

PREFIX = "spread/"
FEWEST_SOURCES = 2  # one source has no spread
LEAST_WIDTH_MS = 2000  # of a bucket: hosts sample every second, each by its own clock
HEADROOM = 1.08
_OF_GPU = re.compile(r"gpu(\d+)_(memory_bytes|utilization)")
_GPU_TITLES = {"memory_bytes": "GPU memory", "utilization": "GPU utilisation"}

Row = tuple[int, float, float, float]  # instant in ms, mean, lowest, highest


class Source(NamedTuple):
    """What reports one metric of a spread: a host, or a GPU of it."""

    attempt: Attempt
    metric: str  # as reported

    def name(self, *, has_hosts: bool) -> str:
        """Return its name among the others, such as ``GPU 3 of node-2``."""
        gpu = _OF_GPU.fullmatch(self.metric)
        if gpu is None:
            return self.attempt.host.name
        return f"GPU {gpu[1]} of {self.attempt.host.name}" if has_hosts else f"GPU {gpu[1]}"


class Spread(NamedTuple):
    """A chart with the sources that it is about."""

    chart: ChartSpec
    sources: tuple[Source, ...]

    @property
    def has_hosts(self) -> bool:
        """Return whether the sources are on several hosts."""
        return len({source.attempt.pk for source in self.sources}) > 1


def spreads_of(job: Job) -> list[Spread]:
    """Return the spreads of a job's current attempt: each metric that several sources report.

    Sources are the job's hosts, and for what each GPU reports all its GPUs.
    """
    leader = job.current_attempt
    if leader is None:
        return []
    members = {each.pk: each for each in members_of(leader)}
    stored = MetricSource.objects.filter(attempt_id__in=members).order_by("attempt_id", "source")
    by_name: dict[str, list[Source]] = {}
    for row in stored:
        for metric in row.metrics:
            gpu = _OF_GPU.fullmatch(metric)
            source = Source(members[row.attempt_id], metric)
            by_name.setdefault(f"gpu_{gpu[2]}" if gpu else metric, []).append(source)
    by_name.pop(STEP_SERIES, None)
    named = {each.metric: each for each in charts_for(job.kind, by_name, is_complete=True)}
    return [
        Spread(_spec(name, sources, named.get(name)), tuple(sorted(sources, key=_place)))
        for name, sources in sorted(by_name.items())
        if len(sources) >= FEWEST_SOURCES
    ]


def _place(source: Source) -> tuple[int, int]:
    gpu = _OF_GPU.fullmatch(source.metric)
    return source.attempt.node_rank, int(gpu[1]) if gpu else 0


def _spec(name: str, sources: Sequence[Source], chart: ChartSpec | None) -> ChartSpec:
    """Return the chart of a spread: that of the metric, under a name and a title of its own."""
    gpu = _OF_GPU.fullmatch(sources[0].metric)
    num_hosts = len({source.attempt.pk for source in sources})
    of = f"{len(sources)} GPUs" if gpu else ""
    of += " on " if gpu and num_hosts > 1 else ""
    of += f"{num_hosts} hosts" if num_hosts > 1 else ""
    if gpu:
        unit, axis, scale = (
            ("bytes", "GiB", 2.0**-30) if gpu[2] == "memory_bytes" else ("ratio", "%", 100.0)
        )
        chart = ChartSpec(name, _GPU_TITLES[gpu[2]], unit, axis, name, scale)
    chart = chart or ChartSpec(name, name, "", "", name, from_zero=False)
    return replace(
        chart,
        key=f"spread-{name}",
        metric=f"{PREFIX}{name}",
        title=f"{chart.title}, mean of {of}",
        predicted="",
        figures=(),
    )


def read_spreads(
    spreads: Iterable[Spread], *, since_ms: int = 0, width_ms: int = LEAST_WIDTH_MS
) -> dict[str, list[Row]]:
    """Return the rows of each spread from an instant on, by the metric of its chart."""
    rows: dict[str, list[Row]] = {}
    stored: dict[str, dict[str, Series]] = {}
    chosen = list(spreads)
    names: dict[str, set[str]] = {}
    for source in (each for spread in chosen for each in spread.sources):
        names.setdefault(source.attempt.pk, set()).add(source.metric)
    for attempt_id, metrics in names.items():
        found = read_series(attempt_id, metrics, Range(since_ms, FOREVER_MS), points=MAX_POINTS)
        stored[attempt_id] = {each.metric: series_of(each) for each in found}
    for spread in chosen:
        series = [
            stored[each.attempt.pk].get(each.metric) or Series(each.metric)
            for each in spread.sources
        ]
        rows[spread.chart.metric] = rows_among(series, width_ms)
    return rows


def rows_among(series: Sequence[Series], width_ms: int) -> list[Row]:
    """Return mean, lowest and highest of several series in buckets of ``width_ms``.

    A source without a point in a bucket counts with its last value, for ``GAP_MS``. The rows end
    where the slowest source that still reports has its last point.
    """
    by_source = [_buckets(each, width_ms) for each in series if each.known]
    if not by_source:
        return []
    newest = max(max(each) for each in by_source)
    held = max(1, GAP_MS // width_ms)
    end = min(last for each in by_source if (last := max(each)) >= newest - held)
    rows: list[Row] = []
    latest: dict[int, int] = {}
    for bucket in sorted({at for each in by_source for at in each if at <= end}):
        latest |= {number: bucket for number, each in enumerate(by_source) if bucket in each}
        values = [by_source[n][at] for n, at in latest.items() if at >= bucket - held]
        rows.append((bucket * width_ms, sum(values) / len(values), min(values), max(values)))
    return rows


def _buckets(series: Series, width_ms: int) -> dict[int, float]:
    """Return the mean of a series in each bucket where it has points."""
    found: dict[int, list[float]] = {}
    for t_ms, value in zip(series.t_ms, series.values, strict=True):
        if value is not None:
            found.setdefault(t_ms // width_ms, []).append(value)
    return {bucket: sum(values) / len(values) for bucket, values in found.items()}


def fresh_rows(job: Job, since_ms: int) -> dict[str, list[Row]]:
    """Return the rows since an instant, and some before it: a slow host's came late."""
    return read_spreads(spreads_of(job), since_ms=max(0, since_ms - 2 * GAP_MS))


def draw_spreads(job: Job, drawn: Sequence[Drawn]) -> list[Drawn]:
    """Return the charts of a job's spreads, over the time of its other charts."""
    spreads = spreads_of(job)
    if not spreads or not drawn:
        return []
    layout = drawn[0].figure["layout"]
    start_ms, origin_ms = layout["meta"]["start_ms"], layout["meta"]["origin_ms"]
    end_ms = start_ms + int(layout["xaxis"]["range"][1] - origin_ms)
    width_ms = max(LEAST_WIDTH_MS, (end_ms - start_ms) // MAX_POINTS)
    rows = read_spreads(spreads, width_ms=width_ms)
    return [
        _drawn(each, rows[each.chart.metric], start_ms, end_ms)
        for each in spreads
        if rows[each.chart.metric]
    ]


def _drawn(spread: Spread, rows: Sequence[Row], start_ms: int, end_ms: int) -> Drawn:
    chart = spread.chart
    times = tuple(max(t, start_ms) for t, *_ in rows)
    line = Series(chart.metric, times, tuple(mean for _, mean, _, _ in rows))
    return Drawn(
        chart=chart,
        figure=_banded(chart, line, rows, start_ms, end_ms),
        series=line,
        line=line,
        prediction=None,
        words=_words(spread, rows[-1]),
    )


def _words(spread: Spread, last: Row) -> str:
    low, mean, high = (value_text(each, spread.chart) for each in (last[2], last[1], last[3]))
    names = [each.name(has_hosts=spread.has_hosts) for each in spread.sources]
    of = f"{names[0]} to {names[-1]}" if len(names) > FEWEST_SOURCES else " and ".join(names)
    if low == high:
        return f"{mean} at the last point, the same on each: {of}."
    return f"Mean {mean} at the last point, from {low} to {high} among {of}."


def _banded(
    chart: ChartSpec, line: Series, rows: Sequence[Row], start_ms: int, end_ms: int
) -> Figure:
    """Return the figure of the mean over its band; both ends travel with the measured line."""
    drawn = figure(chart, line, start_ms=start_ms, end_ms=end_ms)
    measured = drawn["data"][-1]
    lows = [low * chart.scale for _, _, low, _ in rows]
    highs = [high * chart.scale for _, _, _, high in rows]
    measured["meta"] |= {"low": lows, "high": highs}
    measured["hovertemplate"] = (
        f"mean: %{{y:,.4~r}} {chart.axis}, from %{{customdata[0]:,.4~r}} to "
        "%{customdata[1]:,.4~r}<extra></extra>"
    )
    band = {
        "type": "scatter",
        "mode": "lines",
        "name": "lowest to highest",
        "x": [*measured["x"], *reversed(measured["x"])],
        "y": [*lows, *reversed(highs)],
        "fill": "toself",
        "fillcolor": "var(--spread)",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "meta": {"class": "spread", "edges": True},
    }
    drawn["data"].insert(0, band)
    if chart.from_zero:
        drawn["layout"]["yaxis"]["range"] = [0, max(highs) * HEADROOM or 1.0]
    return drawn
