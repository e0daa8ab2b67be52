"""The log of an attempt: its output line by line, between what its supervisor noted of it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from webapp.core.units import memory
from webapp.jobs.models import Attempt, AttemptEvent

SUPERVISOR = "supervisor"
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
    events = AttemptEvent.objects.filter(attempt=attempt, kind__in=LOG_KINDS).order_by("-seq")
    newest_first = (
        line
        for event in events.iterator(chunk_size=limit)
        for line in reversed(list(lines_of(event)))
        if needle.lower() in line.text.lower()
    )
    return list(islice(newest_first, limit))[::-1]


def lines_of(event: AttemptEvent) -> Iterable[Line]:
    """Return the lines of one event; of a progress bar's states only the last is kept."""
    at = datetime.fromtimestamp(event.t_ms / 1000, tz=UTC)
    if note := _NOTES.get(event.kind):
        yield Line(event.seq, at, SUPERVISOR, note(event.body))
        return
    stream = str(event.body.get("stream", "stdout"))
    text = str(event.body.get("text", ""))
    for line in text.removesuffix("\n").split("\n") if text else ():
        yield Line(event.seq, at, stream, line.rstrip("\r").rpartition("\r")[2])


def _exit_words(body: Mapping[str, Any]) -> str:
    if body.get("signal"):
        return f"ended by signal {body['signal']}"
    return f"ended with exit code {body.get('exit_code')}"


_NOTES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "started": lambda body: f"process {body.get('pid')} started",
    "phase": lambda body: str(body.get("name", "")),
    "artefact": lambda body: f"left {body.get('name')}, {memory(body.get('total_bytes', 0))}",
    "exited": _exit_words,
}
LOG_KINDS = ("log", *_NOTES)
