"""Masks secret values in a job's output before it reaches a disk or the server.

A value may be split over several reads: a suffix that could begin a value is buffered until
more output arrives. Standard library only.
"""

import base64
import json
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

MASK = b"[secret]"
SHORTEST_SECRET = 8  # bytes; a shorter value may be a common word


def values_in(folder: Path) -> list[bytes]:
    """Return the contents of a folder's files; an empty list if there is no folder."""
    if not folder.is_dir():
        return []
    return [path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()]


def spellings(values: Iterable[bytes]) -> set[bytes]:
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
        self._spellings = sorted(spellings(values), key=len, reverse=True)
        parts = b"|".join(re.escape(each) for each in self._spellings)
        self._pattern = re.compile(parts) if parts else None
        self._buffer = b""

    def mask(self, data: bytes) -> bytes:
        """Return the data with every value masked."""
        return self._pattern.sub(MASK, data) if self._pattern else data

    def feed(self, data: bytes) -> bytes:
        """Return the masked data that is complete so far."""
        if self._pattern is None:
            return data
        text = self.mask(self._buffer + data)
        keep = self._unfinished(text)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> bytes:
        """Return the buffered rest at the end of the stream."""
        rest, self._buffer = self._buffer, b""
        return rest

    def _unfinished(self, text: bytes) -> int:
        """Return the length of the longest suffix that could begin a value."""
        return max((_overlap(text, each) for each in self._spellings), default=0)


def _overlap(text: bytes, value: bytes) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of ``value``."""
    longest = min(len(text), len(value) - 1)
    for length in range(longest, 0, -1):
        if text.endswith(value[:length]):
            return length
    return 0
