"""The event log of one attempt on disk: the supervisor appends, the shipper reads.

A spool is a folder of JSON-lines segments, each named by its first sequence number.
Numbers start at 1 without gaps: a partially written line is truncated and its number
reused. Standard library only.
"""

import errno
import itertools
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

SEGMENT_BYTES = 8 * 1024**2
CAP_BYTES = 512 * 1024**2
RESERVE_BYTES = 64 * 1024
METRIC_KINDS = frozenset({"metric", "progress"})
LOG_KINDS = frozenset({"log"})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Free space below which metrics, then logs, are dropped; capped at this share of the disk.
_SHED_METRICS_BYTES = 64 * 1024**2
_SHED_LOGS_BYTES = 16 * 1024**2
_SHED_SHARE = 0.02

Event = dict[str, Any]


def segments(folder: Path) -> list[Path]:
    """Return the segments of a spool in numeric order."""
    return sorted(folder.glob("*.jsonl"))


def _segment(folder: Path, first_seq: int) -> Path:
    return folder / f"{first_seq:012d}.jsonl"


def _first_seq(segment: Path) -> int:
    return int(segment.stem)


def _parse(line: bytes, seq: int) -> Event | None:
    """Return the event of a line, or None if it is not the complete event with this number."""
    if not line.endswith(b"\n"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and event.get("seq") == seq else None


class SpoolWriter:
    """Appends numbered events; truncates a partial last line when it opens.

    State events are flushed at once, metrics and logs at the next ``sync``. On a full disk
    metrics are dropped first, then logs; state events have reserved space.
    """

    def __init__(
        self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES, cap_bytes: int = CAP_BYTES
    ) -> None:
        self.folder = folder
        self.dropped_events = 0
        self._segment_bytes = segment_bytes
        self._cap_bytes = cap_bytes
        self._is_dirty = False
        self._dropped_kinds: frozenset[str] = frozenset()
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(OSError):  # without it, state events are lost on a full disk
            reserve = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(reserve, 0, RESERVE_BYTES)
            finally:
                os.close(reserve)
        self._open_tail()
        self._update_dropped_kinds()

    def append(self, kind: str, body: Mapping[str, Any], t_ms: int | None = None) -> int | None:
        """Write one event and return its number, or None when it was dropped."""
        if kind in self._dropped_kinds:
            self.dropped_events += 1
            return None
        instant = time.time_ns() // 1_000_000 if t_ms is None else t_ms
        event = {"seq": self.next_seq, "t_ms": instant, "kind": kind, "body": body}
        line = json.dumps(event, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        is_state = kind not in METRIC_KINDS | LOG_KINDS
        if not (self._write(line) or (is_state and self._free_reserve() and self._write(line))):
            self.dropped_events += 1
            return None
        self.next_seq += 1
        self._is_dirty = True
        if is_state:
            self._flush()
        return self.next_seq - 1

    def sync(self) -> None:
        """Flush appended events to disk and update which kinds are dropped."""
        self._flush()
        self._update_dropped_kinds()

    def close(self) -> None:
        """Flush and close."""
        self._flush()
        os.close(self._fd)

    def _flush(self) -> None:
        if self._is_dirty:
            with suppress(OSError):  # if the disk fails here, the next write fails too
                os.fdatasync(self._fd)
            self._is_dirty = False

    def _open_tail(self) -> None:
        existing = segments(self.folder)
        first_seq = _first_seq(existing[-1]) if existing else 1
        self._fd = self._open(first_seq)
        data = _segment(self.folder, first_seq).read_bytes()
        self._size, self.next_seq = 0, first_seq
        for line in data.splitlines(keepends=True):
            if _parse(line, self.next_seq) is None:
                break
            self._size += len(line)
            self.next_seq += 1
        os.ftruncate(self._fd, self._size)

    def _open(self, first_seq: int) -> int:
        path = _segment(self.folder, first_seq)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _write(self, line: bytes) -> bool:
        """Write a complete line, or leave the segment unchanged and return False."""
        try:
            if self._size >= self._segment_bytes:
                self._roll()
            if os.write(self._fd, line) == len(line):
                self._size += len(line)
                return True
        except OSError as error:
            if error.errno not in _FULL:
                raise
        os.ftruncate(self._fd, self._size)
        return False

    def _roll(self) -> None:
        following = self._open(self.next_seq)
        self._flush()
        os.close(self._fd)
        self._fd, self._size = following, 0
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _update_dropped_kinds(self) -> None:
        """Decide which event kinds are dropped until the next sync."""
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        share = int(disk.f_blocks * disk.f_frsize * _SHED_SHARE)
        used = sum(path.stat().st_size for path in segments(self.folder))
        self._dropped_kinds = frozenset()
        if free < min(_SHED_METRICS_BYTES, share) or used > self._cap_bytes * 3 // 4:
            self._dropped_kinds |= METRIC_KINDS
        if free < min(_SHED_LOGS_BYTES, share // 4) or used > self._cap_bytes:
            self._dropped_kinds |= LOG_KINDS

    def _free_reserve(self) -> bool:
        with suppress(FileNotFoundError):
            self._reserve.unlink()
            return True
        return False

    @property
    def _reserve(self) -> Path:
        return self.folder / "reserve"


class _Cursor(NamedTuple):
    """The position after event ``seq``: segment and byte offset of the next event."""

    seq: int
    segment: Path
    offset: int


class SpoolReader:
    """Reads events while the writer appends in another process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cursor: _Cursor | None = None
        self._tail: _Cursor | None = None

    def read_after(self, seq: int, *, limit: int = 500, max_bytes: int = 2**20) -> list[Event]:
        """Return the events after ``seq``, at most ``limit`` and about ``max_bytes``."""
        cursor = self._cursor if self._cursor and self._cursor.seq == seq else self._find(seq)
        events: list[Event] = []
        total_bytes = 0
        while cursor and len(events) < limit and total_bytes < max_bytes:
            chunk, cursor = self._read(cursor, limit - len(events), max_bytes - total_bytes)
            total_bytes += sum(size for _, size in chunk)
            events += [event for event, _ in chunk]
            following = _segment(self.folder, cursor.seq + 1)
            if cursor.segment == following or not following.exists():
                break
            cursor = _Cursor(cursor.seq, following, 0)
        self._cursor = cursor
        return events

    def last_seq(self) -> int:
        """Return the number of the last complete event, or 0."""
        existing = segments(self.folder)
        if not existing:
            return 0
        tail = self._tail
        if tail is None or tail.segment != existing[-1]:
            tail = _Cursor(_first_seq(existing[-1]) - 1, existing[-1], 0)
        self._tail = self._read(tail, None, None)[1]
        return self._tail.seq

    @staticmethod
    def _read(
        cursor: _Cursor, limit: int | None, max_bytes: int | None
    ) -> tuple[list[tuple[Event, int]], _Cursor]:
        """Return events of one segment with their sizes, and the cursor after them."""
        seq, segment, offset = cursor
        events: list[tuple[Event, int]] = []
        total_bytes = 0
        try:
            with segment.open("rb") as lines:
                lines.seek(offset)
                for line in lines:
                    if limit is not None and len(events) >= limit:
                        break
                    event = _parse(line, seq + 1)
                    if event is None:
                        break
                    seq, offset, total_bytes = seq + 1, offset + len(line), total_bytes + len(line)
                    events.append((event, len(line)))
                    if max_bytes is not None and total_bytes >= max_bytes:
                        break
        except FileNotFoundError:
            pass
        return events, _Cursor(seq, segment, offset)

    def _find(self, seq: int) -> _Cursor | None:
        """Return the cursor after event ``seq``, or None if the spool does not reach it."""
        holding = [path for path in segments(self.folder) if _first_seq(path) <= seq + 1]
        if not holding:
            return None
        first_seq = _first_seq(holding[-1])
        _, cursor = self._read(_Cursor(first_seq - 1, holding[-1], 0), seq + 1 - first_seq, None)
        return cursor if cursor.seq == seq else None


def trim(folder: Path, acked_seq: int) -> int:
    """Delete the segments whose events are all acknowledged; return their number.

    The last segment is kept: it determines the next number.
    """
    existing = segments(folder)
    num_deleted = 0
    for segment, following in itertools.pairwise(existing):
        if _first_seq(following) > acked_seq + 1:
            break
        segment.unlink()
        num_deleted += 1
    return num_deleted
