"""The components that more than one page draws."""

from collections.abc import Sequence
from typing import Any

from django import template
from django.forms import BoundField
from django.http import HttpRequest

from webapp.core.display import Figure, MemoryRow, legend

register = template.Library()

NAVIGATION = (
    ("/", "Home"),
    ("/plans/", "Plans"),
    ("/limits/", "Limits"),
    ("/jobs/", "Jobs"),
    ("/queue/", "Queue"),
    ("/hosts/", "Hosts"),
    ("/models/", "Models"),
    ("/techniques/", "Techniques"),
)
APART = frozenset({"Limits", "Techniques"})  # on a phone they stand in the account's menu
THEMES = ("light", "dark")


@register.inclusion_tag("components/navigation.html", takes_context=True)
def navigation(context: dict[str, Any]) -> dict[str, Any]:
    """Draw the main entries, the current one marked."""
    request: HttpRequest | None = context.get("request")
    path = request.path if request else ""
    items = [
        {
            "url": url,
            "name": name,
            "is_current": _is_current(path, url),
            "is_apart": name in APART,
        }
        for url, name in NAVIGATION
    ]
    return {"items": items}


def _is_current(path: str, url: str) -> bool:
    """Return whether ``path`` belongs to an entry; home only owns itself."""
    return path == url or (url != "/" and path.startswith(url))


@register.simple_tag(takes_context=True)
def theme(context: dict[str, Any]) -> str:
    """Return ``light``, ``dark`` or ``system`` from the cookie: known before the first paint."""
    request: HttpRequest | None = context.get("request")
    chosen = request.COOKIES.get("theme", "") if request else ""
    return chosen if chosen in THEMES else "system"


@register.inclusion_tag("components/figure.html")
def figure(figure: Figure) -> dict[str, Figure]:
    """Draw one figure: value, unit, whisker, provenance; stands inside ``<dl class=figures>``."""
    return {"figure": figure}


@register.inclusion_tag("components/memory_bar.html")
def memory_bar(rows: Sequence[MemoryRow]) -> dict[str, Any]:
    """Draw one bar per device or stage, and the legend of the terms that occur."""
    return {"rows": rows, "legend": legend(rows)}


@register.inclusion_tag("components/field.html")
def field(field: BoundField, *, wide: bool = False) -> dict[str, Any]:
    """Draw label, control, hint and error of a form field."""
    return {"field": field, "wide": wide}


@register.inclusion_tag("components/progress.html")
def progress(ratio: float | None, label: str = "Progress") -> dict[str, Any]:
    """Draw a bar for a ratio between 0 and 1."""
    share = min(1.0, max(0.0, ratio or 0.0))
    return {"percent": round(100 * share, 1), "label": label}


@register.inclusion_tag("components/ratio.html")
def ratio(value: float | None) -> dict[str, Any]:
    """Draw measured ÷ predicted as a dot on a scale from one half to twice."""
    at = 50.0 if not value else min(100.0, max(0.0, 100 * value / (value + 1) * 1.5 - 25))
    return {"value": value, "at": round(at, 1)}
