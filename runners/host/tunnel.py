"""The host's end of the tunnels: ``python -m runners.host.tunnel GATEWAY...``, the agent's child.

It keeps one WebSocket to each gateway and passes the requests that arrive on it to the endpoints
of this host's attempts. The frames are those of ``runners.shared.tunnel``.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from runners.host.companions import AGENT_VARIABLE, HOST_DIR_VARIABLE
from runners.launchers.attempts import ID, AttemptFolder, Verdict
from runners.shared import tunnel as protocol
from runners.shared.addresses import in_url, is_loopback, is_this_machine, proxy_of
from runners.shared.config import Credential, HostConfigError, HostDir
from runners.shared.timing import TUNNEL_PING_SECONDS, TUNNEL_PONG_SECONDS, scale_duration
from runners.shared.tunnel import (
    MAX_FRAME_BYTES,
    MAX_STREAMS,
    Frame,
    FrameError,
    FrameType,
    Inbox,
    RequestHead,
    ResponseHead,
    SendWindow,
)
from runners.supervision import procfs
from runners.supervision.child import die_with

FIRST_REST_SECONDS = scale_duration(0.2)
LONGEST_REST_SECONDS = scale_duration(10.0, least=0.5)
STEADY_SECONDS = scale_duration(10.0)  # a connection that lasted this long resets the backoff
CLOSE_SECONDS = 1.0  # for the gateway's answer to a close
KNOWN_SECONDS = 1.0  # for which the address of an attempt's endpoint is not read again
# Engines on uvicorn or cpp-httplib close idle connections after 5 s.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=1, keepalive_expiry=4.0)
MAX_IDLE = 64  # connections that are kept for the next requests
# Of an endpoint: an answer may take as long as it takes.
TIMEOUTS = {"connect": 10.0, "read": None, "write": None, "pool": None}
UNSPECIFIED = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - asked at loopback

log = logging.getLogger(__name__)


class RefusalError(Exception):
    """A request is not passed on; ``code`` is that of the RESET."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class KnownEndpoint(NamedTuple):
    """The base URL of an attempt's endpoint, and until when it counts (monotonic)."""

    url: str
    until: float


class Endpoints:
    """The endpoints of this host's running attempts, by what the attempts reported."""

    def __init__(self, host_dir: HostDir) -> None:
        self._attempts = host_dir.attempts
        self._has_nodes = host_dir.config().scheduler is not None
        self._boot_id = procfs.boot_id()
        self._known: dict[str, KnownEndpoint] = {}
        self._reading: dict[str, asyncio.Future[str]] = {}  # by attempt id: one for all requests

    async def url_of(self, attempt_id: str) -> str:
        """Return the base URL of an attempt's endpoint, such as ``http://127.0.0.1:8001``.

        Raises:
            RefusalError: the attempt does not run here, or has no endpoint yet.
        """
        instant = time.monotonic()
        known = self._known.get(attempt_id)
        if known is None or known.until < instant:
            self._known = {key: each for key, each in self._known.items() if each.until > instant}
            if attempt_id not in self._reading:
                self._reading[attempt_id] = self._start_reading(attempt_id)
            url = await asyncio.shield(self._reading[attempt_id])
            known = self._known[attempt_id] = KnownEndpoint(url, instant + KNOWN_SECONDS)
        return known.url

    def forget(self, attempt_id: str) -> None:
        """Read an attempt's address again at its next request."""
        self._known.pop(attempt_id, None)

    def _start_reading(self, attempt_id: str) -> asyncio.Future[str]:
        reading = asyncio.ensure_future(asyncio.to_thread(self._read, attempt_id))
        reading.add_done_callback(lambda _: self._reading.pop(attempt_id))
        return reading

    def _read(self, attempt_id: str) -> str:
        folder = AttemptFolder(self._attempts / attempt_id)
        is_here = bool(ID.fullmatch(attempt_id)) and folder.path.is_dir()
        # The lock alone may be held by another process that looks whether it is held.
        is_running = is_here and folder.verdict(self._boot_id) is Verdict.RUNNING
        if not is_running or folder.exit_record():
            raise RefusalError(protocol.NO_ENDPOINT, "The attempt does not run on this host.")
        body = folder.endpoint()
        if body is None:
            raise RefusalError(protocol.NO_ENDPOINT, "The attempt's endpoint is not ready.")
        # A job reports its address itself: it must not send the gateway's requests elsewhere.
        if not (self._has_nodes or is_this_machine(body.host)):
            words = f"The attempt reported {body.host}, which is not this host's."
            raise RefusalError(protocol.NO_ENDPOINT, words)
        return f"http://{in_url(UNSPECIFIED.get(body.host, body.host))}:{body.port}"


class Transports:
    """HTTP connections to endpoints, each for one request at a time.

    A pool of httpx looks at all its connections at every request: beside 500 open ones the first
    byte came after 3.7 ms instead of 0.9.
    """

    def __init__(self) -> None:
        self._context = httpx.create_ssl_context(trust_env=False)  # unused, but slow to make
        self._idle: list[httpx.AsyncHTTPTransport] = []

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[httpx.AsyncHTTPTransport]:
        """Lend the connection that was used last, or a new one."""
        transport = self._idle.pop() if self._idle else self._make()
        try:
            yield transport
        finally:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(transport)
            else:
                await transport.aclose()

    async def aclose(self) -> None:
        """Close what is idle."""
        while self._idle:
            await self._idle.pop().aclose()

    def _make(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(verify=self._context, trust_env=False, limits=LIMITS)


class Stream:
    """One request of the gateway and its response."""

    def __init__(self, connection: "Connection", stream_id: int) -> None:
        self._connection = connection
        self._stream_id = stream_id
        self._window = SendWindow()
        self._inbox = Inbox(self._renew)
        self._serving: asyncio.Task[None] | None = None

    def start(self, head: RequestHead, endpoints: Endpoints, transports: Transports) -> None:
        """Answer the request in a task of its own."""
        self._serving = asyncio.create_task(self._serve(head, endpoints, transports))

    def take(self, frame: Frame) -> None:
        """Take a frame of the gateway.

        Raises:
            FrameError: it breaks the protocol.
        """
        match frame.type:
            case FrameType.BODY:
                self._inbox.feed(frame.payload)
            case FrameType.END:
                self._inbox.end()
            case FrameType.WINDOW:
                self._window.renew(protocol.read_credit(frame))
            case FrameType.RESET:
                self.cancel()
            case _:
                raise FrameError(f"{frame.type.name} in the wrong place")

    def cancel(self) -> asyncio.Task[None] | None:
        """Close the request to the endpoint at once; return the task that ends with it."""
        if self._serving:
            self._serving.cancel()
        return self._serving

    async def _serve(
        self, head: RequestHead, endpoints: Endpoints, transports: Transports
    ) -> None:
        code, words = "", ""
        try:
            await self._relay(await self._request(head, endpoints), transports)
        except RefusalError as refusal:
            code, words = refusal.code, str(refusal)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            endpoints.forget(head.attempt_id)
            code, words = protocol.REFUSED, f"The endpoint does not accept connections: {error}"
        except (httpx.HTTPError, FrameError) as error:
            code, words = protocol.FAILED, f"The endpoint broke off: {error}"
        except ConnectionClosed:
            return
        except Exception as error:
            log.exception("a request failed")
            code, words = protocol.FAILED, f"{type(error).__name__} in the host's tunnel"
        finally:
            self._connection.forget(self._stream_id)
        if code:
            await self._connection.reset(self._stream_id, code, words)

    async def _request(self, head: RequestHead, endpoints: Endpoints) -> httpx.Request:
        if not protocol.is_passed_on(head.path):
            words = f"{head.path[:200]} is none of /v1/..., /health and /metrics."
            raise RefusalError(protocol.FORBIDDEN, words)
        url = httpx.URL(await endpoints.url_of(head.attempt_id))
        headers = protocol.raw_headers(head.headers)
        has_body = any(name == b"content-length" for name, _ in headers)
        return httpx.Request(
            head.method,
            url.copy_with(raw_path=head.path.encode()),
            headers=[field for field in headers if field[0] != b"host"],
            content=self._inbox.parts() if has_body else None,
            extensions={"timeout": TIMEOUTS},
        )

    async def _relay(self, request: httpx.Request, transports: Transports) -> None:
        async with transports.one() as transport:
            response = await transport.handle_async_request(request)
            try:
                await self._pass_on(response)
            finally:
                await response.aclose()

    async def _pass_on(self, response: httpx.Response) -> None:
        fields = protocol.text_headers(response.headers.raw)
        head = ResponseHead(status=response.status_code, headers=fields)
        await self._send(protocol.head_frame(FrameType.HEAD, self._stream_id, head))
        async for part in response.aiter_raw():
            begin = 0
            while begin < len(part):
                end = begin + await self._window.take(len(part) - begin)
                data = part[begin:end]
                await self._send(protocol.encode(FrameType.DATA, self._stream_id, data))
                begin = end
        await self._send(protocol.encode(FrameType.DONE, self._stream_id))

    async def _renew(self, credit: int) -> None:
        await self._send(protocol.credit_frame(self._stream_id, credit))

    async def _send(self, frame: bytes) -> None:
        await self._connection.send(frame)


class Connection:
    """One WebSocket to a gateway and the streams on it."""

    def __init__(
        self, socket: ClientConnection, endpoints: Endpoints, transports: Transports
    ) -> None:
        self._socket = socket
        self._endpoints = endpoints
        self._transports = transports
        self._streams: dict[int, Stream] = {}
        self._last_id = 0
        self._refusing: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Serve the gateway's requests until the connection ends, then cancel what is open.

        Raises:
            ConnectionClosed: how it ended.
            FrameError: the gateway breaks the protocol.
        """
        try:
            while True:
                self._take(protocol.decode(await self._socket.recv()))
        except FrameError as error:
            await self._socket.close(protocol.CLOSE_PROTOCOL_ERROR, protocol.close_reason(error))
            raise
        finally:
            serving = [stream.cancel() for stream in self._streams.values()]
            await asyncio.gather(*filter(None, serving), return_exceptions=True)

    async def send(self, frame: bytes) -> None:
        """Send a frame; wait while the gateway is slow to read."""
        await self._socket.send(frame)

    async def reset(self, stream_id: int, code: str, words: str) -> None:
        """End a stream early; the end of the connection ends it too."""
        try:
            await self.send(protocol.reset_frame(stream_id, code, words))
        except ConnectionClosed:
            return

    def forget(self, stream_id: int) -> None:
        """End a stream."""
        self._streams.pop(stream_id, None)

    def _take(self, frame: Frame) -> None:
        if frame.type is FrameType.OPEN:
            self._open(frame)
        elif stream := self._streams.get(frame.stream_id):
            stream.take(frame)
        elif not 0 < frame.stream_id <= self._last_id:
            raise FrameError(f"no stream {frame.stream_id} was opened")

    def _open(self, frame: Frame) -> None:
        if frame.stream_id <= self._last_id:
            raise FrameError(f"stream {frame.stream_id} was opened before")
        self._last_id = frame.stream_id
        head = protocol.read_head(frame, RequestHead)
        if len(self._streams) >= MAX_STREAMS:
            words = f"The host has {MAX_STREAMS} requests open, which is the limit."
            refusing = asyncio.create_task(self.reset(frame.stream_id, protocol.BUSY, words))
            self._refusing.add(refusing)
            refusing.add_done_callback(self._refusing.discard)
            return
        stream = self._streams[frame.stream_id] = Stream(self, frame.stream_id)
        stream.start(head, self._endpoints, self._transports)


# Connections that are kept.


def address_of(gateway: str, server: str) -> str:
    """Return the WebSocket URL of a gateway; one that begins with "/" is at the server's address.

    Raises:
        ValueError: it is no such URL, or its connection is less safe than that to the server.
    """
    if gateway.startswith("/"):
        scheme, _, rest = server.rstrip("/").partition("://")
        return f"{'wss' if scheme == 'https' else 'ws'}://{rest}{gateway}"
    parts = urlsplit(gateway)
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise ValueError(f"the gateway's address {gateway!r} is not ws:// or wss:// and a name")
    is_open = parts.scheme == "ws" and not is_loopback(parts.hostname)
    if is_open and server.startswith("https:"):
        raise ValueError(f"{gateway} has no TLS, unlike {server}: it does not get the credential")
    return gateway


class Link:
    """Keeps a connection to one gateway."""

    def __init__(
        self,
        address: str,
        credential: str,
        endpoints: Endpoints,
        transports: Transports,
    ) -> None:
        self._address = address
        self._credential = credential
        self._endpoints = endpoints
        self._transports = transports
        self._rest_seconds = FIRST_REST_SECONDS
        self._last_words = ""

    async def keep(self) -> None:
        """Connect, serve, and connect again after a pause, until cancelled."""
        while True:
            began_at = time.monotonic()
            try:
                await self._serve_once()
            except (OSError, ValueError, WebSocketException, FrameError) as error:
                self._log(str(error))
            if time.monotonic() - began_at > STEADY_SECONDS:
                self._rest_seconds = FIRST_REST_SECONDS
            await asyncio.sleep(self._rest_seconds * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            self._rest_seconds = min(self._rest_seconds * 2, LONGEST_REST_SECONDS)

    async def _serve_once(self) -> None:
        # Proxies and certificates are those of the agent's own requests to the server.
        proxy = proxy_of(f"http{self._address.removeprefix('ws')}", os.environ)
        socket = connect(
            self._address,
            additional_headers={"Authorization": f"Bearer {self._credential}"},
            compression=None,
            proxy=proxy.url if proxy else None,
            ssl=_certificates() if self._address.startswith("wss:") else None,
            max_size=MAX_FRAME_BYTES,
            close_timeout=CLOSE_SECONDS,
            ping_interval=TUNNEL_PING_SECONDS,
            ping_timeout=TUNNEL_PONG_SECONDS,
        )
        async with socket as connected:
            log.info("connected to %s", self._address)
            self._last_words = ""
            try:
                await Connection(connected, self._endpoints, self._transports).serve()
            except asyncio.CancelledError:
                await connected.close(protocol.CLOSE_GOING_AWAY)
                raise

    def _log(self, words: str) -> None:
        if words != self._last_words:
            log.warning("%s: %s; it is tried again", self._address, words)
        self._last_words = words


def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=True)


async def keep_links(host_dir: HostDir, credential: Credential, gateways: Sequence[str]) -> None:
    """Keep a connection to each gateway until cancelled; one with an unfit address is left out."""
    endpoints = Endpoints(host_dir)
    async with contextlib.aclosing(Transports()) as transports, asyncio.TaskGroup() as group:
        for gateway in gateways:
            try:
                address = address_of(gateway, credential.server)
            except ValueError as error:
                log.warning("%s", error)
                continue
            link = Link(address, credential.credential, endpoints, transports)
            group.create_task(link.keep())


async def _run(host_dir: HostDir, gateways: Sequence[str]) -> None:
    keeping = asyncio.ensure_future(keep_links(host_dir, host_dir.credential(), gateways))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, keeping.cancel)
    await asyncio.wait([keeping])
    if not keeping.cancelled():
        keeping.result()


def main() -> int:
    """Keep the tunnels of the agent that started this process, until a signal or its end."""
    die_with(int(os.environ[AGENT_VARIABLE]))
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("websockets").setLevel(logging.WARNING)
    try:
        asyncio.run(_run(HostDir(Path(os.environ[HOST_DIR_VARIABLE])), sys.argv[1:]))
    except HostConfigError as error:
        log.error("%s", error)  # noqa: TRY400 - the sentence says all
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
