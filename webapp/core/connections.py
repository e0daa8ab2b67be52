"""uvicorn's connections to clients: a deadline for the headers, and enough file descriptors."""

import asyncio
import resource
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from runners.shared.timing import TUNNEL_PING_SECONDS, TUNNEL_PONG_SECONDS
from runners.shared.tunnel import MAX_FRAME_BYTES

HEADER_SECONDS = 20.0
MOST_FILES = 65_536
# Arguments of ``uvicorn.Config`` for the hosts' WebSockets.
WEBSOCKETS: Mapping[str, Any] = {
    "ws_max_size": MAX_FRAME_BYTES,
    "ws_per_message_deflate": False,
    "ws_ping_interval": TUNNEL_PING_SECONDS,
    "ws_ping_timeout": TUNNEL_PONG_SECONDS,
}


class HeaderDeadlineProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers are not there after ``HEADER_SECONDS``.

    uvicorn itself waits for them without end. Deadlines of bodies depend on who sends them
    (``webapp.core.middleware.SizeLimitedRequest``).
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Await the first request."""
        super().connection_made(transport)
        self._expect_headers()

    def on_message_begin(self) -> None:
        """Await the rest of the headers of a request."""
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        """Serve the request: its headers are there."""
        self._end_deadline()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline with the connection."""
        self._end_deadline()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._expire)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and not cycle.response_complete:
            self._expect_headers()  # the answer to the request before is still being sent
        else:
            self.transport.close()


def raise_file_limit() -> None:
    """Let this process open as many files as it may: idle connections are files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
