"""The charts of an observed server, from its points in the metrics database."""

from collections.abc import Mapping

from webapp.charts.plots import KV_CACHE, MAX_POINTS, RUNNING, WAITING, ChartSpec, Series, figure
from webapp.core.clock import now_ms
from webapp.jobs.job_charts import Drawn, of_points
from webapp.jobs.points import series_of
from webapp.metrics.models import MetricSource
from webapp.metrics.store import Range, read_series
from webapp.servers.models import ObservedServer

SPANS: Mapping[str, tuple[str, int]] = {  # key of the address -> words, and seconds
    "hour": ("Last hour", 3600),
    "day": ("Last day", 86_400),
    "week": ("Last week", 7 * 86_400),
    "month": ("Last 30 days", 30 * 86_400),
}
DEFAULT_SPAN = "hour"


def _time(key: str, title: str) -> ChartSpec:
    return ChartSpec(key, title, "seconds", "s", key)


CHARTS = (
    RUNNING,
    WAITING,
    KV_CACHE,
    ChartSpec(
        "tokens_per_second",
        "Output tokens per second",
        "tokens_per_second",
        "tokens/s",
        "tokens_per_second",
    ),
    ChartSpec(
        "prompt_tokens_per_second",
        "Prompt tokens per second",
        "tokens_per_second",
        "tokens/s",
        "prompt_tokens_per_second",
    ),
    _time("ttft_seconds", "Time to first token, mean"),
    _time("ttft_p95_seconds", "Time to first token, 95th percentile"),
    _time("tpot_seconds", "Time per output token, mean"),
    _time("tpot_p95_seconds", "Time per output token, 95th percentile"),
    _time("latency_seconds", "Whole request, mean"),
    _time("latency_p95_seconds", "Whole request, 95th percentile"),
    ChartSpec("prefix_hit_ratio", "Prompt tokens from the prefix cache", "ratio", "%",
              "prefix_hit_ratio", 100.0),
    ChartSpec("preemptions", "Preemptions between two looks", "", "requests", "preemptions"),
)  # fmt: skip


def draw(server: ObservedServer, span: str) -> list[Drawn]:
    """Return a chart for each metric that the server has reported, over a span of ``SPANS``."""
    stored = MetricSource.objects.filter(attempt_id=server.pk).values_list("metrics", flat=True)
    reported = {name for names in stored for name in names}
    end_ms = now_ms()
    start_ms = end_ms - SPANS[span][1] * 1000
    charts = [each for each in CHARTS if each.metric in reported]
    found = read_series(
        server.pk, [each.metric for each in charts], Range(start_ms, end_ms), points=MAX_POINTS
    )
    series = {each.metric: series_of(each) for each in found}
    drawn = []
    for chart in charts:
        line = series.get(chart.metric) or Series(chart.metric)
        drawn.append(
            Drawn(
                chart=chart,
                figure=figure(chart, line, start_ms=start_ms, end_ms=end_ms),
                series=line,
                line=line,
                prediction=None,
                words=of_points(chart, line),
            )
        )
    return drawn


def points_of(
    server: ObservedServer, drawn: list[Drawn], since_ms: int
) -> dict[str, list[tuple[int, float]]]:
    """Return the points of charts since an instant, as (instant in ms, value)."""
    names = [each.chart.metric for each in drawn]
    found = read_series(server.pk, names, Range(since_ms), points=MAX_POINTS)
    return {
        each.metric: [
            (t, value)
            for t, value in zip(each.t_ms, each.values, strict=True)
            if value is not None
        ]
        for each in map(series_of, found)
    }
