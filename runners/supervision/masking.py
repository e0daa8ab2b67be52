"""Hides the values of secrets in what a job writes, before it reaches a disk or the server.

A value may come in several reads: what could be the beginning of one is held back until more
comes. Standard library only.
"""

import base64
import json
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

MASK = b"[secret]"
SHORTEST_SECRET = 8  # bytes; what is shorter may be a word


def values_in(folder: Path) -> list[bytes]:
    """Return the contents of a folder's files; none where there is no folder."""
    if not folder.is_dir():
        return []
    return [path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()]


def spellings(values: Iterable[bytes]) -> set[bytes]:
    """Return the values as programs write them: plain, line by line, in JSON, URLs and base64."""
    found: set[bytes] = set()
    for value in values:
        text = value.decode(errors="surrogateescape").strip()
        found.add(text.encode(errors="surrogateescape"))
        found.update(line.encode(errors="surrogateescape") for line in text.splitlines())
        found.add(json.dumps(text)[1:-1].encode())
        found.add(quote(text, safe="", errors="surrogateescape").encode())
        found.add(base64.b64encode(value.strip()))
    return {each for each in found if len(each) >= SHORTEST_SECRET}


class Masker:
    """Masks one stream; two streams need one each."""

    def __init__(self, values: Iterable[bytes]) -> None:
        self._spellings = sorted(spellings(values), key=len, reverse=True)
        parts = b"|".join(re.escape(each) for each in self._spellings)
        self._pattern = re.compile(parts) if parts else None
        self._held = b""

    def mask(self, data: bytes) -> bytes:
        """Return a whole piece with every value hidden."""
        return self._pattern.sub(MASK, data) if self._pattern else data

    def feed(self, data: bytes) -> bytes:
        """Return what may be passed on of a stream so far."""
        if self._pattern is None:
            return data
        text = self.mask(self._held + data)
        keep = self._unfinished(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> bytes:
        """Return what was held back: the stream has ended, so it is no beginning of a value."""
        held, self._held = self._held, b""
        return held

    def _unfinished(self, text: bytes) -> int:
        """Return how many last bytes could be the beginning of a value."""
        return max((_overlap(text, each) for each in self._spellings), default=0)


def _overlap(text: bytes, value: bytes) -> int:
    """Return the length of the longest end of ``text`` that ``value`` begins with."""
    longest = min(len(text), len(value) - 1)
    for length in range(longest, 0, -1):
        if text.endswith(value[:length]):
            return length
    return 0
