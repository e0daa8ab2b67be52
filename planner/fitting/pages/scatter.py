"""Plots of predicted against measured: small SVGs in the page's colours.

Each plot has square logarithmic axes with the diagonal and the 80 % band, and one mark per row.
Element classes are those of the product's charts, so that the plots follow light and dark mode.
"""

import math
from collections.abc import Sequence
from html import escape

from planner.fitting.left_out import Z_80, LeftOut, spread_of

WIDTH, HEIGHT = 460, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 40
DECADE = 10.0
MARK = "h2.4"


def picture(title: str, unit: str, rows: Sequence[LeftOut], scale: float = 1.0) -> str:
    """Return rows as an SVG; ``scale`` converts the base unit to the unit of the axes."""
    values = [value / scale for row in rows for value in (row.measured, row.predicted)]
    low, high = bounds(values)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * share(value, low, high)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share(value, low, high)

    interval_factor = math.exp(Z_80 * spread_of(rows))
    corners = (
        (low, low * interval_factor),
        (high / interval_factor, high),
        (high, high),
        (high, high / interval_factor),
        (low * interval_factor, low),
        (low, low),
    )
    band = " ".join(f"{x(right):.0f},{y(up):.0f}" for right, up in corners)
    marks = "".join(
        f"M{x(row.measured / scale):.0f} {y(row.predicted / scale):.0f}{MARK}" for row in rows
    )
    label = f"{title}: {len(rows)} rows, predicted against measured, {unit}"
    return "\n".join(
        (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">',
            f'<polygon class="band" points="{band}" />',
            f'<path class="pred" d="M{x(low):.0f} {y(low):.0f}L{x(high):.0f} {y(high):.0f}" />',
            *(_tick_lines(tick, x(tick), y(tick)) for tick in ticks(low, high)),
            f'<path class="meas" d="{marks}" />',
            f'<text x="{LEFT}" y="{HEIGHT - 6}">measured, {escape(unit)}</text>',
            f'<text x="{LEFT + 8}" y="{TOP + 12}">predicted, {escape(unit)}</text>',
            "</svg>\n",
        )
    )


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the half-decade range that contains all values.

    >>> bounds([2.0, 40.0])
    (1.0, 100.0)
    """
    low = math.floor(2 * math.log10(min(values))) / 2
    high = math.ceil(2 * math.log10(max(values))) / 2
    return DECADE**low, DECADE ** max(high, low + 0.5)


def share(value: float, low: float, high: float) -> float:
    """Return the relative position of a value on a logarithmic axis."""
    return math.log(value / low) / math.log(high / low)


def ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten on an axis.

    >>> ticks(0.5, 200.0)
    [1.0, 10.0, 100.0]
    """
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [DECADE**power for power in range(first, last + 1)]


def _tick_lines(tick: float, right: float, up: float) -> str:
    floor = HEIGHT - BOTTOM
    return (
        f'<path class="axis" d="M{right:.0f} {TOP}V{floor}M{LEFT} {up:.0f}H{WIDTH - RIGHT}" />'
        f'<text x="{right:.0f}" y="{floor + 14}" text-anchor="middle">{tick:g}</text>'
        f'<text x="{LEFT - 6}" y="{up + 4:.0f}" text-anchor="end">{tick:g}</text>'
    )
