"""Figures as people read them: a short number and its unit, never false precision."""

from typing import NamedTuple

_BINARY = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
MINUTE, HOUR, DAY = 60, 3600, 86_400
_MOMENT_S, _NOW_S = 8, 3
_PER_SECOND = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


class Quantity(NamedTuple):
    """A number ready for the page and the unit that stands lighter behind it."""

    text: str
    unit: str

    def __str__(self) -> str:
        return f"{self.text} {self.unit}".strip()


def short(value: float, digits: int = 3) -> str:
    """Return a number with about ``digits`` significant digits and thousands set apart."""
    magnitude = abs(value)
    if magnitude >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    for decimals in range(1, 6):
        if magnitude >= 10 ** (digits - 1 - decimals):
            return f"{value:,.{decimals}f}"
    return "0" if value == 0 else f"{value:.1e}"


def of_bytes(value: float) -> Quantity:
    """Return bytes in the largest binary unit that keeps the number above one."""
    for unit, size in _BINARY:
        if abs(value) >= size:
            return Quantity(short(value / size), unit)
    return Quantity(short(value), "B")


def of_rate(value: float, unit: str) -> Quantity:
    """Return a rate such as FLOP/s or B/s with a decimal prefix."""
    for prefix, size in _PER_SECOND:
        if abs(value) >= size:
            return Quantity(short(value / size), f"{prefix}{unit}")
    return Quantity(short(value), unit)


def of_seconds(value: float) -> Quantity:
    """Return a short time in ms or s, for figures such as the length of a step."""
    if abs(value) < 1:
        return Quantity(short(value * 1000), "ms")
    return Quantity(short(value), "s")


def quantity(value: float, unit: str) -> Quantity:
    """Return a figure in the unit that people use for it."""
    if unit == "bytes":
        return of_bytes(value)
    if unit == "seconds":
        return of_seconds(value)
    if unit in {"FLOP/s", "B/s"}:
        return of_rate(value, unit)
    if unit == "ratio":
        return Quantity(f"{value * 100:.0f}", "%")
    return Quantity(short(value), unit)


def duration(seconds: float) -> str:
    """Return a length of time in words: ``18 s``, ``2 min 04 s``, ``6 h 12 min``."""
    whole = max(0, round(seconds))
    if whole < MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE:02d} s"
    if whole < 2 * DAY:
        return f"{whole // HOUR} h {whole % HOUR // MINUTE:02d} min"
    return f"{whole // DAY} d {whole % DAY // HOUR} h"


_REMAINING: tuple[tuple[float, int, str], ...] = (
    (55, 5, "s"),
    (1.5 * MINUTE, MINUTE, "min"),
    (1.5 * HOUR, MINUTE, "min"),
    (2 * DAY, HOUR, "h"),
)


def remaining(seconds: float) -> str:
    """Return what is left as a person would say it: ``about 13 min left``."""
    if seconds < _MOMENT_S:
        return "a few seconds left"
    for limit, step, unit in _REMAINING:
        if seconds < limit:
            rounded = round(seconds / step)
            return f"about {rounded * step if unit == 's' else max(1, rounded)} {unit} left"
    return f"about {round(seconds / DAY)} d left"


def ago(seconds: float) -> str:
    """Return how long ago something was in words: ``just now``, ``34 s ago``."""
    if seconds < _NOW_S:
        return "just now"
    for limit, step, unit in (
        (2 * MINUTE, 1, "s"),
        (2 * HOUR, MINUTE, "min"),
        (2 * DAY, HOUR, "h"),
    ):
        if seconds < limit:
            return f"{round(seconds / step)} {unit} ago"
    return f"{round(seconds / DAY)} d ago"
