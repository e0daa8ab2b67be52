"""The log of an attempt: its last lines, and all of them."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, cast

from django.db.models import QuerySet

from runners.shared.log_text import lines_of as lines_of_text
from runners.shared.log_text import plain, shortened
from webapp.core.display import memory
from webapp.core.search import folded
from webapp.jobs.models import Attempt, AttemptEvent

SUPERVISOR = "supervisor"
MOST_CHARACTERS = 256 * 1024  # of all lines read at once
EVENTS_AT_ONCE = 100  # rows per database read: one may hold 64 KiB
LEVELS = (("error", "bad"), ("traceback", "bad"), ("critical", "bad"), ("warn", "warn"))


@dataclass(frozen=True)
class Line:
    """One line of output; ``seq`` is the number of its event."""

    seq: int
    at: datetime
    stream: str
    text: str
    is_open: bool = False  # it has not ended: a later event of its stream may replace it

    @property
    def level(self) -> str:
        """Return ``bad``, ``warn`` or nothing, by keywords in the line."""
        text = self.text.lower()
        return next((look for word, look in LEVELS if word in text), "")


def log_lines(attempt: Attempt | None, *, limit: int, needle: str = "") -> list[Line]:
    """Return the last ``limit`` lines of an attempt, or of its lines that contain ``needle``.

    Fewer if they exceed ``MOST_CHARACTERS`` in total.
    """
    if attempt is None:
        return []
    events = AttemptEvent.objects.filter(attempt=attempt, kind__in=LOG_KINDS).order_by("-seq")
    stored = cast(
        "Generator[AttemptEvent, None, None]", events.iterator(chunk_size=EVENTS_AT_ONCE)
    )
    folded_needle = folded(needle)
    with closing(stored) as rows:
        newest_first = (
            line
            for event, is_replaced in with_replaced(rows)
            for line in reversed(list(lines_of(event, is_replaced=is_replaced)))
            if folded_needle in folded(line.text)
        )
        shown = (replace(line, text=shortened(line.text)) for line in newest_first)
        return list(_bounded(islice(shown, limit)))[::-1]


def with_replaced(newest_first: Iterable[AttemptEvent]) -> Iterator[tuple[AttemptEvent, bool]]:
    """Yield events, and whether a later one replaces the line that the event leaves open."""
    replacing: set[str] = set()  # streams whose next older open line was sent again
    for event in newest_first:
        stream, text = _output(event)
        is_replaced = stream in replacing and not text.endswith("\n") and bool(text)
        if is_replaced:
            replacing.remove(stream)
        if text.startswith("\r"):
            replacing.add(stream)
        yield event, is_replaced


def log_of(attempt: Attempt | None) -> Iterator[Line]:
    """Yield every line of an attempt in its order, in full."""
    stored = AttemptEvent.objects.filter(attempt=attempt, kind__in=LOG_KINDS)
    newest_first = _in_pages(stored.order_by("-seq"), "seq__lt")
    replaced = {event.seq for event, is_replaced in with_replaced(newest_first) if is_replaced}
    for event in _in_pages(stored.order_by("seq"), "seq__gt"):
        yield from lines_of(event, is_replaced=event.seq in replaced)


def _in_pages(events: QuerySet[AttemptEvent], following: str) -> Iterator[AttemptEvent]:
    """Yield events by queries of their own: who reads them may pause for long."""
    page = list(events[:EVENTS_AT_ONCE])
    while page:
        yield from page
        page = list(events.filter(**{following: page[-1].seq})[:EVENTS_AT_ONCE])


def is_full(lines: Sequence[Line], limit: int) -> bool:
    """Return whether ``log_lines`` may have omitted older lines."""
    return len(lines) >= limit or sum(len(line.text) for line in lines) >= MOST_CHARACTERS


def _bounded(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield lines up to the total character limit."""
    num_characters = 0
    for line in lines:
        yield line
        num_characters += len(line.text)
        if num_characters >= MOST_CHARACTERS:
            return


def lines_of(event: AttemptEvent, *, is_replaced: bool = False) -> Iterable[Line]:
    """Return the lines of one event; without its open one if a later event replaces that."""
    at = datetime.fromtimestamp(event.t_ms / 1000, tz=UTC)
    if event.kind in _NOTES:
        yield Line(event.seq, at, SUPERVISOR, _note(event))
        return
    stream, text = _output(event)
    *ended, last = lines_of_text(text) or [""]
    for line in ended:
        yield Line(event.seq, at, stream, line)
    if text.removeprefix("\r") and not is_replaced:
        yield Line(event.seq, at, stream, last, is_open=not text.endswith("\n"))


def _output(event: AttemptEvent) -> tuple[str, str]:
    """Return the stream and the plain text of a log event; no text of another event."""
    if event.kind != "log":
        return SUPERVISOR, ""
    text = plain(str(event.body.get("text", "")))  # stored by an older version: as it came
    return str(event.body.get("stream", "stdout")), text


def _note(event: AttemptEvent) -> str:
    """Return the text of a supervisor event as one line; invalid bodies are stored too."""
    try:
        return shortened(" ".join(lines_of_text(_NOTES[event.kind](event.body))))
    except (ArithmeticError, TypeError, ValueError):
        return f"“{event.kind}”, with invalid figures"


def _exit_words(body: Mapping[str, Any]) -> str:
    if body.get("signal"):
        return f"ended by signal {body['signal']}"
    code = body.get("exit_code")
    return "ended without an exit code" if code is None else f"ended with exit code {code}"


_NOTES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "started": lambda body: f"process {body.get('pid')} started",
    "phase": lambda body: str(body.get("name", "")),
    "artefact": lambda body: f"saved {body.get('name')}, {memory(body.get('total_bytes', 0))}",
    "exited": _exit_words,
}
LOG_KINDS = ("log", *_NOTES)
