"""Template tags: components and states."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from django import template
from django.forms import BoundField
from django.http import HttpRequest
from django.utils.safestring import SafeString

from webapp.core.display import Figure, MemoryRow, fragment, legend, number
from webapp.core.queries import mark_of

# ---------------------------------------------------------------------------
# Template tags of components that several pages use.
# ---------------------------------------------------------------------------


register = template.Library()

NAVIGATION = (
    ("/", "Home"),
    ("/plans/", "Plans"),
    ("/limits/", "Limits"),
    ("/jobs/", "Jobs"),
    ("/deployments/", "Deployments"),
    ("/queue/", "Queue"),
    ("/hosts/", "Hosts"),
    ("/models/", "Models"),
    ("/techniques/", "Techniques"),
    ("/docs/", "Docs"),
)
PARTS = {
    "/jobs/": ("/workflows/", "/approvals/"),
    "/plans/": ("/tunings/",),
    "/deployments/": ("/servers/",),
    "/hosts/": ("/observed-jobs/",),
}  # pages below an entry, at other addresses
APART = frozenset({"Limits", "Queue", "Techniques", "Docs"})  # in the account menu on phones
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
            "is_current": any(_is_current(path, each) for each in (url, *PARTS.get(url, ()))),
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
    cookies = request.COOKIES if request else {}
    chosen = cookies.get("__Host-theme") or cookies.get("theme", "")  # the first one behind TLS
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
def ratio(value: float | None, words: str = "") -> SafeString:
    """Render measured ÷ predicted as a dot on a scale from one half to twice, beside ``words``."""
    if not value:
        return fragment("components/ratio.html", shown=None, at=0.0)
    at = min(100.0, max(0.0, 100 * value / (value + 1) * 1.5 - 25)) if value > 0 else 0.0
    return fragment("components/ratio.html", shown=words or number(value), at=round(at, 1))


@register.filter
def mark(value: object) -> str:
    """Return the version mark of a form's values, for its hidden field ``seen``."""
    return mark_of(value)


# ---------------------------------------------------------------------------
# Status chips: one shape, word and colour per state.
# ---------------------------------------------------------------------------


class StateStyle(NamedTuple):
    """The appearance of a state."""

    tone: str  # "good", "warn", "bad", "live" or ""
    shape: str  # a file in templates/components/icons
    word: str


LOOKS = {
    # jobs
    "draft": StateStyle("", "draft", "Draft"),
    "queued": StateStyle("", "clock", "Queued"),
    "preflight": StateStyle("live", "turn", "Preflight"),
    "starting": StateStyle("live", "turn", "Starting"),
    "running": StateStyle("live", "turn", "Running"),
    "serving": StateStyle("good", "dot", "Serving"),
    "stopping": StateStyle("live", "turn", "Stopping"),
    "succeeded": StateStyle("good", "check", "Succeeded"),
    "failed": StateStyle("bad", "cross", "Failed"),
    "error": StateStyle("bad", "cross", "Error"),
    "stopped": StateStyle("", "square", "Stopped"),
    "expired": StateStyle("warn", "triangle", "Expired"),
    # steps of a workflow
    "waiting": StateStyle("", "clock", "Waiting"),
    # deployments
    "asleep": StateStyle("", "square", "Asleep"),
    "loading": StateStyle("live", "turn", "Loading"),
    "silent": StateStyle("warn", "triangle", "Not answering"),
    "failing": StateStyle("bad", "cross", "Failing"),
    "paused": StateStyle("warn", "square", "Paused"),
    # targets of a plan
    "met": StateStyle("good", "check", "Met"),
    "missed": StateStyle("warn", "triangle", "Missed"),
    "unjudged": StateStyle("", "clock", "Not compared yet"),
    # hosts
    "pending-enrolment": StateStyle("", "clock", "Pending enrolment"),
    "checking": StateStyle("live", "turn", "Checking"),
    "ready": StateStyle("good", "check", "Ready"),
    "draining": StateStyle("warn", "triangle", "Draining"),
    "maintenance": StateStyle("warn", "square", "Maintenance"),
    "retired": StateStyle("", "square", "Retired"),
    # contact with a host
    "live": StateStyle("good", "check", "In contact"),
    "degraded": StateStyle("warn", "triangle", "No heartbeat"),
    "unreachable": StateStyle("bad", "cross", "Unreachable"),
    "stale": StateStyle("warn", "triangle", "No heartbeat"),
    "lost": StateStyle("warn", "question", "Last known"),
    "never": StateStyle("", "clock", "No heartbeat yet"),
    "unknown": StateStyle("", "clock", "Not seen yet"),
    # environments of a host
    "absent": StateStyle("", "draft", "Not built"),
    "building": StateStyle("live", "turn", "Building"),
    "outdated": StateStyle("warn", "triangle", "Of other versions"),
    # techniques
    "planned": StateStyle("", "draft", "Planned"),
    "runs": StateStyle("good", "check", "Runs"),
    "proven": StateStyle("good", "check", "Runs, proven"),
    # plans and verdicts
    "computed": StateStyle("good", "check", "Computed"),
    "fits": StateStyle("good", "check", "Fits"),
    "tight": StateStyle("warn", "triangle", "Fits, tight"),
    "slow": StateStyle("warn", "triangle", "Fits, but slow"),
    "long": StateStyle("warn", "triangle", "Fits, but takes months"),
    "too-long": StateStyle("bad", "cross", "Takes over a year"),
    "over-context": StateStyle("warn", "triangle", "Longer than the context"),
    "narrow": StateStyle("warn", "triangle", "Fits, target narrowly"),
    "does-not-fit": StateStyle("bad", "cross", "Does not fit"),
    "incomplete": StateStyle("", "draft", "Not planned yet"),
    "refused": StateStyle("bad", "cross", "Cannot be planned"),
}


@register.simple_tag
def status(state: str, word: str = "") -> SafeString:
    """Render the chip of ``state``; ``word`` replaces its default word."""
    look = LOOKS.get(str(state)) or StateStyle("", "draft", str(state) or "Unknown")
    return fragment(
        "components/status.html",
        tone=look.tone,
        icon=icon_path(look.shape),
        word=str(word or look.word),
    )


@register.simple_tag
def icon_path(shape: str) -> str:
    """Return the template path of an icon."""
    return f"components/icons/{shape}.svg"
