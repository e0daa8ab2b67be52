"""The gateway's end of the tunnels: the hosts' WebSockets, and requests over them.

A host's agent opens one connection to each gateway (``runners.host.tunnel``); the frames on it are
those of ``runners.shared.tunnel``.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Protocol

import structlog
from asgiref.sync import sync_to_async
from django.db import DatabaseError

from runners.shared import tunnel as protocol
from runners.shared.timing import scale_duration
from runners.shared.tunnel import (
    MAX_STREAMS,
    Frame,
    FrameError,
    FrameType,
    Headers,
    Inbox,
    RequestHead,
    ResponseHead,
    SendWindow,
)
from webapp.core.pace import STRANGER, calls
from webapp.core.problems import BusyProblem, Receive, Scope, Send
from webapp.hosts.services import UNKNOWN_CREDENTIAL, host_by_credential

PATH = "/tunnel/"
LOST = "lost"  # code of a TunnelError, besides those of a RESET: the connection broke
BROKE = "The connection to the host broke."
MAX_CONNECTIONS = 4  # of a host: beyond, the oldest is closed with what runs on it
# Between two looks whether a connected host still has its credential.
CREDENTIAL_CHECK_SECONDS = scale_duration(60.0, least=2.0)
SEND_SECONDS = scale_duration(30.0, least=2.0)  # that a frame waits for a host to read
log = structlog.get_logger(__name__)


class TunnelError(Exception):
    """A request failed in the tunnel or at its endpoint.

    ``code`` is ``lost`` (the connection to the host broke) or that of the host's RESET:
    ``no_endpoint``, ``refused``, ``failed``, ``forbidden``, ``busy``.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class HostTunnels(Protocol):
    """Where the tunnels of connected hosts are found."""

    def of(self, host_id: str) -> Any:  # noqa: ANN401 -- a Tunnel, or None
        """Return the tunnel of a host, None while it is not connected."""


class TunnelResponse:
    """The response to a request; ``close`` it in any case."""

    def __init__(self, tunnel: "Tunnel", stream_id: int) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._tunnel = tunnel
        self._stream_id = stream_id
        self._window = SendWindow()
        self._inbox = Inbox(self._renew)
        self._head: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head.add_done_callback(_ignore_error)

    def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body as it arrives; the host sends on as it is consumed.

        Raises:
            TunnelError: it ends early.
        """
        return self._inbox.parts()

    async def close(self) -> None:
        """Cancel the request if its response is not complete; the endpoint stops then."""
        if self._tunnel.forget(self._stream_id):
            self._fail(protocol.CANCELLED, "The request was closed.")
            reset = protocol.reset_frame(self._stream_id, protocol.CANCELLED)
            self._tunnel.start(self._tunnel.send(reset))

    async def send(self, body: bytes) -> None:
        """Send the request's body, and wait for the head of its response.

        Raises:
            TunnelError: there is none.
        """
        sending = asyncio.create_task(self._send_body(body))
        sending.add_done_callback(_ignore_error)
        try:
            # A response may come before the request is sent, which then ends.
            await asyncio.wait((sending, self._head), return_when=asyncio.FIRST_COMPLETED)
            if not self._head.done():
                await sending
            await self._head
        finally:
            sending.cancel()

    async def _send_body(self, body: bytes) -> None:
        begin = 0
        while begin < len(body):
            end = begin + await self._window.take(len(body) - begin)
            await self._send(FrameType.BODY, body[begin:end])
            begin = end
        await self._send(FrameType.END)

    async def _send(self, frame_type: FrameType, payload: bytes = b"") -> None:
        await self._tunnel.send(protocol.encode(frame_type, self._stream_id, payload))

    async def _renew(self, credit: int) -> None:
        # Lost: the error comes with the next part.
        with contextlib.suppress(TunnelError):
            await self._tunnel.send(protocol.credit_frame(self._stream_id, credit))

    def take(self, frame: Frame) -> bool:
        """Take a frame of the host; return whether it is the last one.

        Raises:
            FrameError: it breaks the protocol.
        """
        match frame.type:
            case FrameType.DATA if self._head.done():
                self._inbox.feed(frame.payload)
            case FrameType.HEAD if not self._head.done():
                head = protocol.read_head(frame, ResponseHead)
                self.status, self.headers = head.status, protocol.raw_headers(head.headers)
                self._head.set_result(None)
            case FrameType.DONE if self._head.done():
                self._inbox.end()
            case FrameType.RESET:
                reset = protocol.read_head(frame, protocol.Reset)
                self._fail(reset.code, reset.message)
            case FrameType.WINDOW:
                self._window.renew(protocol.read_credit(frame))
            case _:
                raise FrameError(f"{frame.type.name} in the wrong place")
        return frame.type in (FrameType.DONE, FrameType.RESET)

    def lose(self) -> None:
        """Take the loss of the connection."""
        self._fail(LOST, BROKE)

    def _fail(self, code: str, words: str) -> None:
        """Let whoever waits for the head, or for the rest of the body, have an error."""
        error = TunnelError(code, words)
        if not self._head.done():
            self._head.set_exception(error)
        self._inbox.fail(error)


class Tunnel:
    """One connection of a host."""

    def __init__(self, host_id: str, send: Send) -> None:
        self.host_id = host_id
        self.is_lost = False
        self._send = send
        self._streams: dict[int, TunnelResponse] = {}
        self._last_id = 0
        self._opening = asyncio.Lock()
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def num_streams(self) -> int:
        """The number of open requests."""
        return len(self._streams)

    async def request(
        self, attempt_id: str, method: str, path: str, headers: Headers, body: bytes
    ) -> TunnelResponse:
        """Send a request to the endpoint of an attempt on this host; return at the head.

        ``path`` includes the query. Header fields of one connection alone, and the length, are
        set anew.

        Raises:
            TunnelError: there is no response.
        """
        if len(self._streams) >= MAX_STREAMS or self._last_id >= protocol.LAST_STREAM_ID:
            words = f"The host has {MAX_STREAMS} requests open, which is the limit."
            raise TunnelError(protocol.BUSY, words)
        head = _request_head(attempt_id, method, path, _sized(headers, body))
        async with self._opening:  # a host that is slow to read still sees ids in their order
            stream_id = self._last_id + 1
            await self.send(_open_frame(stream_id, head))
            self._last_id = stream_id
            response = self._streams[stream_id] = TunnelResponse(self, stream_id)
        try:
            await response.send(body)
        except BaseException:
            await response.close()
            raise
        return response

    async def listen(self, receive: Receive) -> None:
        """Take the host's frames until the connection ends.

        Raises:
            FrameError: the host breaks the protocol.
        """
        while (message := await receive())["type"] == "websocket.receive":
            frame = protocol.decode(message.get("bytes"))
            stream = self._streams.get(frame.stream_id)
            if stream is not None:
                if stream.take(frame):
                    self.forget(frame.stream_id)
            elif not 0 < frame.stream_id <= self._last_id:
                raise FrameError(f"no stream {frame.stream_id} was opened")

    async def send(self, frame: bytes) -> None:
        """Send a frame; wait while the host is slow to read.

        Raises:
            TunnelError: the connection broke.
        """
        try:
            if not self.is_lost:
                async with asyncio.timeout(SEND_SECONDS):
                    await self._send({"type": "websocket.send", "bytes": frame})
                return
        except TimeoutError:  # closed, so that the host connects anew
            self.lose()
            self.start(self.close(protocol.CLOSE_PROTOCOL_ERROR, "the host does not read"))
        except (OSError, RuntimeError):  # ASGI servers: gone, or closed by us
            self.lose()
        raise TunnelError(LOST, BROKE)

    async def close(self, code: int, reason: str) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError, RuntimeError):  # it is closed
            await self._send({"type": "websocket.close", "code": code, "reason": reason})

    def start(self, sending: Coroutine[Any, Any, None]) -> None:
        """Send or close without waiting for a host that is slow to read."""
        task = asyncio.create_task(sending)
        self._sending.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        _ignore_error(task)

    def forget(self, stream_id: int) -> bool:
        """End a stream; return whether it was open."""
        return self._streams.pop(stream_id, None) is not None

    def lose(self) -> None:
        """Let every open request have the loss of the connection."""
        self.is_lost = True
        for stream in self._streams.values():
            stream.lose()
        self._streams.clear()


def _ignore_error(done: asyncio.Future[None]) -> None:
    """Mark an error as seen: where it matters, the loss of the connection tells it too."""
    if not done.cancelled():
        done.exception()


def _request_head(attempt_id: str, method: str, path: str, headers: Headers) -> RequestHead:
    """Return the head of a request.

    Raises:
        TunnelError: the request is none that a host passes on.
    """
    if not protocol.is_passed_on(path):
        words = f"{path[:200]} is none of /v1/..., /health and /metrics."
        raise TunnelError(protocol.FORBIDDEN, words)
    try:
        fields = protocol.text_headers(headers)
        return RequestHead(attempt_id=attempt_id, method=method, path=path, headers=fields)
    except ValueError as error:
        raise TunnelError(protocol.FORBIDDEN, f"{error}") from None


def _open_frame(stream_id: int, head: RequestHead) -> bytes:
    """Return the frame of a request's head.

    Raises:
        TunnelError: it is too large.
    """
    try:
        return protocol.head_frame(FrameType.OPEN, stream_id, head)
    except FrameError as error:
        raise TunnelError(protocol.FORBIDDEN, f"{error}") from None


def _sized(headers: Headers, body: bytes) -> Headers:
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(len(body)).encode())] if body else kept


class Tunnels:
    """The connections of all hosts to this process, on one event loop."""

    def __init__(self) -> None:
        self._of_host: dict[str, list[Tunnel]] = {}

    def of(self, host_id: str) -> Tunnel | None:
        """Return a host's newest connection, or None."""
        newest_first = reversed(self._of_host.get(host_id, []))
        return next((tunnel for tunnel in newest_first if not tunnel.is_lost), None)

    async def serve(self, host_id: str, receive: Receive, send: Send) -> None:
        """Accept a host's WebSocket, and serve it until it ends.

        It takes the new requests of the host from now on; those that run on an older one stay
        there until it ends.
        """
        if (await receive())["type"] != "websocket.connect":
            return
        await send({"type": "websocket.accept"})
        tunnel = Tunnel(host_id, send)
        tunnels = self._of_host.setdefault(host_id, [])
        tunnels.append(tunnel)
        if len(tunnels) > MAX_CONNECTIONS:
            words = "the host opened too many connections"
            tunnels[0].start(tunnels[0].close(protocol.CLOSE_REPLACED, words))
        log.info("tunnel opened", host=host_id)
        try:
            await tunnel.listen(receive)
        except FrameError as error:
            log.warning("tunnel closed", host=host_id, reason=str(error))
            await tunnel.close(protocol.CLOSE_PROTOCOL_ERROR, protocol.close_reason(error))
        finally:
            tunnel.lose()
            tunnels.remove(tunnel)
            if not tunnels:
                self._of_host.pop(host_id, None)


# The ASGI application of the hosts' end.


tunnels = Tunnels()


async def authenticated_host(scope: Scope) -> str | None:
    """Return the id of the host whose credential a request has, or None.

    Raises:
        BusyProblem: the address sent too many that no host has.
    """
    client = scope.get("client")
    address = client[0] if client else ""
    left, wait = calls.rest(STRANGER, address)
    if not left:  # the database is not asked for one that has sent too many
        raise BusyProblem("too_many_calls", STRANGER.sentence(wait), retry_after_seconds=wait)
    host = await sync_to_async(host_by_credential)(_credential(scope))
    if host is None:
        calls.keep(STRANGER, address)
    return host.pk if host else None


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a host's WebSocket at ``PATH``."""
    reason, _ = UNKNOWN_CREDENTIAL
    try:
        host_id = await authenticated_host(scope)
    except BusyProblem as problem:
        host_id, reason = None, problem.code
    except DatabaseError:  # the host tries again
        host_id, reason = None, "unavailable"
    if host_id is None:
        await _refuse(receive, send, reason)
        return
    checking = asyncio.create_task(_close_when_revoked(scope, host_id, send))
    try:
        await tunnels.serve(host_id, receive, send)
    finally:
        checking.cancel()


async def _refuse(receive: Receive, send: Send, reason: str) -> None:
    """Close a WebSocket with code and reason, for which it has to be accepted."""
    await receive()
    await send({"type": "websocket.accept"})
    code = protocol.CLOSE_UNAUTHORIZED
    await send({"type": "websocket.close", "code": code, "reason": reason})


async def _close_when_revoked(scope: Scope, host_id: str, send: Send) -> None:
    """Close a connection soon after its credential was revoked or replaced."""
    is_known = True
    while is_known:
        await asyncio.sleep(CREDENTIAL_CHECK_SECONDS)
        with contextlib.suppress(DatabaseError):  # while it does not answer, nobody is revoked
            host = await sync_to_async(host_by_credential)(_credential(scope))
            is_known = host is not None and host.pk == host_id
    with contextlib.suppress(OSError, RuntimeError):
        reason, _ = UNKNOWN_CREDENTIAL
        code = protocol.CLOSE_UNAUTHORIZED
        await send({"type": "websocket.close", "code": code, "reason": reason})


def _credential(scope: Scope) -> str:
    """Return the bearer token of a request, or an empty text."""
    for name, value in scope.get("headers", ()):
        scheme, _, token = value.decode("latin-1").partition(" ")
        if name == b"authorization" and scheme.lower() == "bearer":
            return str(token.strip())
    return ""
