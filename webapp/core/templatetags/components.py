"""Template tags of components that several pages use."""

from collections.abc import Sequence
from typing import Any

from django import template
from django.forms import BoundField
from django.http import HttpRequest
from django.utils.safestring import SafeString

from webapp.core.display import Figure, MemoryRow, fragment, legend
from webapp.core.stale import mark_of
from webapp.core.units import number

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
APART = frozenset({"Limits", "Techniques"})  # in the account menu on phones
THEMES = ("light", "dark")


@register.inclusion_tag("components/navigation.html", takes_context=True)
def navigation(context: dict[str, Any]) -> dict[str, Any]:
    """Render the main navigation with the current entry marked."""
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
    """Return whether ``path`` belongs to an entry; home matches only itself."""
    return path == url or (url != "/" and path.startswith(url))


@register.simple_tag(takes_context=True)
def theme(context: dict[str, Any]) -> str:
    """Return ``light``, ``dark`` or ``system`` from the cookie, before the first paint."""
    request: HttpRequest | None = context.get("request")
    chosen = request.COOKIES.get("theme", "") if request else ""
    return chosen if chosen in THEMES else "system"


@register.inclusion_tag("components/figure.html")
def figure(figure: Figure) -> dict[str, Figure]:
    """Render one figure: value, unit, whisker, provenance; use inside ``<dl class=figures>``."""
    return {"figure": figure}


@register.inclusion_tag("components/memory_bar.html")
def memory_bar(rows: Sequence[MemoryRow]) -> dict[str, Any]:
    """Render one memory bar per device or stage, and a legend of the terms that occur."""
    return {"rows": rows, "legend": legend(rows)}


@register.inclusion_tag("components/field.html")
def field(field: BoundField, *, wide: bool = False) -> dict[str, Any]:
    """Render label, control, hint and error of a form field."""
    return {"field": field, "wide": wide}


@register.simple_tag
def progress(ratio: float | None, label: str = "Progress") -> SafeString:
    """Render a progress bar for a ratio between 0 and 1."""
    share = min(1.0, max(0.0, ratio or 0.0))
    return fragment("components/progress.html", percent=round(100 * share, 1), label=str(label))


@register.simple_tag
def ratio(value: float | None) -> SafeString:
    """Render measured ÷ predicted as a dot on a scale from one half to twice."""
    if not value:
        return fragment("components/ratio.html", shown=None, at=0.0)
    at = min(100.0, max(0.0, 100 * value / (value + 1) * 1.5 - 25))
    return fragment("components/ratio.html", shown=number(value), at=round(at, 1))


@register.filter
def mark(value: object) -> str:
    """Return the version mark of a form's values, for its hidden field ``seen``."""
    return mark_of(value)
