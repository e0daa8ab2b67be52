"""Server-sent events: the endpoint's one writer."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Self, TypeVar

from anyio import CancelScope
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from runners.shared.event_streams import HEARTBEAT, HEARTBEAT_SECONDS

Result = TypeVar("Result")

STREAM_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # asks a proxy such as nginx not to hold events back
}


def server_sent_event(document: Mapping[str, Any], name: str = "") -> bytes:
    """Return a document as one server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


async def with_heartbeats(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the events, and a heartbeat whenever none came for ``HEARTBEAT_SECONDS``."""
    waiting: asyncio.Future[bytes] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(events, b""))
            await asyncio.wait((waiting,), timeout=HEARTBEAT_SECONDS)
            if not waiting.done():
                yield HEARTBEAT
                continue
            event, waiting = waiting.result(), None
            if not event:
                return
            yield event
    finally:
        with CancelScope(shield=True):  # the engine hears of a client that went
            if waiting is not None:
                waiting.cancel()
                await asyncio.wait((waiting,))
            await events.aclose()


async def unless_disconnected(request: Request, answering: Awaitable[Result]) -> Result:
    """Return the result; cancel the work if the client disconnects before.

    Raises:
        ClientDisconnect: the client has disconnected.
    """
    working = asyncio.ensure_future(answering)
    gone = asyncio.ensure_future(_disconnection(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait((working, gone))


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A streamed answer; Starlette cancels it when the client disconnects."""

    def __init__(
        self,
        first: bytes,
        following: AsyncGenerator[bytes],
        error_event: Callable[[Exception], bytes],
    ) -> None:
        self._following = following
        super().__init__(self._events(first, error_event), headers=STREAM_HEADERS)

    @classmethod
    async def begun(
        cls,
        request: Request,
        events: AsyncGenerator[bytes],
        error_event: Callable[[Exception], bytes],
    ) -> Self:
        """Return the response once its first event or heartbeat is there.

        An error before is raised, and has its own HTTP status. A later one is an event.
        """
        following = with_heartbeats(events)
        first = await unless_disconnected(request, anext(following, b""))
        return cls(first, following, error_event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; close their source however that ends."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._following.aclose()

    async def _events(
        self, first: bytes, error_event: Callable[[Exception], bytes]
    ) -> AsyncGenerator[bytes]:
        yield first
        try:
            async for each in self._following:
                yield each
        except Exception as error:  # noqa: BLE001 - no client is left without an answer
            yield error_event(error)
