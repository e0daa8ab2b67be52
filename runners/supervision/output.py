"""Handles a job's output and events: masked, size-capped, rate-limited, validated."""

import base64
import ipaddress
import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote

from runners.shared.kinds import ArtefactKind
from runners.shared.log_text import (
    character_at,
    half_character,
    half_sequence,
    joined,
    lines_of,
    plain,
    shortened,
)

HEAD_BYTES = 4 * 1024**2
TAIL_BYTES = 4 * 1024**2
EVENT_BYTES_PER_SECOND = 64 * 1024
EVENT_TEXT_BYTES = 16 * 1024
UNFINISHED_BYTES = 4 * 1024  # of a line that is sent before it ends, and again when it grows
SLOWEST_TICKS = 10  # between two states of a line that does not end for minutes
LAST_BYTES = 8 * 1024
LONGER_BYTES = 128 * 1024  # the stack frames of eight aborting ranks
LAST_LINES = 40
CUT_HERE = " [the line goes on]\n"
CUT_BEGINNING = b"[the line began before] "
_SHORT_LINE_BYTES = 1024  # the rest of a cut line that may be left out


class CappedLog:
    """A log with a size cap: one file for the first bytes, two rotating ones for the last.

    A file ends with a line, for which it may exceed its size a little; in a longer line it ends
    between two characters.

    ``<name>.log`` is the head, ``<name>.tail.log`` the newest bytes and
    ``<name>.tail.old.log`` those before them. Unwritable bytes are dropped and counted.
    """

    def __init__(
        self, folder: Path, name: str, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES
    ) -> None:
        self.dropped_bytes = 0
        self._head = folder / f"{name}.log"
        self._tail = folder / f"{name}.tail.log"
        self._old_tail = folder / f"{name}.tail.old.log"
        self._tail_bytes = tail_bytes
        self._line_bytes = min(EVENT_TEXT_BYTES, head_bytes // 4)  # to end a line with
        self._room = head_bytes
        self._is_at_line_end = True
        self._fd = self._open(self._head)
        self._is_tail = False

    def write(self, data: bytes) -> None:
        """Write the bytes to the current file, and rotate when it is full."""
        while data:
            end = self._end_in_file(data)
            if end == 0:
                self._rotate()
                continue
            piece, data = data[:end], data[end:]
            self._room -= len(piece)
            self._is_at_line_end = piece.endswith(b"\n")
            written = 0
            with suppress(OSError):
                written = os.write(self._fd, piece)
            self.dropped_bytes += len(piece) - written

    def _end_in_file(self, data: bytes) -> int:
        """Return how many bytes belong into the current file; 0 if it is full."""
        if len(data) <= self._room:
            return len(data)
        if self._room <= 0 and self._is_at_line_end:
            return 0
        most = max(self._room + self._line_bytes, 0)
        newline = data.find(b"\n", max(self._room - 1, 0), most)
        return newline + 1 if newline >= 0 else character_at(data, min(most, len(data)))

    def close(self) -> None:
        """Close the current file; note the number of lost bytes at the end of the head file."""
        os.close(self._fd)
        if self._is_tail:
            note = (
                f"\n[{self.dropped_bytes} bytes were cut here; the end is in {self._tail.name}]\n"
            )
            with suppress(OSError), self._head.open("ab") as head:
                head.write(note.encode())

    def _rotate(self) -> None:
        os.close(self._fd)
        if self._is_tail:
            with suppress(FileNotFoundError):
                self.dropped_bytes += self._old_tail.stat().st_size
            self._tail.replace(self._old_tail)
        self._fd = self._open(self._tail)
        self._room, self._is_tail = self._tail_bytes, True
        self._is_at_line_end = True

    @staticmethod
    def _open(path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return os.open(path, flags, 0o600)


class LogEvents:
    """Splits one stream into log events of whole lines, with a rate limit.

    A line longer than an event is cut between two characters, and the event says so. Of a
    progress bar only the states are sent that it shows when it is asked. A line that has not ended
    is sent as it is, every second at first and every ten later; when it grows or ends it is sent
    again behind a carriage return, which replaces it (``log_text.plain``).

    A token bucket holds one second's bytes. ``left_out_bytes`` counts the bytes over the limit;
    the next event is preceded by a line with their number.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.left_out_bytes = 0
        self._unreported_bytes = 0
        self._partial = b""  # the line that has not ended, in its last state
        self._sent = b""  # what was sent of it
        self._num_sent = 0  # how often
        self._ticks = 0  # since then
        self._is_open = False  # the last text that was sent has not ended its line
        self._clock = clock
        self._filled_at = clock()
        self._bucket = float(EVENT_BYTES_PER_SECOND)

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the texts to send now."""
        lines, rest = joined(self._partial, data)
        while len(rest) > EVENT_TEXT_BYTES:
            at = self._cut(rest, 0)
            lines, rest = lines + rest[:at], rest[at:]
        self._partial = rest
        if lines:
            self._sent, self._num_sent = b"", 0
            yield from self._allow(lines)

    def flush(self, *, is_end: bool = False) -> Iterator[str]:
        """Yield what is due at a tick: the line that has not ended, if it was not sent.

        At the end, yield it as the last one. Before it, say what was left out.
        """
        if self._unreported_bytes:
            yield self._report()
        self._ticks += 1
        if self._ticks < min(SLOWEST_TICKS, 1 + self._num_sent // 10) and not is_end:
            return
        line = self._partial
        if not is_end:
            line = line[: len(line) - half_sequence(line)]
        if line == self._sent and not (is_end and self._is_open):
            return
        self._sent, self._num_sent, self._ticks = line, self._num_sent + 1, 0
        if len(line) > UNFINISHED_BYTES and not is_end:
            self._partial, self._sent, self._num_sent = self._partial[len(line) :], b"", 0
            yield from self._allow(line)
        else:
            yield from self._allow(line, is_unfinished=True)

    def _allow(self, data: bytes, *, is_unfinished: bool = False) -> Iterator[str]:
        now = self._clock()
        refill = (now - self._filled_at) * EVENT_BYTES_PER_SECOND
        self._bucket = min(self._bucket + refill, float(EVENT_BYTES_PER_SECOND))
        self._filled_at = now
        start = 0
        while start < len(data):
            end = self._cut(data, start)
            piece, start = data[start:end], end
            is_replacing, self._is_open = self._is_open, is_unfinished and end == len(data)
            if len(piece) > self._bucket:
                self._is_open = False
                self.left_out_bytes += len(piece)
                self._unreported_bytes += len(piece)
                continue
            self._bucket -= len(piece)
            if self._unreported_bytes:
                yield self._report()
            text = plain(piece.decode(errors="replace")).removeprefix("\r")
            ending = "" if self._is_open or piece.endswith(b"\n") else CUT_HERE
            if is_replacing or text or ending:
                yield ("\r" if is_replacing else "") + text + ending

    def _report(self) -> str:
        num_bytes, self._unreported_bytes = self._unreported_bytes, 0
        return f"[{num_bytes} bytes of output were not sent]\n"

    @staticmethod
    def _cut(data: bytes, start: int) -> int:
        """Return where an event from ``start`` on ends: at a line's end, else at a character's."""
        if len(data) - start <= EVENT_TEXT_BYTES:
            return len(data)
        most = start + EVENT_TEXT_BYTES
        if (at := data.rfind(b"\n", start, most)) >= 0:
            return at + 1
        return most - max(half_character(data[start:most]), half_sequence(data[start:most]))


class LastLines:
    """The last bytes of all output, for the exit record and the classification of the end.

    They begin with a line, or say that their first line is cut. Lines of two streams that come in
    pieces are not mixed; those that have not ended are the last ones.
    """

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._total_bytes = 0
        self._has_lost = False
        self._partials = dict.fromkeys(("stdout", "stderr"), b"")

    def feed(self, data: bytes, stream: str = "stdout") -> None:
        """Add bytes of a stream and discard the oldest ones."""
        lines, rest = joined(self._partials[stream], data)
        if len(rest) > LONGER_BYTES:
            begin = len(rest) - LONGER_BYTES + len(CUT_BEGINNING)
            rest = CUT_BEGINNING + rest[character_at(rest, begin) :]
        self._partials[stream] = rest
        if not lines:
            return
        self._has_lost = self._has_lost or len(lines) > LONGER_BYTES
        self._pieces.append(lines[-LONGER_BYTES:])
        self._total_bytes += len(self._pieces[-1])
        while self._total_bytes - len(self._pieces[0]) >= LONGER_BYTES:
            self._total_bytes -= len(self._pieces.popleft())
            self._has_lost = True

    @property
    def text(self) -> str:
        """The last bytes as text."""
        return self._last(LAST_BYTES)

    @property
    def longer_text(self) -> str:
        """The last bytes and those before them as text."""
        return self._last(LONGER_BYTES)

    def lines(self) -> list[str]:
        """Return the last lines as a page shows them, oldest first."""
        return [shortened(line) for line in lines_of(self.text)[-LAST_LINES:]]

    def _last(self, count: int) -> str:
        whole = b"".join(self._pieces)
        data = whole + b"\n".join(filter(None, self._partials.values()))
        if len(data) > count or self._has_lost:
            last = data[-(count - len(CUT_BEGINNING)) :]
            newline = last.find(b"\n", 0, _SHORT_LINE_BYTES)
            is_line_end = len(last) < len(data) and data[-len(last) - 1] == ord("\n")
            rest = last if is_line_end else last[newline + 1 :]
            data = (
                rest
                if is_line_end or newline >= 0
                else CUT_BEGINNING + last[character_at(last, 0) :]
            )
        return plain(data.decode(errors="replace")).removeprefix("\r")


# Validates the events of a job's event pipe before they enter the spool.
#
# The server must accept every event in the spool, because a rejected one would block all later
# ones: unknown fields and non-finite numbers are dropped, and a line that is not an event of the
# protocol is rejected with a message. Standard library only.


MAX_LINE_BYTES = 1024**2
JOB_SOURCES = ("job", "gpu")
ARTEFACT_KINDS = get_args(ArtefactKind)
_PORTS = range(1024, 65536)
_SERVED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,119}")

Body = dict[str, Any]


class EventRefusedError(ValueError):
    """A line on the event pipe is not a valid event; the text gives the reason."""


def parse_line(line: bytes) -> tuple[str, Body]:
    """Return kind and body of one job event.

    Raises:
        EventRefusedError: the line is not an event that a job may send.
    """
    try:
        event = json.loads(line, parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise EventRefusedError(f"not JSON ({error})") from None
    kind = event.get("kind") if isinstance(event, dict) else None
    body = event.get("body") if isinstance(event, dict) else None
    if not isinstance(kind, str) or not isinstance(body, dict):
        raise EventRefusedError('an event is an object {"kind": text, "body": object}')
    if kind not in _BODIES:
        raise EventRefusedError(f"a job sends no {kind!r} events, only {', '.join(_BODIES)}")
    return kind, _BODIES[kind](body)


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _take(body: Body, name: str, test: Callable[[object], bool], meaning: str) -> object:
    value = body.get(name)
    if not test(value):
        raise EventRefusedError(f"{name} is {value!r}, expected {meaning}")
    return value


def _text(body: Body, name: str) -> str:
    return str(_take(body, name, lambda value: isinstance(value, str), "text"))


def _mapping(body: Body, name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if not isinstance(value, dict):
        raise EventRefusedError(f"{name} is {value!r}, expected an object")
    return value


def _numbers(body: Body, name: str) -> dict[str, float]:
    return {key: value for key, value in _mapping(body, name).items() if _is_number(value)}


def _phase(body: Body) -> Body:
    begins_anew = {"begins_anew": True} if body.get("begins_anew") is True else {}
    return {"name": _text(body, "name"), **begins_anew}


def _progress(body: Body) -> Body:
    amount = "a number from 0 up"
    eta = body.get("eta_seconds")
    return {
        "done": _take(body, "done", _is_amount, amount),
        "total": _take(body, "total", _is_amount, amount),
        "unit": _text(body, "unit"),
        "eta_seconds": eta if _is_amount(eta) else None,
    }


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _metric(body: Body) -> Body:
    values = _numbers(body, "values")
    if not values:
        raise EventRefusedError("a metric event holds no finite number")
    step = body.get("step")
    source = body.get("source")
    source = source if source in JOB_SOURCES else "job"  # "host" is reserved for the supervisor
    return {"source": source, "values": values, "step": step if _is_count(step) else None}


def _log(body: Body) -> Body:
    stream = "stderr" if body.get("stream") == "stderr" else "stdout"
    text = plain(_text(body, "text"))
    if len(text) > EVENT_TEXT_BYTES:
        text = text[:EVENT_TEXT_BYTES] + CUT_HERE
    return {"stream": stream, "text": text}


def _result(body: Body) -> Body:
    notes = _mapping(body, "notes") if "notes" in body else {}
    return {
        "measured": _numbers(body, "measured"),
        "notes": {key: str(value) for key, value in notes.items()},
    }


def _artefact(body: Body) -> Body:
    files, digests = _mapping(body, "files"), _mapping(body, "sha256")
    if not all(_is_count(size) for size in files.values()):
        raise EventRefusedError("files maps each relative path to its size in bytes")
    if set(files) != set(digests):
        raise EventRefusedError("files and sha256 must name the same paths")
    return {
        "name": _text(body, "name"),
        "kind": _take(
            body, "kind", ARTEFACT_KINDS.__contains__, f"one of {', '.join(ARTEFACT_KINDS)}"
        ),
        "total_bytes": _take(body, "total_bytes", _is_count, "a size in bytes"),
        "files": files,
        "sha256": {path: str(digest) for path, digest in digests.items()},
        "facts": _mapping(body, "facts") if "facts" in body else {},
    }


def _endpoint(body: Body) -> Body:
    template = body.get("has_chat_template")
    return {
        "host": str(_take(body, "host", _is_address, "a numeric address")),
        "port": _take(body, "port", lambda port: port in _PORTS, "a port from 1024 up"),
        "model": str(_take(body, "model", _is_served_name, "the name of a model")),
        "has_keys": body.get("has_keys") is True,
        **({"has_chat_template": template} if isinstance(template, bool) else {}),
    }


def _is_address(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(ipaddress.ip_address(value))
    except ValueError:
        return False


def _is_served_name(value: object) -> bool:
    return isinstance(value, str) and bool(_SERVED_NAME.fullmatch(value))


_BODIES: dict[str, Callable[[Body], Body]] = {
    "phase": _phase,
    "progress": _progress,
    "metric": _metric,
    "log": _log,
    "result": _result,
    "artefact": _artefact,
    "endpoint": _endpoint,
}


# Masks secret values in a job's output before it reaches a disk or the server.
#
# A value may be split over several reads: a suffix that could begin a value is buffered until more
# output arrives, and so is half a character, so that no reader of a stream sees one. Standard
# library only.


MASK = b"[secret]"
SHORTEST_SECRET = 8  # bytes; a shorter value may be a common word


def values_in(folder: Path) -> list[bytes]:
    """Return the contents of a folder's files; an empty list if there is no folder."""
    if not folder.is_dir():
        return []
    return [path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()]


def encodings_of(values: Iterable[bytes]) -> set[bytes]:
    """Return the encodings of the values: plain, per line, JSON, URL-quoted and base64."""
    encodings: set[bytes] = set()
    for value in values:
        text = value.decode(errors="surrogateescape").strip()
        encodings.add(text.encode(errors="surrogateescape"))
        encodings.update(line.encode(errors="surrogateescape") for line in text.splitlines())
        encodings.add(json.dumps(text)[1:-1].encode())
        encodings.add(quote(text, safe="", errors="surrogateescape").encode())
        encodings.add(base64.b64encode(value.strip()))
    return {each for each in encodings if len(each) >= SHORTEST_SECRET}


class Masker:
    """Masks one output stream."""

    def __init__(self, values: Iterable[bytes]) -> None:
        self._spellings = sorted(encodings_of(values), key=len, reverse=True)
        parts = b"|".join(re.escape(each) for each in self._spellings)
        self._pattern = re.compile(parts) if parts else None
        self._buffer = b""

    def mask(self, data: bytes) -> bytes:
        """Return the data with every value masked."""
        return self._pattern.sub(MASK, data) if self._pattern else data

    def feed(self, data: bytes) -> bytes:
        """Return the masked data that is complete so far, in whole characters."""
        text = self.mask(self._buffer + data)
        keep = max((_overlap(text, each) for each in self._spellings), default=0)
        keep = max(keep, half_character(text))
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> bytes:
        """Return the buffered rest at the end of the stream."""
        rest, self._buffer = self._buffer, b""
        return rest


def _overlap(text: bytes, value: bytes) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of ``value``."""
    longest = min(len(text), len(value) - 1)
    for length in range(longest, 0, -1):
        if text.endswith(value[:length]):
            return length
    return 0
