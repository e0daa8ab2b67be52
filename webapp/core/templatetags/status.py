"""Status chips: one shape, word and colour per state."""

from typing import NamedTuple

from django import template
from django.utils.safestring import SafeString

from webapp.core.display import fragment

register = template.Library()


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
    "stopping": StateStyle("live", "turn", "Stopping"),
    "succeeded": StateStyle("good", "check", "Succeeded"),
    "failed": StateStyle("bad", "cross", "Failed"),
    "error": StateStyle("bad", "cross", "Error"),
    "stopped": StateStyle("", "square", "Stopped"),
    "expired": StateStyle("warn", "triangle", "Expired"),
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
    "degraded": StateStyle("warn", "triangle", "Silent"),
    "unreachable": StateStyle("bad", "cross", "Unreachable"),
    "stale": StateStyle("warn", "triangle", "Silent"),
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
