"""The output of an attempt as lines with their instant and stream, ready for the page."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from webapp.jobs.models import Attempt, AttemptEvent

LEVELS = (("error", "bad"), ("traceback", "bad"), ("critical", "bad"), ("warn", "warn"))


@dataclass(frozen=True)
class Line:
    """One line of output; ``seq`` is the number of the event that brought it."""

    seq: int
    at: datetime
    stream: str
    text: str

    @property
    def level(self) -> str:
        """Return ``bad``, ``warn`` or nothing, from the line's own words."""
        text = self.text.lower()
        return next((look for word, look in LEVELS if word in text), "")


def log_lines(attempt: Attempt | None, *, limit: int, needle: str = "") -> list[Line]:
    """Return the last ``limit`` lines of an attempt, or of its lines that hold ``needle``."""
    if attempt is None:
        return []
    events = AttemptEvent.objects.filter(attempt=attempt, kind="log").order_by("-seq")
    if needle:
        events = events.filter(body__text__icontains=needle)
    lines = [line for event in reversed(events[:limit]) for line in lines_of(event)]
    if needle:
        lines = [line for line in lines if needle.lower() in line.text.lower()]
    return lines[-limit:]


def lines_of(event: AttemptEvent) -> Iterable[Line]:
    """Split one piece of output into its lines; progress bars keep only their last state."""
    at = datetime.fromtimestamp(event.t_ms / 1000, tz=UTC)
    for text in str(event.body.get("text", "")).splitlines():
        yield Line(
            event.seq, at, str(event.body.get("stream", "stdout")), text.rpartition("\r")[2]
        )
