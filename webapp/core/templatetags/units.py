"""Filters that format values in base units; see ``webapp/core/display.py``."""

from collections.abc import Callable, Mapping
from datetime import datetime

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from webapp.core import display
from webapp.core.clock import now
from webapp.core.display import quantity
from webapp.core.equations import mathml

register = template.Library()

Number = float | int | None
NOTHING = "—"
A_BREATH_SECONDS = 5


@register.filter(name="quantity")
def quantity_html(value: Number, unit: str) -> SafeString | str:
    """Return a number in base units with its unit as HTML: ``{{ 1e9|quantity:"bytes" }}``."""
    if value is None:
        return NOTHING
    shown = quantity(value, unit)
    return format_html('{}<span class="unit">{}</span>', shown.value, shown.unit)


register.filter("capitalised", display.capitalised)
register.filter("actor", display.actor_words)
FORMATS: dict[str, Callable[[float], object]] = {
    "memory": display.memory,  # bytes: 21.0 GiB
    "gib": display.gib,  # bytes as GiB, without the unit, for columns
    "bandwidth": display.bandwidth,  # bytes per second: 18.0 GB/s
    "flops": display.flops,  # FLOP per second: 1.20 TFLOP/s
    "parameters": display.parameters,  # 8.03 B
    "count": display.whole,  # a whole number with thin spaces between thousands
    "number": display.number,  # three significant digits
    "duration": display.duration,  # seconds in one unit: 31 ms, 2.1 min
    "clock": display.clock,  # seconds in whole parts: 1 h 40 min
    "about": display.about,  # seconds as an estimate: about 13 min
    "percent": display.percent,  # a ratio
}


def _filter(shown: Callable[[float], object]) -> Callable[[Number], str]:
    """Return a filter that formats a number, and a dash if there is none."""
    return lambda value: NOTHING if value is None else str(shown(value))


for name, shown in FORMATS.items():
    register.filter(name, _filter(shown))


@register.filter
def minutes(value: Number) -> str:
    """Return minutes in whole parts: ``1 d``."""
    return str(display.clock(60 * value)) if value else NOTHING


@register.filter
def mebibytes(text: str) -> str:
    """Return a scheduler's MiB as memory; a "+" after them says that some nodes have more."""
    number = str(text).removesuffix("+")
    if not (number.isascii() and number.isdecimal()):
        return f"{text} MiB"
    words = str(display.memory(int(number) * 2**20))
    return words if number == text else f"{words} and more"


@register.filter
def usd(value: Number, over: int | None = None) -> str:
    """Return an amount in US dollars, over a number of things: ``{{ cost|usd:answers }}``."""
    if value is None or over == 0:
        return NOTHING
    return str(display.money(value / (over or 1)))


@register.filter
def ago(value: datetime | None) -> str:
    """Return the time since an instant: ``3 min ago``."""
    if value is None:
        return "never"
    seconds = (now() - value).total_seconds()
    return "just now" if seconds < A_BREATH_SECONDS else f"{display.coarse(seconds)} ago"


@register.filter
def at(table: Mapping[str, object], key: str) -> object:
    """Return the entry of a table at a key, None without one: ``{{ names|at:event.subject }}``."""
    return table.get(key)


register.filter("mathml", mathml)
