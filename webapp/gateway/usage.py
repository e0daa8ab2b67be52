"""Reads what an answer used from what its endpoint says beside it, and takes that out.

How an endpoint says it is in ``runners.shared.event_streams``.
"""

import re
from collections.abc import Iterable

from runners.shared.event_streams import USAGE_COMMENT, USAGE_HEADER, TokensUsed

HEADER = USAGE_HEADER.encode()
COMMENT = re.compile(rb"(?<=\n\n)" + USAGE_COMMENT + rb"(\d{1,12}) (\d{1,12}) (\d{1,12})\n\n")
COUNTS = re.compile(rb"(\d{1,12}) (\d{1,12}) (\d{1,12})")
BOUNDARY = b"\n\n"


def used_of(headers: Iterable[tuple[bytes, bytes]]) -> TokensUsed:
    """Return what the headers of a whole answer say; zeros if they say nothing."""
    for name, value in headers:
        if name == HEADER and (found := COUNTS.fullmatch(value)):
            return TokensUsed(*map(int, found.groups()))
    return TokensUsed()


class UsageComments:
    """Takes the comments out of a stream, whose chunks may end anywhere."""

    def __init__(self) -> None:
        self.used = TokensUsed()
        self._held = b""
        self._lead = BOUNDARY  # the line ends before the next chunk, at most two

    def feed(self, chunk: bytes) -> bytes:
        """Return the stream's next part without comments of usage."""
        lead = self._lead
        text = COMMENT.sub(self._note, lead + self._held + chunk)
        begin = text.rfind(BOUNDARY)
        tail = text[begin + 2 :] if begin >= 0 else b""
        is_part = bool(tail) and (tail.startswith(USAGE_COMMENT) or USAGE_COMMENT.startswith(tail))
        self._held = tail if is_part else b""
        shown = text[: len(text) - len(self._held)]
        self._lead = shown[len(shown.rstrip(b"\n")) :][-2:]
        return shown[len(lead) :]

    def rest(self) -> bytes:
        """Return what was held back at the end of the stream."""
        held, self._held = self._held, b""
        return held

    def _note(self, found: re.Match[bytes]) -> bytes:
        self.used = TokensUsed(*map(int, found.groups()))
        return b""
