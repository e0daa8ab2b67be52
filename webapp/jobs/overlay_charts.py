"""Charts of one metric of several jobs, each in its own colour from its own start.

They are over the step, if every job reported steps, so that what was trained the same lies over
each other; or by choice over the time since each job's first step, however long it took to start.
Jobs without steps are over the time since each one's start.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from webapp.charts.plots import (
    ORIGIN_MS,
    ChartFigure,
    ChartSpec,
    Figure,
    Series,
    clock,
    template,
    value_text,
)
from webapp.core.display import quantity
from webapp.jobs.comparing import Side
from webapp.jobs.job_charts import Drawn, steps_among

TWIN_ROWS = 12
HEADROOM = 1.08
FEWEST_LINES = 2  # a metric of a single job is not compared
FEWEST_STEPS = 2  # points that an axis of steps needs
Axis = Literal["step", "time"]


@dataclass(frozen=True)
class Line:
    """One job's series of a metric."""

    side: Side
    job_chart: Drawn
    steps: Series
    axis: Axis
    is_from_first_step: bool = False

    @cached_property
    def points(self) -> list[tuple[float, float | None]]:
        """Return the points by place on the axis: a step, or ms since the job's start."""
        series = self.job_chart.line
        placed = zip(map(self._place, series.t_ms), series.values, strict=True)
        return [(at, value) for at, value in placed if at is not None]

    @property
    def end(self) -> float:
        """Return its last place on the axis; a resumed job repeats steps after its highest."""
        return max(at for at, _ in self.points)

    def _place(self, t_ms: int) -> float | None:
        """Return an instant's place on the axis; None before it begins."""
        if self.axis == "time":
            return t_ms - self.start_ms if t_ms >= self.start_ms else None
        before = bisect_right(self.steps.t_ms, t_ms)
        return self.steps.values[before - 1] if before else None

    @property
    def start_ms(self) -> int:
        """Return where the job's time begins: with its first step, or with its start."""
        if self.is_from_first_step:
            return self.steps.t_ms[0]
        start: int = self.job_chart.figure["layout"]["meta"]["start_ms"]
        return start

    @property
    def words(self) -> str:
        """Return the figure of the chart, else the last point, as text."""
        figure = next((each for each in self.job_chart.figures if each.shown), None)
        if figure is not None:
            return f"{figure.definition.label.lower()} {figure.shown}"
        return f"last point {quantity(self.job_chart.series.known[-1], self.job_chart.chart.unit)}"


@dataclass(frozen=True, kw_only=True)
class Overlay(ChartFigure):
    """One metric of all jobs that reported it."""

    lines: tuple[Line, ...]
    axis: Axis = "time"

    @property
    def axis_name(self) -> str:
        """Return what the axis is of."""
        if self.axis == "step":
            return "Step"
        return f"Time since {'first step' if self.lines[0].is_from_first_step else 'start'}"

    @property
    def singles(self) -> list[tuple[str, str]]:
        """Return (letter, value) of each job if none has a second point: a figure without axes."""
        if any(len(line.job_chart.line.known) > 1 for line in self.lines):
            return []
        return [
            (line.side.letter, value_text(line.job_chart.line.known[0], self.chart))
            for line in self.lines
        ]

    @property
    def words(self) -> str:
        """Return each job's result as text, for people who cannot see the chart."""
        return " · ".join(f"{line.side.letter}: {line.words}" for line in self.lines)

    @property
    def twin(self) -> list[tuple[str, list[str]]]:
        """Return the table equivalent: (place on the axis, value per job) at 12 places."""
        begin, end = self.figure["layout"]["xaxis"]["range"]
        moments = [(end - begin) * (at + 1) / TWIN_ROWS for at in range(TWIN_ROWS)]
        first = 0 if self.axis == "time" else begin
        return [
            (
                clock(moment) if self.axis == "time" else f"{first + moment:,.0f}",
                [_value_at(line, first + moment, self.chart.unit) for line in self.lines],
            )
            for moment in moments
        ]


def _value_at(line: Line, place: float, unit: str) -> str:
    before = [value for at, value in line.points if value is not None and at <= place]
    slack = 1000 if line.axis == "time" else 0
    has_ended = line.end < place - slack if before else True
    return "" if not before or has_ended else str(quantity(before[-1], unit))


def axis_of(steps: Sequence[Series], chosen: str) -> Axis:
    """Return the axis of a comparison: the chosen one, else steps if every job has them."""
    has_steps = all(len(each.known) >= FEWEST_STEPS for each in steps)
    return "step" if has_steps and chosen != "time" else "time"


def overlays(
    sides: list[Side], charts_of_sides: list[list[Drawn]], chosen: str = ""
) -> list[Overlay]:
    """Return one chart per metric that at least two of the jobs reported."""
    split = [steps_among(charts) for charts in charts_of_sides]
    axis = axis_of([steps for _, steps in split], chosen)
    has_steps = axis_of([steps for _, steps in split], "") == "step"
    specs: dict[str, ChartSpec] = {}
    lines: dict[str, list[Line]] = {}
    for side, (charts, steps) in zip(sides, split, strict=True):
        for each in charts:
            line = Line(side, each, steps, axis, is_from_first_step=has_steps)
            if each.series.known and line.points:
                specs.setdefault(each.chart.key, each.chart)
                lines.setdefault(each.chart.key, []).append(line)
    return [
        Overlay(
            chart=specs[key],
            lines=tuple(metric_lines),
            figure=overlay(specs[key], metric_lines),
            axis=axis,
        )
        for key, metric_lines in lines.items()
        if len(metric_lines) >= FEWEST_LINES
    ]


def overlay(chart: ChartSpec, lines: Sequence[Line]) -> Figure:
    """Return a chart as Plotly ``data`` and ``layout``, over the axis of its lines."""
    is_timed = lines[0].axis == "time"
    origin = ORIGIN_MS if is_timed else 0
    begin = origin if is_timed else min(at for line in lines for at, _ in line.points)
    end = origin + max(1000 if is_timed else 1, *(line.end for line in lines))
    data = [trace for line in lines for trace in _predicted(chart, line, begin, end)]
    data += [_measured(chart, line, origin) for line in lines]
    layout = template()
    layout["margin"]["r"] = 18
    layout["xaxis"]["range"] = [begin, end]
    if not is_timed:
        layout["xaxis"] |= {"type": "linear", "tickformatstops": [], "tickformat": ",~r"}
        layout["xaxis"]["hoverformat"] = ",~r"
    if chart.from_zero:
        tops = [y for trace in data for y in trace["y"] if y is not None]
        layout["yaxis"]["range"] = [0, max(tops, default=1.0) * HEADROOM or 1.0]
    layout["uirevision"] = chart.key
    meta = {"start_ms": 0, "origin_ms": ORIGIN_MS} if is_timed else {}
    layout["meta"] = {**meta, "from_zero": chart.from_zero}
    return {"data": data, "layout": layout}


def _predicted(chart: ChartSpec, line: Line, begin: float, end: float) -> list[Figure]:
    prediction = line.job_chart.prediction
    if prediction is None:
        return []
    number, name = line.side.number, f"{line.side.letter} predicted"
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": [begin, end],
            "y": [prediction.value * chart.scale] * 2,
            "opacity": 0.75,
            "line": {"color": f"var(--series-{number})", "width": 1.25, "dash": "6px,4px"},
            "hovertemplate": f"{name}: %{{y:,.4~r}} {chart.axis}<extra></extra>",
            "meta": {"class": f"series-{number} expected"},
        }
    ]


def _measured(chart: ChartSpec, line: Line, origin: int) -> Figure:
    number, values = line.side.number, [value for _, value in line.points]
    last = max((at for at, value in enumerate(values) if value is not None), default=-1)
    return {
        "type": "scatter",
        "mode": "lines+text",
        "name": line.side.letter,
        "x": [origin + at for at, _ in line.points],
        "y": [None if value is None else value * chart.scale for value in values],
        "text": [line.side.letter if at == last else "" for at in range(len(values))],
        "textposition": "middle right",
        "textfont": {"color": f"var(--series-{number})", "size": 11},
        "cliponaxis": False,
        "line": {"color": f"var(--series-{number})", "width": 1.75},
        "hovertemplate": f"{line.side.letter}: %{{y:,.4~r}} {chart.axis}<extra></extra>",
        "meta": {
            "metric": f"{chart.metric}:{line.side.letter}",
            "scale": chart.scale,
            "class": f"series-{number}",
        },
    }
