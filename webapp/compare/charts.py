"""The metrics of several jobs over each other, each in its own ink from its own start."""

from collections.abc import Sequence
from dataclasses import dataclass

from webapp.charts.catalog import ChartSpec
from webapp.charts.figures import ORIGIN_MS, Figure, Series, template
from webapp.charts.plotted import Plotted, so_far
from webapp.charts.svg import clock
from webapp.compare.jobs import Side
from webapp.core.display import quantity
from webapp.jobs.plots import Drawn

TWIN_ROWS = 12
HEADROOM = 1.08
FEWEST_LINES = 2  # a metric that one job alone reported is compared with nothing


@dataclass(frozen=True)
class Line:
    """One job's series of a metric."""

    side: Side
    drawn: Drawn

    @property
    def start_ms(self) -> int:
        """Return where the job's own time begins."""
        start: int = self.drawn.figure["layout"]["meta"]["start_ms"]
        return start

    @property
    def series(self) -> Series:
        """Return what was measured, earlier attempts in front."""
        return self.drawn.line


@dataclass(frozen=True, kw_only=True)
class Overlay(Plotted):
    """One metric of all jobs that reported it."""

    lines: tuple[Line, ...]

    @property
    def words(self) -> str:
        """Return what each job reached, for those who cannot see the chart."""
        unit = self.chart.unit
        is_peak = unit == "bytes"
        kind = "peak" if is_peak else "median"
        reached = [so_far(line.drawn.series, is_peak=is_peak) for line in self.lines]
        return " · ".join(
            f"{line.side.letter}: {kind} {quantity(value, unit)}"
            for line, value in zip(self.lines, reached, strict=True)
        )

    @property
    def twin(self) -> list[tuple[str, list[str]]]:
        """Return (time since start, value of each job): the same at a dozen moments."""
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


def overlays(sides: list[Side], drawn: list[list[Drawn]]) -> list[Overlay]:
    """Return a chart of each metric that at least two of the jobs reported."""
    specs: dict[str, ChartSpec] = {}
    lines: dict[str, list[Line]] = {}
    for side, charts in zip(sides, drawn, strict=True):
        for each in charts:
            if each.series.known:
                specs.setdefault(each.chart.key, each.chart)
                lines.setdefault(each.chart.key, []).append(Line(side, each))
    return [
        Overlay(chart=specs[key], lines=tuple(found), figure=overlay(specs[key], found))
        for key, found in lines.items()
        if len(found) >= FEWEST_LINES
    ]


def overlay(chart: ChartSpec, lines: Sequence[Line]) -> Figure:
    """Return one chart as Plotly's ``data`` and ``layout``; time counts from each job's start."""
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
    said = line.drawn.prediction
    if said is None:
        return []
    number, name = line.side.number, f"{line.side.letter} predicted"
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": [ORIGIN_MS, end],
            "y": [said.value * chart.scale] * 2,
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
