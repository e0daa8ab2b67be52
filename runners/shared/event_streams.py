"""The one reader of server-sent events: of engines, and of endpoints."""

import re
from collections.abc import AsyncGenerator, AsyncIterable

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
