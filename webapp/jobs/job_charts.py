"""The charts of one job with captions, filled from the metric store."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from webapp.charts.plots import (
    LOSS,
    MEMORY,
    SECTIONS,
    SIDE_WORDS,
    ChartFigure,
    ChartSpec,
    Prediction,
    Series,
    charts_for,
    clock,
    figure,
    section_of,
    value_text,
)
from webapp.core.clock import now_ms
from webapp.core.display import deviation_words, quantity
from webapp.core.figures import STEP_SERIES
from webapp.jobs.measured_figures import JobFigure, JobFigures, figures_of
from webapp.jobs.models import Attempt, Job
from webapp.jobs.points import Earlier, earlier_points, of_one_model, points_of
from webapp.jobs.progress import remaining_seconds
from webapp.metrics.models import MetricSource


def caption(chart: ChartSpec, series: Series, figures: JobFigures | None) -> str:
    """Return a chart's caption, for accessibility and quick reading."""
    chart_figures = [figures[name] for name in chart.figures if figures and name in figures]
    sentences = [figure_words(each) for each in chart_figures if each.measured is not None]
    if sentences:
        return " ".join(sentences)
    drawn = of_points(chart, series)
    predicted = next((each for each in chart_figures if each.predicted), None)
    return f"{drawn} {figure_words(predicted)}" if predicted else drawn


def of_points(chart: ChartSpec, series: Series) -> str:
    """Return a caption from the drawn points, if no figure has a value."""
    values = series.known
    if not values:
        return "No points."
    low, high, last = (value_text(each, chart) for each in (min(values), max(values), values[-1]))
    if low == high:
        return f"{last} at every point."
    return f"{last} at the last point, between {low} and {high}."


def figure_words(figure: JobFigure) -> str:
    """Return one figure as a sentence: name, value, deviation from the prediction."""
    label, prediction = figure.definition.label, figure.predicted
    predicted = f"predicted {quantity(prediction.value, figure.unit)}" if prediction else ""
    if figure.shown is None:
        words = f"{label}: {figure.state_words}"
        return f"{words}; {predicted}." if prediction else f"{words}."
    start = f"{label} {figure.shown}"
    if figure.state == "warm_up":
        tail = f"; {predicted}" if prediction else ""
        return f"{start} so far; {figure.state_words}{tail}."
    so_far = " so far" if figure.state == "so_far" else ""
    if prediction is None or figure.ratio is None:
        return f"{start}{so_far}."
    deviation = deviation_words(figure.ratio)
    return f"{start}{so_far}, {deviation} the {predicted}{SIDE_WORDS[figure.place]}."


TABLE_ROWS = 24
FEWEST_DRAWN = 2  # points of a line: a single value is a figure


@dataclass(frozen=True, kw_only=True)
class Drawn(ChartFigure):
    """One chart of a job, with its caption and its table.

    ``series`` is the attempt's own measurements, ``line`` includes those of earlier attempts.
    """

    series: Series
    line: Series
    prediction: Prediction | None
    words: str
    figures: tuple[JobFigure, ...] = ()

    @property
    def is_awaited(self) -> bool:
        """Return whether there is nothing to draw yet, so that axes would be made up."""
        return len(self.line.known) < FEWEST_DRAWN and self.prediction is None

    @property
    def single(self) -> str:
        """Return the only value as text, shown in place of axes; empty if there is another."""
        known = self.line.known
        return value_text(known[0], self.chart) if len(known) == 1 else ""

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Return a readable sample of the points as (time since start, value)."""
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


@dataclass(frozen=True)
class Section:
    """Charts of one subject; those of a single point are its ``figures``: label and value."""

    name: str
    charts: tuple[Drawn, ...]
    figures: tuple[tuple[str, str], ...]


def sections_of(drawn: Iterable[Drawn], *, is_live: bool) -> list[Section]:
    """Return charts by section; of a live job, one with a single point stays a chart."""
    by_name: dict[str, list[Drawn]] = {}
    for each in drawn:
        by_name.setdefault(section_of(each.chart), []).append(each)
    found = []
    for name in SECTIONS:
        charts = by_name.get(name, [])
        single = [] if is_live else [each for each in charts if len(each.line.known) == 1]
        figures = tuple(
            (each.chart.title, value_text(each.line.known[0], each.chart)) for each in single
        )
        rest = tuple(each for each in charts if each not in single)
        found += [Section(name, rest, figures)] if charts else []
    return found


def steps_among(drawn: list[Drawn]) -> tuple[list[Drawn], Series]:
    """Return charts without that of the step, and the step as a series over time."""
    step = next((each.line for each in drawn if each.chart.metric == STEP_SERIES), None)
    rest = [each for each in drawn if each.chart.metric != STEP_SERIES]
    return rest, step or Series(STEP_SERIES)


def draw(
    job: Job,
    figures: JobFigures | None = None,
    *,
    is_complete: bool = False,
    has_step: bool = False,
    part: Attempt | None = None,
) -> list[Drawn]:
    """Return a job's charts; with ``is_complete`` one for every reported metric.

    ``has_step`` adds that of the step, which every reported metric includes.

    For a job on several hosts they show one ``part``, by default the first, which reports for
    the whole job. A job waiting for its next attempt shows earlier attempts.
    """
    shown = part or job.current_attempt
    described = shown or job.attempts.filter(node_rank=0).last()
    if described is None:
        return []
    charts = _charts(job, described, is_complete=is_complete, has_step=has_step)
    metrics = [chart.metric for chart in charts]
    measured = of_one_model(job, points_of(shown, metrics)) if shown else {}
    earlier = earlier_points(job, shown, measured, metrics)
    span = span_ms(
        job, [earlier.with_earlier_points(measured.get(name) or Series(name)) for name in metrics]
    )
    # Figures and predictions cover the whole job; under load, one point among several.
    is_of_whole_job = not described.node_rank and not job.spec.get("load")
    shown_figures = (figures or figures_of(job)) if is_of_whole_job else None
    return [
        _draw(
            chart, measured.get(chart.metric) or Series(chart.metric), earlier, span, shown_figures
        )
        for chart in charts
    ]


def _charts(job: Job, attempt: Attempt, *, is_complete: bool, has_step: bool) -> list[ChartSpec]:
    stored = MetricSource.objects.filter(attempt_id=attempt.pk).values_list("metrics", flat=True)
    # The GPU metrics that the host will report, so that charts exist in advance.
    gpus = [gpu["index"] for gpu in attempt.host.facts.get("gpus") or []]
    names = {name for names in stored for name in names} | {
        f"gpu{index}_{what}" for index in gpus for what in ("memory_bytes", "utilization")
    }
    kind = "serve" if job.spec.get("load") else job.kind  # the load test's own endpoint
    charts = charts_for(kind, names, is_complete=is_complete)
    step = ChartSpec(STEP_SERIES, "Step", "", "", STEP_SERIES)
    charts += [step] if has_step and not is_complete and STEP_SERIES in names else []
    return [_adjusted(job, attempt, chart) for chart in charts]


def _adjusted(job: Job, attempt: Attempt, chart: ChartSpec) -> ChartSpec:
    """Return a chart adjusted to this job.

    A classifier's loss is per text, not per token. The predicted peak is of one process on a
    host without GPUs: it is not drawn with the sum of several processes, nor with the host memory
    of a job whose model is on a GPU.
    """
    if chart is LOSS and job.spec.get("objective") == "classification":
        return replace(chart, unit="nats per text", axis="nats per text")
    if chart is not MEMORY:
        return chart
    is_several = job.processes_per_host > 1
    if is_several or attempt.host.facts.get("gpus"):
        title = f"{chart.title}, all ranks" if is_several else chart.title
        return replace(chart, title=title, predicted="", figures=("host_memory_bytes",))
    return chart


def _draw(
    chart: ChartSpec,
    series: Series,
    earlier: Earlier,
    span: tuple[int, int],
    figures: JobFigures | None,
) -> Drawn:
    main = figures.get(chart.predicted) if figures else None
    prediction = main.predicted if main else None
    line = earlier.with_earlier_points(series)
    return Drawn(
        chart=chart,
        figure=figure(chart, line, start_ms=span[0], end_ms=span[1], prediction=prediction),
        series=series,
        line=line,
        prediction=prediction,
        words=caption(chart, series, figures) + earlier.note_on(chart.metric),
        figures=tuple(figures[name] for name in chart.figures if figures and name in figures),
    )


def span_ms(job: Job, series: Iterable[Series] = ()) -> tuple[int, int]:
    """Return the start and end of a job's time axis.

    It begins with the first point, else with the start; it ends with the job, or at its
    expected end.
    """
    began = job.started_at or job.queued_at or job.created_at
    start = min((each.t_ms[0] for each in series if each.t_ms), default=_ms(began))
    if job.ended_at is not None:
        return start, _ms(job.ended_at)
    left = remaining_seconds(job) or 0.0
    return start, now_ms() + int(left * 1000)


def _ms(instant: datetime) -> int:
    return int(instant.timestamp() * 1000)
