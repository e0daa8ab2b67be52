"""Handles a job's standard output: size-capped files, rate-limited events, last lines.

Heavy output must not slow the job: files keep a head and a tail, events have a byte rate
limit, and omitted bytes are counted and reported. Standard library only.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

HEAD_BYTES = 4 * 1024**2
TAIL_BYTES = 4 * 1024**2
EVENT_BYTES_PER_SECOND = 64 * 1024
EVENT_TEXT_BYTES = 16 * 1024
LAST_BYTES = 8 * 1024
LONGER_BYTES = 128 * 1024  # the stack frames of eight aborting ranks
LAST_LINES = 40
_PARTIAL_LINE_BYTES = 4 * 1024


class CappedLog:
    """A log with a size cap: one file for the first bytes, two rotating ones for the last.

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
        self._room = head_bytes
        self._fd = self._open(self._head)
        self._is_tail = False

    def write(self, data: bytes) -> None:
        """Write the bytes to the current file, and rotate when it is full."""
        while data:
            if self._room <= 0:
                self._rotate()
            piece, data = data[: self._room], data[self._room :]
            self._room -= len(piece)
            written = 0
            with suppress(OSError):
                written = os.write(self._fd, piece)
            self.dropped_bytes += len(piece) - written

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

    @staticmethod
    def _open(path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return os.open(path, flags, 0o600)


class LogEvents:
    """Splits one stream into log events of whole lines, with a rate limit.

    A token bucket holds one second's bytes. ``left_out_bytes`` counts the bytes over the limit;
    the next event is preceded by a line with their number.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.left_out_bytes = 0
        self._unreported_bytes = 0
        self._partial = b""
        self._clock = clock
        self._filled_at = clock()
        self._bucket = float(EVENT_BYTES_PER_SECOND)

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the texts to send now."""
        lines, newline, rest = (self._partial + data).rpartition(b"\n")
        if len(rest) > _PARTIAL_LINE_BYTES:
            lines, newline, rest = lines + newline + rest, b"", b""
        self._partial = rest
        yield from self._allow(lines + newline)

    def flush(self) -> Iterator[str]:
        """Yield the rest of an unfinished line."""
        rest, self._partial = self._partial, b""
        yield from self._allow(rest)

    def _allow(self, data: bytes) -> Iterator[str]:
        now = self._clock()
        refill = (now - self._filled_at) * EVENT_BYTES_PER_SECOND
        self._bucket = min(self._bucket + refill, float(EVENT_BYTES_PER_SECOND))
        self._filled_at = now
        for start in range(0, len(data), EVENT_TEXT_BYTES):
            piece = data[start : start + EVENT_TEXT_BYTES]
            if len(piece) > self._bucket:
                self.left_out_bytes += len(piece)
                self._unreported_bytes += len(piece)
                continue
            self._bucket -= len(piece)
            if self._unreported_bytes:
                yield f"[{self._unreported_bytes} bytes of output were not sent]\n"
                self._unreported_bytes = 0
            yield piece.decode(errors="replace").replace("\0", "\ufffd")


class LastLines:
    """The last bytes of all output, for the exit record and the classification of the end."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._total_bytes = 0

    def feed(self, data: bytes) -> None:
        """Add bytes and discard the oldest ones."""
        self._pieces.append(data[-LONGER_BYTES:])
        self._total_bytes += len(self._pieces[-1])
        while self._total_bytes - len(self._pieces[0]) >= LONGER_BYTES:
            self._total_bytes -= len(self._pieces.popleft())

    @property
    def text(self) -> str:
        """The last bytes as text."""
        return self._last(LAST_BYTES)

    @property
    def longer_text(self) -> str:
        """The last bytes and those before them as text."""
        return self._last(LONGER_BYTES)

    def lines(self) -> list[str]:
        """Return the last lines, oldest first."""
        return self.text.replace("\0", "\ufffd").splitlines()[-LAST_LINES:]

    def _last(self, count: int) -> str:
        return b"".join(self._pieces)[-count:].decode(errors="replace")
