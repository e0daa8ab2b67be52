"""Minimal HTTP over ASGI: read bodies; send JSON, errors and server-sent events."""

import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from runners.jobs.serve.protocol import RequestError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Document = dict[str, Any]

MAX_BODY_BYTES = 4 * 1024**2
JSON = b"application/json"


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def read_body(receive: Receive) -> bytes:
    """Return the whole request body.

    Raises:
        RequestError: the body is too large.
        ClientGoneError: the client disconnected while it sent the body.
    """
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            limit = f"The body is larger than {MAX_BODY_BYTES} bytes."
            raise RequestError(413, limit, code="body_too_large")
        if not message.get("more_body"):
            return b"".join(parts)


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def event_of(document: Document) -> bytes:
    """Return a document as one server-sent event."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


async def send_part(send: Send, body: bytes, *, more: bool = True) -> None:
    """Send a part of a response body."""
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def send_error(send: Send, error: RequestError) -> None:
    """Send an error as an OpenAI error document."""
    wait = error.retry_after_seconds
    headers = [] if wait is None else [(b"retry-after", str(wait).encode())]
    await send_bytes(send, error.status, json.dumps(error.document).encode(), JSON, headers)


async def send_json(send: Send, status: int, document: Document) -> None:
    """Send a JSON response."""
    await send_bytes(send, status, json.dumps(document).encode(), JSON)


async def send_bytes(
    send: Send,
    status: int,
    body: bytes,
    kind: bytes,
    more: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Send a complete response."""
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send_part(send, body, more=False)
