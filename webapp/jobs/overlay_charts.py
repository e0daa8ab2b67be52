"""Charts of one metric of several jobs, each in its own colour from its own start."""

from collections.abc import Sequence
from dataclasses import dataclass

from webapp.charts.plots import ORIGIN_MS, ChartFigure, ChartSpec, Figure, Series, clock, template
from webapp.core.display import quantity
from webapp.jobs.comparing import Side
from webapp.jobs.job_charts import Drawn

TWIN_ROWS = 12
HEADROOM = 1.08
FEWEST_LINES = 2  # a metric of a single job is not compared


@dataclass(frozen=True)
class Line:
    """One job's series of a metric."""

    side: Side
    job_chart: Drawn

    @property
    def start_ms(self) -> int:
        """Return the start of the job's time axis."""
        start: int = self.job_chart.figure["layout"]["meta"]["start_ms"]
        return start

    @property
    def words(self) -> str:
        """Return the figure of the chart, else the last point, as text."""
        figure = next((each for each in self.job_chart.figures if each.shown), None)
        if figure is not None:
            return f"{figure.definition.label.lower()} {figure.shown}"
        return f"last point {quantity(self.job_chart.series.known[-1], self.job_chart.chart.unit)}"

    @property
    def series(self) -> Series:
        """Return the measured series, including earlier attempts."""
        return self.job_chart.line


@dataclass(frozen=True, kw_only=True)
class Overlay(ChartFigure):
    """One metric of all jobs that reported it."""

    lines: tuple[Line, ...]

    @property
    def words(self) -> str:
        """Return each job's result as text, for people who cannot see the chart."""
        return " · ".join(f"{line.side.letter}: {line.words}" for line in self.lines)

    @property
    def twin(self) -> list[tuple[str, list[str]]]:
        """Return the table equivalent: (time since start, value per job) at 12 moments."""
        length = self.figure["layout"]["xaxis"]["range"][1] - ORIGIN_MS
        moments = [length * (at + 1) / TWIN_ROWS for at in range(TWIN_ROWS)]
        return [
            (clock(moment), [_value_at(line, moment, self.chart.unit) for line in self.lines])
            for moment in moments
        ]


def _value_at(line: Line, moment_ms: float, unit: str) -> str:
    before = [
        value
        for t, value in zip(line.series.t_ms, line.series.values, strict=True)
        if value is not None and t - line.start_ms <= moment_ms
    ]
    has_ended = line.series.t_ms[-1] - line.start_ms < moment_ms - 1000 if before else True
    return "" if not before or has_ended else str(quantity(before[-1], unit))


def overlays(sides: list[Side], charts_of_sides: list[list[Drawn]]) -> list[Overlay]:
    """Return one chart per metric that at least two of the jobs reported."""
    specs: dict[str, ChartSpec] = {}
    lines: dict[str, list[Line]] = {}
    for side, charts in zip(sides, charts_of_sides, strict=True):
        for each in charts:
            if each.series.known:
                specs.setdefault(each.chart.key, each.chart)
                lines.setdefault(each.chart.key, []).append(Line(side, each))
    return [
        Overlay(
            chart=specs[key], lines=tuple(metric_lines), figure=overlay(specs[key], metric_lines)
        )
        for key, metric_lines in lines.items()
        if len(metric_lines) >= FEWEST_LINES
    ]


def overlay(chart: ChartSpec, lines: Sequence[Line]) -> Figure:
    """Return a chart as Plotly ``data`` and ``layout``; time is relative to each job's start."""
    end = ORIGIN_MS + max(1000, *(line.series.t_ms[-1] - line.start_ms for line in lines))
    data = [trace for line in lines for trace in _predicted(chart, line, end)]
    data += [_measured(chart, line) for line in lines]
    layout = template()
    layout["margin"]["r"] = 18
    layout["xaxis"]["range"] = [ORIGIN_MS, end]
    if chart.from_zero:
        tops = [y for trace in data for y in trace["y"] if y is not None]
        layout["yaxis"]["range"] = [0, max(tops, default=1.0) * HEADROOM or 1.0]
    layout["uirevision"] = chart.key
    layout["meta"] = {"start_ms": 0, "origin_ms": ORIGIN_MS, "from_zero": chart.from_zero}
    return {"data": data, "layout": layout}


def _predicted(chart: ChartSpec, line: Line, end: int) -> list[Figure]:
    prediction = line.job_chart.prediction
    if prediction is None:
        return []
    number, name = line.side.number, f"{line.side.letter} predicted"
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": [ORIGIN_MS, end],
            "y": [prediction.value * chart.scale] * 2,
            "opacity": 0.75,
            "line": {"color": f"var(--series-{number})", "width": 1.25, "dash": "6px,4px"},
            "hovertemplate": f"%{{y:,.4~r}} {chart.axis}<extra>{name}</extra>",
            "meta": {"class": f"series-{number} expected"},
        }
    ]


def _measured(chart: ChartSpec, line: Line) -> Figure:
    series, number = line.series, line.side.number
    last = max(at for at, value in enumerate(series.values) if value is not None)
    return {
        "type": "scatter",
        "mode": "lines+text",
        "name": line.side.letter,
        "x": [ORIGIN_MS + t - line.start_ms for t in series.t_ms],
        "y": [None if value is None else value * chart.scale for value in series.values],
        "text": [line.side.letter if at == last else "" for at in range(len(series.t_ms))],
        "textposition": "middle right",
        "textfont": {"color": f"var(--series-{number})", "size": 11},
        "cliponaxis": False,
        "line": {"color": f"var(--series-{number})", "width": 1.75},
        "hovertemplate": f"%{{y:,.4~r}} {chart.axis}<extra>{line.side.letter}</extra>",
        "meta": {
            "metric": f"{chart.metric}:{line.side.letter}",
            "scale": chart.scale,
            "class": f"series-{number}",
        },
    }
