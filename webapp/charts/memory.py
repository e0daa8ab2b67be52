"""A job's memory over time: the measured line over the stacked predicted terms."""

from collections.abc import Sequence
from dataclasses import dataclass

from webapp.charts.figures import ORIGIN_MS, Figure, Series, template

GIB = 2.0**30
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
    wanted: float = 0.0  # peak including a failed allocation; 0 if none failed


def memory_timeline(series: Series, backdrop: Backdrop, start_ms: int, end_ms: int) -> Figure:
    """Return the chart as Plotly's ``data`` and ``layout``."""
    end = ORIGIN_MS + max(end_ms - start_ms, 1000)
    data = [*_stack(backdrop.layers, end), _capacity(backdrop.capacity, end)]
    if backdrop.wanted:
        data.append(_wanted(series, backdrop.wanted, start_ms))
    data.append(_measured(series, start_ms))
    tops = [y for trace in data for y in trace["y"] if y is not None]
    layout = template()
    layout["xaxis"]["range"] = [ORIGIN_MS, end]
    layout["yaxis"]["range"] = [0, max(tops, default=1.0) * HEADROOM]
    layout["uirevision"] = "memory"
    layout["meta"] = {"start_ms": start_ms, "origin_ms": ORIGIN_MS, "from_zero": True}
    return {"data": data, "layout": layout}


def _stack(layers: Sequence[Layer], end: int) -> list[Figure]:
    """Return one band per term, stacked."""
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


def _wanted(series: Series, wanted: float, start_ms: int) -> Figure:
    """Return a vertical line from the last point to the level of the failed allocation."""
    last = max((t for t in series.t_ms), default=start_ms)
    value = series.known[-1] if series.known else 0.0
    at = ORIGIN_MS + last - start_ms
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "asked for",
        "x": [at, at],
        "y": [value / GIB, wanted / GIB],
        "line": {"color": "var(--bad)", "width": 1.75},
        "marker": {"color": "var(--bad)", "size": [0, 7]},
        "hovertemplate": "%{y:,.4~r} GiB<extra>asked for</extra>",
        "meta": {"class": "wanted"},
    }


def _measured(series: Series, start_ms: int) -> Figure:
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
