"""Charts of one job against its plan: memory over time, and a load sweep."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.specs.units import GIB
from webapp.charts.plots import (
    ORIGIN_MS,
    TOKENS,
    TPOT,
    TTFT,
    ChartFigure,
    ChartSpec,
    Figure,
    Prediction,
    Series,
    comparison_words,
    frame,
    template,
)
from webapp.core.display import quantity

# A job's memory over time: the measured line over the stacked predicted terms.


HEADROOM = 1.08  # the axis ends slightly above the highest value


@dataclass(frozen=True)
class Layer:
    """One predicted term: its CSS name, label and bytes."""

    term: str
    name: str
    size: float


@dataclass(frozen=True)
class Backdrop:
    """The predicted layers and the capacity behind a measured line, in bytes."""

    layers: Sequence[Layer]
    capacity: float
    requested_bytes: float = 0.0  # peak including a failed allocation; 0 if none failed


def memory_timeline(series: Series, backdrop: Backdrop, start_ms: int, end_ms: int) -> Figure:
    """Return the chart as Plotly's ``data`` and ``layout``."""
    end = ORIGIN_MS + max(end_ms - start_ms, 1000)
    data = [*_stack(backdrop.layers, end), _capacity(backdrop.capacity, end)]
    if backdrop.requested_bytes:
        data.append(_refused_allocation(series, backdrop.requested_bytes, start_ms))
    data.append(_measured_memory(series, start_ms))
    tops = [y for trace in data for y in trace["y"] if y is not None]
    layout = template()
    layout["xaxis"]["range"] = [ORIGIN_MS, end]
    layout["yaxis"]["range"] = [0, max(tops, default=1.0) * HEADROOM]
    layout["uirevision"] = "memory"
    layout["meta"] = {"start_ms": start_ms, "origin_ms": ORIGIN_MS, "from_zero": True}
    return {"data": data, "layout": layout}


def _stack(layers: Sequence[Layer], end: int) -> list[Figure]:
    bands, at = [], 0.0
    for layer in layers:
        low, high = at / GIB, (at + layer.size) / GIB
        at += layer.size
        bands.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": layer.name,
                "x": [ORIGIN_MS, end, end, ORIGIN_MS],
                "y": [low, low, high, high],
                "fill": "toself",
                "fillcolor": f"var(--term-{layer.term})",
                "opacity": 0.45,
                "line": {"width": 0},
                "hoverinfo": "skip",
                "meta": {"spans": "x", "class": f"layer term-{layer.term}"},
            }
        )
    return bands


def _capacity(size: float, end: int) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "capacity",
        "x": [ORIGIN_MS, end],
        "y": [size / GIB, size / GIB],
        "line": {"color": "var(--bad)", "width": 1.5, "dash": "3px,3px"},
        "hovertemplate": "%{y:,.4~r} GiB<extra>capacity</extra>",
        "meta": {"spans": "x", "class": "capacity"},
    }


def _refused_allocation(series: Series, requested_bytes: float, start_ms: int) -> Figure:
    """Return a vertical line from the last point to the level of the failed allocation."""
    last = max((t for t in series.t_ms), default=start_ms)
    value = series.known[-1] if series.known else 0.0
    at = ORIGIN_MS + last - start_ms
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "refused allocation",
        "x": [at, at],
        "y": [value / GIB, requested_bytes / GIB],
        "line": {"color": "var(--bad)", "width": 1.75},
        "marker": {"color": "var(--bad)", "size": [0, 7]},
        "hovertemplate": "%{y:,.4~r} GiB<extra>refused allocation</extra>",
        "meta": {"class": "wanted"},
    }


def _measured_memory(series: Series, start_ms: int) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "measured",
        "x": [ORIGIN_MS + t - start_ms for t in series.t_ms],
        "y": [None if value is None else value / GIB for value in series.values],
        "line": {"color": "var(--measured)", "width": 1.75},
        "hovertemplate": "%{y:,.4~r} GiB<extra>measured</extra>",
        "meta": {"metric": series.metric, "scale": 1 / GIB},
    }


# Charts of a load sweep: measured points over the plan's curve.


HEADROOM = 1.08
WHISKER = 3.0  # half the width of a point's mark in the SVG
CHARTS = tuple(
    replace(chart, key=f"sweep-{chart.key}", metric=f"sweep_{chart.metric}", title=title)
    for chart, title in (
        (TOKENS, "Tokens per second under load"),
        (TTFT, "Time to first token under load"),
        (TPOT, "Time per output token under load"),
    )
)


@dataclass(frozen=True)
class At:
    """A figure at one point of a sweep, with the ends of its 80 % interval if it has one."""

    point: float
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class SweepChart(ChartFigure):
    """One figure over the points of a sweep, with its caption and its table."""

    measured: tuple[At, ...]
    words: str
    x_name: str

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Return (point, value) for the table under the chart."""
        unit = self.chart.unit
        return [(f"{each.point:g}", str(quantity(each.value, unit))) for each in self.measured]

    @property
    def picture(self) -> dict[str, Any]:
        """Return the parts of the inline SVG, with intervals of measured points as bars."""
        parts, box = super().picture, frame(self.figure)
        scale = self.chart.scale
        for each in self.measured:
            x, y = box.x(each.point), box.y(each.value * scale)
            mark = f"M{x - WHISKER:.1f} {y:.1f}L{x + WHISKER:.1f} {y:.1f}"
            if each.low is not None and each.high is not None:
                low, high = box.y(each.low * scale), box.y(each.high * scale)
                mark += f"M{x:.1f} {low:.1f}L{x:.1f} {high:.1f}"
            parts["paths"].append({"class": "meas", "d": mark})
        return parts


def sweep_chart(
    chart: ChartSpec, x_name: str, measured: Sequence[At], predicted: Sequence[At], main: float
) -> SweepChart:
    """Return the chart of one figure; ``main`` is the point in its caption."""
    return SweepChart(
        chart=chart,
        figure=_figure(chart, measured, predicted),
        measured=tuple(measured),
        words=_words(chart, x_name, measured, predicted, main),
        x_name=x_name.capitalize(),
    )


def _words(
    chart: ChartSpec, x_name: str, measured: Sequence[At], predicted: Sequence[At], main: float
) -> str:
    point = next((each for each in measured if each.point == main), None)
    if point is None:
        return "Nothing was measured."
    forecast = next((each for each in predicted if each.point == main), None)
    start = f"With {main:g} {x_name}: "
    if forecast is None:
        return f"{start}{quantity(point.value, chart.unit)}; the plan has no value for it."
    prediction = Prediction(forecast.value, forecast.low, forecast.high)
    return f"{start}{comparison_words(chart, point.value, prediction)}."


# The figure


def _figure(chart: ChartSpec, measured: Sequence[At], predicted: Sequence[At]) -> Figure:
    data = [*_predicted(chart, predicted), _measured(chart, measured)]
    points = [each.point for each in (*measured, *predicted)] or [1.0]
    tops = [y for trace in data for y in trace["y"] if y is not None]
    tops += [each.high * chart.scale for each in measured if each.high is not None]
    layout = template()
    layout["hovermode"] = "closest"
    axis = {key: value for key, value in layout["xaxis"].items() if not key.startswith("tickf")}
    tickfont = {"tickfont": layout["xaxis"]["tickfont"]}
    axis |= tickfont | {"type": "linear", "hoverformat": ",.4~r"}
    layout["xaxis"] = {**axis, "range": [0, max(points) * 1.04]}
    layout["yaxis"]["range"] = [0, max(tops, default=1.0) * HEADROOM or 1.0]
    layout["uirevision"] = chart.key
    layout["meta"] = {"from_zero": True}
    return {"data": data, "layout": layout}


def _measured(chart: ChartSpec, measured: Sequence[At]) -> Figure:
    above = [((each.high or each.value) - each.value) * chart.scale for each in measured]
    below = [(each.value - (each.low or each.value)) * chart.scale for each in measured]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "measured",
        "x": [each.point for each in measured],
        "y": [each.value * chart.scale for each in measured],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": above,
            "arrayminus": below,
            "color": "var(--measured)",
            "thickness": 1.25,
            "width": 4,
        },
        "line": {"color": "var(--measured)", "width": 1.75},
        "marker": {"color": "var(--measured)", "size": 7},
        "hovertemplate": f"%{{x}}: %{{y:,.4~r}} {chart.axis}<extra>measured</extra>",
        "meta": {"metric": chart.metric, "scale": chart.scale},
    }


def _predicted(chart: ChartSpec, predicted: Sequence[At]) -> list[Figure]:
    """Return the band of the 80 % interval and the dashed curve of the plan."""
    if not predicted:
        return []
    curve = {
        "type": "scatter",
        "mode": "lines",
        "name": "predicted",
        "x": [each.point for each in predicted],
        "y": [each.value * chart.scale for each in predicted],
        "line": {"color": "var(--predicted)", "width": 1.5, "dash": "6px,4px"},
        "hovertemplate": f"%{{x}}: %{{y:,.4~r}} {chart.axis}<extra>predicted</extra>",
        "meta": {},
    }
    ends = [(at.point, at.low, at.high) for at in predicted if at.low is not None]
    if len(ends) < len(predicted):
        return [curve]
    points = [point for point, _, _ in ends]
    lows = [(low or 0.0) * chart.scale for _, low, _ in ends]
    highs = [(high or 0.0) * chart.scale for _, _, high in ends]
    band = {
        "type": "scatter",
        "mode": "lines",
        "name": "80 % interval",
        "x": [*points, *reversed(points)],
        "y": [*lows, *reversed(highs)],
        "fill": "toself",
        "fillcolor": "var(--band)",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "meta": {},
    }
    return [band, curve]
