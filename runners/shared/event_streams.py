"""The one reader of server-sent events: of engines, and of endpoints; and what counts an answer.

A gateway that sends ``USAGE_HEADER: 1`` gets an answer's tokens beside it: whole, in a header of
that name; streamed, in a comment after each event.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterable
from typing import NamedTuple

HEARTBEAT_SECONDS = 10.0  # proxies cut silent connections after 30 to 60 s
HEARTBEAT = b": waiting\n\n"  # a comment, which every client skips
USAGE_HEADER = "x-slipway-usage"
USAGE_COMMENT = b": usage "


class TokensUsed(NamedTuple):
    """The tokens of one request so far, over all its prompts and answers."""

    prompt: int = 0
    cached: int = 0  # of the prompt, read from a prefix cache
    completion: int = 0

    @property
    def words(self) -> str:
        """Return the counts as the value of the header."""
        return f"{self.prompt} {self.cached} {self.completion}"

    @property
    def comment(self) -> bytes:
        """Return the counts as a comment of an event stream."""
        return USAGE_COMMENT + self.words.encode() + b"\n\n"


_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")


async def read_events(parts: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """Yield each complete event of a stream, without the blank line that ends it.

    Lines end at CR and LF alone. httpx's ``aiter_lines`` also cuts at U+2028 and others at which
    ``str.splitlines`` does, and a JSON text may hold them.
    """
    rest = b""
    async for part in parts:
        *events, rest = _END.split(rest + part)
        for each in events:
            yield each
