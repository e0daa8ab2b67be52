"""The charts of one job, filled from the metric store."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from webapp.charts.catalog import LOSS, MEMORY, ChartSpec, charts_for
from webapp.charts.figures import Prediction, Series, figure, verdict
from webapp.charts.plotted import Plotted, so_far
from webapp.charts.svg import clock
from webapp.core.clock import now_ms
from webapp.core.display import quantity
from webapp.jobs.figures import predictions
from webapp.jobs.models import Attempt, Job
from webapp.jobs.points import Earlier, earlier_points, points_of
from webapp.metrics.models import MetricSource

TABLE_ROWS = 24


@dataclass(frozen=True, kw_only=True)
class Drawn(Plotted):
    """One chart of a job, with its words and its table.

    ``series`` is what the attempt itself measured, ``line`` that with earlier attempts in front.
    """

    series: Series
    line: Series
    prediction: Prediction | None
    words: str

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Return a readable share of the points as (time since start, value)."""
        start = self.figure["layout"]["meta"]["start_ms"]
        points = [
            (t, value)
            for t, value in zip(self.line.t_ms, self.line.values, strict=True)
            if value is not None
        ]
        step = max(1, len(points) // TABLE_ROWS)
        return [
            (clock(t - start), str(quantity(value, self.chart.unit)))
            for t, value in points[::step]
        ]


def draw(job: Job, *, is_complete: bool = False, part: Attempt | None = None) -> list[Drawn]:
    """Return a job's charts, with ``is_complete`` one for every metric that it reported.

    Of a job on several hosts they show one ``part``, by default the first, which speaks for all.
    A job that waits for its next attempt shows what those before measured.
    """
    shown = part or job.current_attempt
    described = shown or job.attempts.filter(node_rank=0).last()
    if described is None:
        return []
    charts = _charts(job, described, is_complete=is_complete)
    metrics = [chart.metric for chart in charts]
    own = points_of(shown, metrics) if shown else {}
    earlier = earlier_points(job, shown, own, metrics)
    span = span_ms(job, [earlier.before(own.get(name) or Series(name)) for name in metrics])
    # What was predicted is of the whole; under load it is of one point among several.
    said = {} if described.node_rank or job.spec.get("load") else predictions(job)
    return [
        _draw(chart, own.get(chart.metric) or Series(chart.metric), earlier, span, said)
        for chart in charts
    ]


def _charts(job: Job, attempt: Attempt, *, is_complete: bool) -> list[ChartSpec]:
    """Return the charts that a job's kind and what an attempt reported ask for."""
    stored = MetricSource.objects.filter(attempt_id=attempt.pk).values_list("metrics", flat=True)
    names = {name for names in stored for name in names} | _gpu_metrics(attempt)
    kind = "serve" if job.spec.get("load") else job.kind  # an endpoint's own, under load
    return [_of(job, chart) for chart in charts_for(kind, names, is_complete=is_complete)]


def _of(job: Job, chart: ChartSpec) -> ChartSpec:
    """Return a chart as this job has it.

    A classifier's loss is a text's, not a token's. The memory of several ranks is one curve, and
    what is predicted is one rank's: it is not drawn beside their sum.
    """
    if chart is LOSS and job.spec.get("objective") == "classification":
        return replace(chart, unit="nats per text", axis="nats per text")
    if chart is MEMORY and job.processes_per_host > 1:
        return replace(chart, title="Memory of the job, all ranks", predicted="")
    return chart


def _gpu_metrics(attempt: Attempt) -> set[str]:
    """Return what the host's GPUs will report, so that their charts are there before it."""
    gpus = [gpu["index"] for gpu in attempt.host.facts.get("gpus") or []]
    return {f"gpu{index}_{what}" for index in gpus for what in ("memory_bytes", "utilization")}


def _draw(
    chart: ChartSpec,
    series: Series,
    earlier: Earlier,
    span: tuple[int, int],
    said: Mapping[str, Prediction],
) -> Drawn:
    prediction = said.get(chart.predicted)
    line = earlier.before(series)
    return Drawn(
        chart=chart,
        figure=figure(chart, line, start_ms=span[0], end_ms=span[1], prediction=prediction),
        series=series,
        line=line,
        prediction=prediction,
        words=verdict(chart, series, prediction) + earlier.words_of(chart.metric),
    )


def span_ms(job: Job, series: Iterable[Series] = ()) -> tuple[int, int]:
    """Return where a job's time axis begins and ends.

    It begins with the first point, else with the start; it ends with the job, or where the
    end is expected.
    """
    began = job.started_at or job.queued_at or job.created_at
    start = min((each.t_ms[0] for each in series if each.t_ms), default=_ms(began))
    if job.ended_at is not None:
        return start, _ms(job.ended_at)
    return start, now_ms() + int((job.eta_seconds or 0) * 1000)


def _ms(instant: datetime) -> int:
    return int(instant.timestamp() * 1000)


def latest_values(job: Job, drawn: Iterable[Drawn]) -> dict[str, float]:
    """Return what a running job measured so far, by the names of the prediction."""
    if job.spec.get("load"):
        return {}  # one point after the other, each with figures of its own
    found = {
        each.chart.predicted: so_far(each.series, is_peak=each.chart.unit == "bytes")
        for each in drawn
        if each.chart.predicted and each.series.known
    }
    rest = [name for name in predictions(job) if name not in found]
    if job.current_attempt and rest:
        rest_of = points_of(job.current_attempt, rest)
        known = {name: series for name, series in rest_of.items() if series.known}
        found |= {name: so_far(series, is_peak=False) for name, series in known.items()}
    return found
