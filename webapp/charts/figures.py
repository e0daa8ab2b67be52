"""Plotly figures as plain dictionaries, with one template of design tokens.

Colours are written as ``var(--token)``; the browser substitutes the theme's value, so that
one figure serves light and dark. Time is milliseconds since the attempt began, on a date axis
from ``ORIGIN_MS``: Plotly interprets small numbers on a date axis as years.
"""

from dataclasses import dataclass
from typing import Any, Literal

from webapp.charts.catalog import ChartSpec
from webapp.core.display import quantity
from webapp.core.units import deviation_words, percent

Figure = dict[str, Any]
Side = Literal["", "inside", "below", "above"]  # of the 80 % interval
SIDE_WORDS: dict[Side, str] = {
    "": "",
    "inside": ", inside the 80 % interval",
    "below": ", below the 80 % interval",
    "above": ", above the 80 % interval",
}
MAX_POINTS = 500
ORIGIN_MS = 946_684_800_000  # midnight, 1 January 2000 UTC
CLOCK = [
    {"dtickrange": [None, 3_600_000], "value": "%-M:%S"},
    {"dtickrange": [3_600_000, None], "value": "%-H:%M h"},
]


@dataclass(frozen=True)
class Series:
    """The measured values of one metric: times in ms since the epoch, values in base units.

    None marks a gap: the line breaks there.
    """

    metric: str
    t_ms: tuple[int, ...] = ()
    values: tuple[float | None, ...] = ()

    @property
    def known(self) -> tuple[float, ...]:
        """Return the values without gaps."""
        return tuple(value for value in self.values if value is not None)


@dataclass(frozen=True)
class Prediction:
    """A predicted value with the ends of its 80 % interval, in base units."""

    value: float
    low: float | None = None
    high: float | None = None

    def side_of(self, value: float) -> Side:
        """Return on which side of the interval a value lies; empty without an interval."""
        if self.low is None or self.high is None:
            return ""
        if value < self.low:
            return "below"
        return "above" if value > self.high else "inside"


def template() -> Figure:
    """Return the layout shared by all charts: fonts, colours and grid lines as tokens."""
    axis = {
        "gridcolor": "var(--line)",
        "zeroline": False,
        "linecolor": "var(--line)",
        "tickfont": {"color": "var(--ink-3)", "size": 11},
        "fixedrange": True,
        "automargin": False,
    }
    return {
        "font": {"family": "Inter Variable, system-ui, sans-serif", "color": "var(--ink-3)"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 48, "r": 10, "t": 8, "b": 26},
        "showlegend": False,
        "hovermode": "x unified",
        "hoverlabel": {
            "bgcolor": "var(--raised)",
            "bordercolor": "var(--line-strong)",
            "font": {"color": "var(--ink)", "size": 12},
        },
        "dragmode": False,
        "xaxis": {
            **axis,
            "type": "date",
            "showgrid": False,
            "tickformatstops": CLOCK,
            "hoverformat": "%-H:%M:%S",
            "nticks": 5,
        },
        "yaxis": {**axis, "nticks": 5, "tickformat": ",~r", "separatethousands": True},
    }


def _measured(chart: ChartSpec, series: Series, start_ms: int) -> Figure:
    """Return the solid line of measured values."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "measured",
        "x": [ORIGIN_MS + t - start_ms for t in series.t_ms],
        "y": [None if value is None else value * chart.scale for value in series.values],
        "line": {"color": "var(--measured)", "width": 1.75},
        "hovertemplate": f"%{{y:,.4~r}} {chart.axis}<extra>measured</extra>",
        "meta": {"metric": chart.metric, "scale": chart.scale},
    }


def _predicted(chart: ChartSpec, prediction: Prediction, end: int) -> list[Figure]:
    """Return the band of the 80 % interval and the dashed line of the prediction."""
    value = prediction.value * chart.scale
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": "predicted",
        "x": [ORIGIN_MS, end],
        "y": [value, value],
        "line": {"color": "var(--predicted)", "width": 1.5, "dash": "6px,4px"},
        "hovertemplate": f"%{{y:,.4~r}} {chart.axis}<extra>predicted</extra>",
        "meta": {"spans": "x"},
    }
    if prediction.low is None or prediction.high is None:
        return [line]
    low, high = prediction.low * chart.scale, prediction.high * chart.scale
    band = {
        "type": "scatter",
        "mode": "lines",
        "name": "80 % interval",
        "x": [ORIGIN_MS, end, end, ORIGIN_MS],
        "y": [low, low, high, high],
        "fill": "toself",
        "fillcolor": "var(--band)",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "meta": {"spans": "x"},
    }
    return [band, line]


def figure(
    chart: ChartSpec,
    series: Series,
    *,
    start_ms: int,
    end_ms: int,
    prediction: Prediction | None = None,
) -> Figure:
    """Return one chart as Plotly's ``data`` and ``layout``.

    ``end_ms`` is the end of the time axis: the job's end, actual or expected.
    """
    last = max((t - start_ms for t in series.t_ms), default=0)
    length = max(end_ms - start_ms, last, 1000)
    data = [] if prediction is None else _predicted(chart, prediction, ORIGIN_MS + length)
    data.append(_measured(chart, series, start_ms))
    layout = template()
    layout["xaxis"]["range"] = [ORIGIN_MS, ORIGIN_MS + length]
    if chart.from_zero:
        tops = [y for trace in data for y in trace["y"] if y is not None]
        layout["yaxis"]["range"] = [0, max(tops, default=1.0) * 1.08 or 1.0]
    layout["uirevision"] = chart.key
    layout["meta"] = {"start_ms": start_ms, "origin_ms": ORIGIN_MS, "from_zero": chart.from_zero}
    return {"data": data, "layout": layout}


def against(chart: ChartSpec, value: float, prediction: Prediction) -> str:
    """Return a measured value relative to its prediction as a phrase."""
    predicted = f"the predicted {value_text(prediction.value, chart)}"
    deviation = deviation_words(value / prediction.value)
    side = SIDE_WORDS[prediction.side_of(value)]
    return f"{value_text(value, chart)}, {deviation} {predicted}{side}"


def value_text(value: float, chart: ChartSpec) -> str:
    """Return a value of a chart with its unit, for display."""
    return percent(value) if chart.unit == "ratio" else str(quantity(value, chart.unit))
