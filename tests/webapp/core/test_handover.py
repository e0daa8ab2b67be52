"""Two servers at one address: who answers what, and what becomes of a connection between them."""

import asyncio
import socket
from contextlib import suppress
from functools import partial

import uvicorn
from websockets.asyncio.client import connect

from webapp.core import handover
from webapp.core.handover import Channel, SharedProtocol, SharingServer, Side

LARGE = bytes(300_000)  # more than goes with a descriptor


def answering(name: str):
    """An application that says who it is, what came, and from which address."""

    async def application(scope, receive, send):
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.send", "text": name})
            return
        size, is_more = 0, True
        while is_more:
            message = await receive()
            size, is_more = size + len(message.get("body", b"")), message.get("more_body")
        body = f"{name} {scope['path']} {size} {scope['client'][0]}".encode()
        length = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": body})

    return application


class Pair:
    """The two servers in one event loop; ``begin`` starts one, ``end`` lets it end."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.servers: list[SharingServer] = []

    async def begin(self, name: str) -> SharingServer:
        side = Side(Channel(self.ends[name == "gateway"]), name == "gateway")
        config = uvicorn.Config(
            answering(name), http=partial(SharedProtocol, side=side), lifespan="off",
            log_config=None, timeout_graceful_shutdown=1,
        )  # fmt: skip
        config.load()
        server = SharingServer(config, side)
        server.lifespan = config.lifespan_class(config)
        await server.startup([self.listening.dup()])
        self.servers.append(server)
        return server

    async def __aenter__(self) -> "Pair":
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self.servers:
            if server.started:
                await self.end(server)
        for each in (self.listening, *self.ends):
            each.close()

    async def end(self, server: SharingServer) -> None:
        server.started = False
        await server.shutdown([])

    async def ask(self, connection, path: str, body: bytes = b"", size: int = 1 << 20) -> str:
        """Send a request in parts of a size; return the answer's body."""
        reader, writer = connection
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        sent = head.encode() + body
        for begin in range(0, len(sent), size):
            writer.write(sent[begin : begin + size])
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            found = await reader.readuntil(b"\r\n\r\n")
            length = int(found.lower().partition(b"content-length: ")[2].split()[0])
            return (await reader.readexactly(length)).decode()

    async def connected(self):
        return await asyncio.open_connection("127.0.0.1", self.port)


def law(run):
    asyncio.run(run())


def test_each_request_of_a_connection_is_answered_by_its_process():
    async def run():
        async with Pair() as pair:
            for name in ("web", "gateway"):
                await pair.begin(name)
            for _ in range(8):  # either of the two accepts
                connection = await pair.connected()
                for path, name, body in (
                    ("/v1/models", "gateway", b"x"),
                    ("/jobs/?next=/v1/", "web", b""),
                    ("/v1?x=1", "gateway", LARGE),
                    ("/v1x", "web", LARGE),
                    ("http://site/v1/models", "gateway", b""),
                ):
                    said = await pair.ask(connection, path, body)
                    found = path.removeprefix("http://site").partition("?")[0]
                    assert said == f"{name} {found} {len(body)} 127.0.0.1", path
                connection[1].close()
            connection = await pair.connected()
            assert (await pair.ask(connection, "/v1/a", b"abc", size=1)).startswith("gateway")
            assert (await pair.ask(connection, "/a", b"abc", size=1)).startswith("web")
            connection[1].close()
            for path, name in (("/tunnel/", "gateway"), ("/live/", "web")):
                async with connect(f"ws://127.0.0.1:{pair.port}{path}") as socket_:
                    assert await socket_.recv() == name

    law(run)


def test_what_is_handed_over_outlives_who_gave_it_and_waits_for_who_takes_it():
    async def run():
        async with Pair() as pair:
            web = await pair.begin("web")
            connection = await pair.connected()
            asking = asyncio.create_task(pair.ask(connection, "/v1/a"))
            await asyncio.sleep(0.05)
            assert not asking.done()
            await pair.begin("gateway")
            assert await asking == "gateway /v1/a 0 127.0.0.1"
            await pair.end(web)
            assert await pair.ask(connection, "/v1/b") == "gateway /v1/b 0 127.0.0.1"
            connection[1].close()

    law(run)


def test_when_too_many_wait_for_the_other_process_a_client_is_told(monkeypatch):
    monkeypatch.setattr(handover, "HANDOVER_SECONDS", 0.2)

    async def run():
        async with Pair() as pair:
            await pair.begin("web")
            with suppress(BlockingIOError):
                while True:
                    pair.ends[0].send(bytes(1000))
            connection = await pair.connected()
            assert await pair.ask(connection, "/v1/a") == handover.NOT_TAKEN[-65:].decode()
            assert await connection[0].read() == b""
            connection[1].close()

    law(run)


def test_a_request_of_the_other_process_that_is_sent_ahead_ends_the_connection():
    async def run():
        async with Pair() as pair:
            await pair.begin("web")
            reader, writer = await pair.connected()
            requests = (("/a", "one"), ("/v1/b", "two"), ("/c", "three"))
            writer.write(
                b"".join(
                    f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}"
                    .encode()
                    for path, body in requests
                )
            )  # fmt: skip
            async with asyncio.timeout(30):
                answers = (await reader.read()).decode()
            assert answers.count("HTTP/1.1 200") == 1
            assert "web /a 3 " in answers
            writer.close()

    law(run)


def test_a_client_that_does_not_read_its_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(handover, "HANDOVER_SECONDS", 0.2)

    async def run():
        async with Pair() as pair:
            server = await pair.begin("web")
            reader, writer = await pair.connected()
            await pair.ask((reader, writer), "/a")
            (connection,) = server.server_state.connections
            monkeypatch.setattr(type(connection.transport), "get_write_buffer_size", lambda _: 1)
            writer.write(b"GET /v1/b HTTP/1.1\r\nhost: x\r\n\r\n")
            with suppress(ConnectionError):
                async with asyncio.timeout(30):
                    assert await reader.read() == b""
            writer.close()

    law(run)
