"""One chip for every state: a shape, a word and a colour, the same everywhere."""

from typing import NamedTuple

from django import template

register = template.Library()


class Look(NamedTuple):
    """How a state is shown."""

    tone: str  # good, warn, bad, live or nothing
    shape: str  # a file in templates/components/icons
    word: str


LOOKS = {
    # jobs
    "draft": Look("", "draft", "Draft"),
    "queued": Look("", "clock", "Queued"),
    "preflight": Look("live", "turn", "Preflight"),
    "starting": Look("live", "turn", "Starting"),
    "running": Look("live", "turn", "Running"),
    "stopping": Look("live", "turn", "Stopping"),
    "succeeded": Look("good", "check", "Succeeded"),
    "failed": Look("bad", "cross", "Failed"),
    "error": Look("bad", "cross", "Error"),
    "stopped": Look("", "square", "Stopped"),
    "expired": Look("warn", "triangle", "Expired"),
    # hosts
    "pending-enrolment": Look("", "clock", "Pending enrolment"),
    "checking": Look("live", "turn", "Checking"),
    "ready": Look("good", "check", "Ready"),
    "draining": Look("warn", "triangle", "Draining"),
    "maintenance": Look("warn", "square", "Maintenance"),
    "retired": Look("", "square", "Retired"),
    # contact with a host
    "live": Look("good", "check", "In contact"),
    "degraded": Look("warn", "triangle", "Silent"),
    "unreachable": Look("bad", "cross", "Unreachable"),
    "stale": Look("warn", "triangle", "Silent"),
    "lost": Look("warn", "question", "Last known"),
    "never": Look("", "clock", "Not heard yet"),
    "unknown": Look("", "clock", "Not seen yet"),
    # environments of a host
    "absent": Look("", "draft", "Not built"),
    "building": Look("live", "turn", "Building"),
    "outdated": Look("warn", "triangle", "Of other versions"),
    # techniques
    "planned": Look("", "draft", "Planned"),
    "runs": Look("good", "check", "Runs"),
    "proven": Look("good", "check", "Runs, proven"),
    # plans and verdicts
    "computed": Look("good", "check", "Computed"),
    "fits": Look("good", "check", "Fits"),
    "tight": Look("warn", "triangle", "Fits, tight"),
    "slow": Look("warn", "triangle", "Fits, but slow"),
    "does-not-fit": Look("bad", "cross", "Does not fit"),
    "incomplete": Look("", "draft", "Not planned yet"),
}


@register.inclusion_tag("components/status.html")
def status(state: str, word: str = "") -> dict[str, str]:
    """Draw the chip of ``state``; ``word`` replaces its usual word."""
    look = LOOKS.get(str(state)) or Look("", "draft", str(state) or "Unknown")
    return {"tone": look.tone, "icon": icon_path(look.shape), "word": word or look.word}


@register.simple_tag
def icon_path(shape: str) -> str:
    """Return the template of an icon."""
    return f"components/icons/{shape}.svg"
