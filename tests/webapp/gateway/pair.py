"""Both ends of a tunnel in one event loop, over real sockets, and an endpoint that shows all."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, nullcontext
from functools import partial
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from runners.host.tunnel import keep_links
from runners.launchers.attempts import AttemptFolder
from runners.shared.config import Credential, HostDir
from runners.supervision import child
from webapp.core.connections import WEBSOCKETS, HeaderDeadlineProtocol
from webapp.gateway.tunnels import Tunnel, TunnelResponse, Tunnels

HOST, ATTEMPT = "h1", "a1"
MUCH_BYTES = 16 * 1024**2  # more than all windows and socket buffers


class Endpoint:
    """An ASGI application: the last part of the path says what a request does."""

    def __init__(self) -> None:
        self.chunks: asyncio.Queue[bytes] = asyncio.Queue()  # of steps; b"" is the end
        self.num_waiting = 0
        self.is_left = asyncio.Event()  # by a client of steps
        self.num_sent = 0  # bytes of much
        self.scopes: list[dict] = []

    async def __call__(self, scope, receive, send) -> None:
        self.scopes.append(scope)
        await getattr(self, scope["path"].rpartition("/")[2])(receive, send)

    async def echo(self, receive, send) -> None:
        body, is_more = b"", True
        while is_more:
            message = await receive()
            body, is_more = body + message["body"], message["more_body"]
        fields = [(b"x-kept", b"\xe4"), (b"connection", b"x-hop"), (b"x-hop", b"1")]
        await send({"type": "http.response.start", "status": 418, "headers": fields})
        await send({"type": "http.response.body", "body": body})

    async def steps(self, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        leaving = asyncio.ensure_future(_until_left(receive))
        chunk = b"first"
        while chunk:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            stepping = asyncio.ensure_future(self.chunks.get())
            await asyncio.wait((leaving, stepping), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                stepping.cancel()
                self.is_left.set()
                return
            chunk = stepping.result()
        leaving.cancel()
        await send({"type": "http.response.body"})

    async def waits(self, receive, _send) -> None:
        await _until_left(receive)
        self.is_left.set()

    async def much(self, _receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(MUCH_BYTES // 65536):
            await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
            self.num_sent += 65536
        await send({"type": "http.response.body"})

    async def breaks(self, _receive, send) -> None:
        fields = [(b"content-length", b"9")]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ConnectionError


async def _until_left(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Server:
    """An application behind uvicorn's protocol."""

    def __init__(self, state: uvicorn.server.ServerState, port: int) -> None:
        self._state = state
        self.port = port

    def cut(self) -> None:
        """Break every connection, without a word."""
        for connection in list(self._state.connections):
            connection.transport.abort()


@asynccontextmanager
async def served(application: Callable, protocol: type = H11Protocol) -> AsyncIterator[Server]:
    config = uvicorn.Config(
        application, lifespan="off", log_config=None, access_log=False, **WEBSOCKETS
    )
    config.load()
    state = uvicorn.server.ServerState()
    listening = await asyncio.get_running_loop().create_server(
        partial(protocol, config, state, {}), "127.0.0.1", 0
    )
    server = Server(state, listening.sockets[0].getsockname()[1])
    try:
        yield server
    finally:
        server.cut()
        listening.close()
        await listening.wait_closed()
        await asyncio.gather(*state.tasks, return_exceptions=True)


class Wire:
    """Passes bytes between a host and its gateway; without power it is silent."""

    def __init__(self) -> None:
        self.has_power = asyncio.Event()
        self.has_power.set()
        self._passing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def to(self, port: int) -> AsyncIterator[int]:
        """Yield the port at which the host reaches what listens at ``port``."""

        async def join(near: asyncio.StreamReader, away: asyncio.StreamWriter) -> None:
            far, out = await asyncio.open_connection("127.0.0.1", port)
            self._passing |= {
                asyncio.create_task(self._pass(*way)) for way in ((near, out), (far, away))
            }

        async with await asyncio.start_server(join, "127.0.0.1", 0) as listening:
            yield listening.sockets[0].getsockname()[1]
            for each in self._passing:
                each.cancel()
            await asyncio.gather(*self._passing, return_exceptions=True)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with closing(sink):
            while data := await source.read(65536):
                await self.has_power.wait()
                sink.write(data)
            await self.has_power.wait()  # nor is a close heard


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - of the other end, or of the kernel
            await asyncio.sleep(0.005)


class Socket:
    """A WebSocket at an ASGI application, by its messages."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[dict] = asyncio.Queue()
        self.sent: list[dict] = []
        self.is_writable = asyncio.Event()  # the other end reads
        self.is_writable.set()
        self.incoming.put_nowait({"type": "websocket.connect"})

    async def send(self, message: dict) -> None:
        await self.is_writable.wait()
        self.sent.append(message)
        if message["type"] == "websocket.close":
            self.incoming.put_nowait({"type": "websocket.disconnect", "code": message["code"]})

    def say(self, frame: bytes) -> None:
        self.incoming.put_nowait({"type": "websocket.receive", "bytes": frame})

    @property
    def closed_with(self) -> tuple[int, str]:
        return self.sent[-1]["code"], self.sent[-1]["reason"]


class Pair:
    """A gateway, a host that is connected to it, and an endpoint of an attempt on the host."""

    def __init__(self, host_dir: HostDir) -> None:
        self.host_dir = host_dir
        self.tunnels = Tunnels()
        self.endpoint = Endpoint()
        self.gateway: Server | None = None

    @property
    def tunnel(self) -> Tunnel:
        return self.tunnels.of(HOST)

    async def ask(
        self, path: str, body: bytes = b"", attempt_id: str = ATTEMPT, headers=(), method="POST"
    ) -> TunnelResponse:
        async with asyncio.timeout(30):
            return await self.tunnel.request(attempt_id, method, path, headers, body)


@asynccontextmanager
async def paired(folder: Path, wire: Wire | None = None) -> AsyncIterator[Pair]:
    host_dir = HostDir(folder)
    host_dir.make()
    pair = Pair(host_dir)
    attempt = AttemptFolder(host_dir.attempts / ATTEMPT)
    attempt.path.mkdir()

    async def gateway(scope, receive, send) -> None:
        await pair.tunnels.serve(HOST, receive, send)

    async with (
        served(pair.endpoint) as endpoint,
        served(gateway, HeaderDeadlineProtocol) as site,
        wire.to(site.port) if wire else nullcontext(site.port) as port,
    ):
        pair.gateway = site
        address = {"host": "127.0.0.1", "port": endpoint.port, "model": "m", "has_keys": False}
        child.write_json(attempt.path / child.ENDPOINT, address)
        credential = Credential(
            server=f"http://127.0.0.1:{port}", host_id=HOST, name="test host",
            credential="host-credential", command_key="k", redis_url=None, beat_seconds=1.0,
        )  # fmt: skip
        with child.locked(attempt.lock):
            keeping = asyncio.ensure_future(keep_links(host_dir, credential, ["/tunnel/"]))
            try:
                await until(lambda: pair.tunnel)
                yield pair
            finally:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
