"""Render the figures as small inline SVGs, shown before and without JavaScript."""

from typing import Any, NamedTuple

from webapp.charts.figures import ORIGIN_MS, Figure
from webapp.core.units import number

WIDTH, HEIGHT = 462, 158
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 8, 26


class Frame(NamedTuple):
    """The data range of a plot, mapped to picture coordinates."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        """Return the x coordinate of a value."""
        inner = WIDTH - LEFT - RIGHT
        return LEFT + inner * (value - self.x0) / ((self.x1 - self.x0) or 1)

    def y(self, value: float) -> float:
        """Return the y coordinate of a value."""
        inner = HEIGHT - TOP - BOTTOM
        return HEIGHT - BOTTOM - inner * (value - self.y0) / ((self.y1 - self.y0) or 1)

    def path(self, trace: dict[str, Any]) -> str:
        """Return a trace as the ``d`` of a path; a missing value interrupts the line.

        A single value is a zero-length line, which a round cap draws as a dot.
        """
        parts, pen = [], "M"
        for x, y in zip(trace["x"], trace["y"], strict=True):
            if y is not None:
                parts.append(f"{pen}{self.x(x):.1f} {self.y(y):.1f}")
            pen = "M" if y is None else "L"
        return " ".join(parts) + (" h0" if len(parts) == 1 else "")


def frame(figure: Figure) -> Frame:
    """Return the ranges of a figure, from its layout if set there."""
    x0, x1 = figure["layout"]["xaxis"]["range"]
    if y_range := figure["layout"]["yaxis"].get("range"):
        return Frame(x0, x1, y_range[0], y_range[1])
    values = [y for trace in figure["data"] for y in trace["y"] if y is not None]
    values = values or [0.0, 1.0]
    pad = (max(values) - min(values)) * 0.06 or 0.5
    return Frame(x0, x1, min(values) - pad, max(values) + pad)


def clock(ms: float) -> str:
    """Return a time since the start as ``1:05``."""
    minutes, seconds = divmod(int(ms // 1000), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}:{minutes_left:02d} h" if hours else f"{minutes}:{seconds:02d}"


def drawing(figure: Figure) -> dict[str, Any]:
    """Return the context of the SVG template: paths with their class, ticks, sizes."""
    box = frame(figure)
    paths = [
        {"class": _class_of(trace), "d": box.path(trace)} for trace in figure["data"] if trace["x"]
    ]
    is_timed = "origin_ms" in figure["layout"].get("meta", {"origin_ms": ORIGIN_MS})
    levels = [box.y0 + (box.y1 - box.y0) * share for share in (0, 1 / 3, 2 / 3, 1)]
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "label_x": LEFT - 6,
        "label_y": HEIGHT - 6,
        "paths": paths,
        "levels": [
            {"y": f"{box.y(v):.1f}", "text_y": f"{box.y(v) + 3.5:.1f}", "text": number(v)}
            for v in levels
        ],
        "times": [
            {"x": f"{box.x(v):.1f}", "text": clock(v - ORIGIN_MS) if is_timed else number(v)}
            for v in (box.x0, (box.x0 + box.x1) / 2, box.x1)
        ],
    }


def _class_of(trace: dict[str, Any]) -> str:
    """Return the CSS class of a trace's path: its own, or the default for its name."""
    return str(trace.get("meta", {}).get("class") or _CLASSES[trace["name"]])


_CLASSES = {"measured": "meas", "predicted": "pred", "80 % interval": "band"}
