"""One HTTP request and its answer, as the ASGI server gives them.

Without Starlette's classes, which the site does not install: its requests have no limit of time
or of memory that all bodies take, and its streaming answers draw parts from an iterator, while
here heartbeats, parts and a refusal come from different tasks of one request.
"""

import asyncio
import json
from collections.abc import Mapping

from runners.shared.event_streams import HEARTBEAT
from webapp.core.ids import new_ulid
from webapp.core.problems import Receive, Scope, Send
from webapp.gateway.refusals import Refusal

MOST_BODY_BYTES = 4 * 1024**2  # as the endpoints have it
MOST_BODIES_BYTES = 256 * 1024**2  # that are being received or passed on
BODY_SECONDS = 60.0
JSON = b"application/json"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGoneError(Exception):
    """The client disconnected while it sent its request."""


class Bodies:
    """The memory that requests' bodies take together."""

    def __init__(self) -> None:
        self.num_bytes = 0


class Exchange:
    """A request and the answer that is sent to it; its path has no slash at the end."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, bodies: Bodies) -> None:
        self._receive, self._send, self._bodies = receive, send, bodies
        self.method: str = scope["method"]
        self.path = "/" + scope["path"].strip("/")
        self.headers: dict[bytes, bytes] = dict(scope.get("headers", ()))
        self.id = f"req_{new_ulid().lower()}"
        self.answer_headers: dict[str, str] = {}  # of limits, and the model that answers
        self.has_begun = False
        self._received = 0

    def header(self, name: str) -> str:
        """Return a header's value, "" without it."""
        return self.headers.get(name.encode(), b"").decode("latin-1")

    @property
    def secret(self) -> str:
        """Return the key that the client sent, by any of the two usual headers."""
        scheme, _, rest = self.header("authorization").partition(" ")
        if scheme.lower() == "bearer" and rest.strip():
            return rest.strip()
        return self.header("x-api-key").strip()

    async def body(self) -> bytes:
        """Return the whole body.

        Raises:
            Refusal: it is too large or too slow, or other bodies take the memory.
            ClientGoneError: the client disconnected.
        """
        parts = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    part = message.get("body", b"")
                    self._received += len(part)
                    self._bodies.num_bytes += len(part)
                    parts += part
                    if len(parts) > MOST_BODY_BYTES:
                        words = f"The body is larger than {MOST_BODY_BYTES // 1024**2} MiB."
                        raise Refusal(413, words, "too_large")
                    if self._bodies.num_bytes > MOST_BODIES_BYTES:
                        words = "Too many large requests arrive at once; try again shortly."
                        raise Refusal(429, words, "too_many_bodies", {"retry-after": "1"})
                    if not message.get("more_body"):
                        return bytes(parts)
        except TimeoutError:
            words = f"The body did not arrive within {BODY_SECONDS:g} s."
            raise Refusal(408, words, "too_slow") from None

    async def gone(self) -> None:
        """Return when the client has disconnected."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def end(self) -> None:
        """Give back the memory of the body."""
        self._bodies.num_bytes -= self._received
        self._received = 0

    # The answer

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head of the answer."""
        self.has_begun = True
        own = {**self.answer_headers, "x-request-id": self.id}
        added = [(name.encode(), value.encode()) for name, value in own.items()]
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*headers, *added]}
        )

    async def pass_on(self, chunk: bytes) -> None:
        """Send a part of the answer; it waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, chunk: bytes = b"") -> None:
        """Send the last part of the answer."""
        await self._send({"type": "http.response.body", "body": chunk})

    async def send_json(
        self, document: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a document as the whole answer."""
        body = json.dumps(document, separators=(",", ":")).encode()
        more = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        length = (b"content-length", str(len(body)).encode())
        await self.begin(status, [(b"content-type", JSON), length, *more])
        await self.finish(body)

    async def heartbeat(self) -> None:
        """Tell the reader of a stream that its answer is still to come."""
        if not self.has_begun:
            await self.begin(200, STREAM_HEADERS)
        await self.pass_on(HEARTBEAT)

    async def refuse(self, refusal: Refusal) -> None:
        """Send a refusal: by its status, or as the last event of a stream that has begun."""
        if self.has_begun:
            await self.finish(refusal.event(self.path))
            return
        self.answer_headers = {}
        await self.send_json(refusal.document(self.path), refusal.status, refusal.headers)
