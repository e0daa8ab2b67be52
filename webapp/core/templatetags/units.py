"""Filters that format values in base units; see ``webapp/core/display.py``."""

from datetime import datetime

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from webapp.core import display
from webapp.core.clock import now
from webapp.core.display import Quantity, quantity

register = template.Library()

Number = float | int | None
NOTHING = "—"
A_BREATH_SECONDS = 5


def _html(shown: Quantity) -> SafeString:
    """Return value and unit as HTML, with the unit in a lighter style."""
    return format_html('{}<span class="unit">{}</span>', shown.value, shown.unit)


@register.filter(name="quantity")
def quantity_html(value: Number, unit: str) -> SafeString | str:
    """Return a number in base units with its unit as HTML: ``{{ 1e9|quantity:"bytes" }}``."""
    return NOTHING if value is None else _html(quantity(value, unit))


@register.filter
def capitalised(text: str) -> str:
    """Return a text with a capital first letter; a leading identifier stays unchanged."""
    return display.capitalised(text)


@register.filter
def actor(name: str) -> str:
    """Return the display name of an actor."""
    return display.actor_words(name)


@register.filter
def memory(value: Number) -> str:
    """Return bytes as text: ``21.0 GiB``."""
    return NOTHING if value is None else str(display.memory(value))


@register.filter
def gib(value: Number) -> str:
    """Return bytes as a number of GiB without unit, for columns."""
    return NOTHING if value is None else display.gib(value)


@register.filter
def bandwidth(value: Number) -> str:
    """Return bytes per second as text: ``18.0 GB/s``."""
    return NOTHING if value is None else str(display.bandwidth(value))


@register.filter
def flops(value: Number) -> str:
    """Return FLOP per second as text: ``1.20 TFLOP/s``."""
    return NOTHING if value is None else str(display.flops(value))


@register.filter
def parameters(value: Number) -> str:
    """Return a parameter count as text: ``8.03 B``."""
    return NOTHING if value is None else str(display.parameters(value))


@register.filter
def count(value: Number) -> str:
    """Return a whole number with thin spaces between thousands."""
    return NOTHING if value is None else display.whole(value)


@register.filter
def number(value: Number) -> str:
    """Return a number with three significant digits."""
    return NOTHING if value is None else display.number(value)


@register.filter
def duration(value: Number) -> str:
    """Return seconds as text in one unit: ``31 ms``, ``2.1 min``."""
    return NOTHING if value is None else str(display.duration(value))


@register.filter
def clock(value: Number) -> str:
    """Return seconds as text in whole parts: ``1 h 40 min``."""
    return NOTHING if value is None else display.clock(value)


@register.filter
def about(value: Number) -> str:
    """Return seconds as an estimate: ``about 13 min``."""
    return NOTHING if value is None else display.about(value)


@register.filter
def percent(value: Number) -> str:
    """Return a ratio as per cent."""
    return NOTHING if value is None else display.percent(value)


@register.filter
def ago(value: datetime | None) -> str:
    """Return the time since an instant: ``3 min ago``."""
    if value is None:
        return "never"
    seconds = (now() - value).total_seconds()
    return "just now" if seconds < A_BREATH_SECONDS else f"{display.coarse(seconds)} ago"
