"""Unfinished requests of strangers: their memory, their time, and the calls of their address."""

import asyncio
import resource
from functools import partial

import pytest
import uvicorn
from asgiref.sync import async_to_sync

from tests.webapp.api.test_agents_api import bearer, knock, said
from webapp import asgi
from webapp.api import agents
from webapp.core import connections, middleware
from webapp.core.pace import STRANGER
from webapp.core.problems import send_answer

KIB = 1024


class Client:
    """A request that sends parts of its body when it is told to, and what it was answered."""

    def __init__(self, application, *headers, address="192.0.2.1", path="/login/") -> None:
        self._parts: asyncio.Queue[dict] = asyncio.Queue()
        self.sent: list[dict] = []
        scope = {
            "type": "http", "method": "POST", "path": path, "headers": list(headers),
            "client": (address, 1),
        }  # fmt: skip
        self.serving = asyncio.create_task(application(scope, self._parts.get, self._send))

    async def _send(self, message: dict) -> None:
        self.sent.append(message)

    async def put(self, num_bytes: int, *, is_last: bool = False) -> "Client":
        await self._parts.put(
            {"type": "http.request", "body": bytes(num_bytes), "more_body": not is_last}
        )
        for _ in range(20):
            await asyncio.sleep(0)
        return self

    async def status(self) -> int:
        """Stop sending, and return the status of the answer."""
        await self._parts.put({"type": "http.disconnect"})
        await self.serving
        return self.sent[0]["status"]


async def read_whole(_scope, receive, send) -> None:
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.request":
        await send_answer(send, 200, [], b"")


async def is_known(scope) -> bool:
    return (b"authorization", b"known") in scope["headers"]


@pytest.fixture
def application(monkeypatch):
    monkeypatch.setattr(middleware, "FREE_BYTES", 16 * KIB)
    monkeypatch.setattr(middleware, "ADDRESS_BYTES", 100 * KIB)
    monkeypatch.setattr(middleware, "STRANGERS_BYTES", 300 * KIB)
    return middleware.limited(read_whole, lambda send: send, is_known)


@async_to_sync
async def half_sent_bodies(application) -> None:
    make = partial(Client, application)
    first = [await make(address=f"192.0.2.{n}").put(96 * KIB) for n in range(4)]
    assert [client.sent for client in first[:3]] == [[], [], []]
    assert await first[3].status() == 429  # all strangers together
    assert await (await make().put(64 * KIB)).status() == 429  # their address
    assert await (await make(address="192.0.2.9").put(80 * KIB)).status() == 429
    for header in ([], [(b"authorization", b"invented")]):
        small = make(*header)
        assert await (await small.put(15 * KIB, is_last=True)).status() == 200  # a login
        assert await (await make(*header).put(90 * KIB)).status() == 429
    known = make((b"authorization", b"known"))
    assert await (await known.put(900 * KIB, is_last=True)).status() == 200
    for client in first[:3]:
        await client.put(0, is_last=True)
        assert await client.status() == 200
    again = make()
    await again.put(96 * KIB)
    assert again.sent == []
    again.serving.cancel()
    await asyncio.gather(again.serving, return_exceptions=True)
    assert await (await make().put(96 * KIB, is_last=True)).status() == 200


def test_half_sent_bodies_of_strangers_share_a_memory_and_hold_up_nobody_else(application):
    half_sent_bodies(application)


@async_to_sync
async def late_bodies(application) -> None:
    stranger = await Client(application).put(10)
    known = await Client(application, (b"authorization", b"known")).put(10)
    whole = await Client(application).put(10, is_last=True)
    async with asyncio.timeout(20):
        await stranger.serving
    assert (stranger.sent[0]["status"], whole.sent[0]["status"]) == (408, 200)
    assert b"log in first" in stranger.sent[1]["body"].lower()
    await asyncio.sleep(0.1)
    await known.put(10, is_last=True)
    assert await known.status() == 200


def test_a_body_that_does_not_arrive_ends_the_request_of_a_stranger_alone(
    application, monkeypatch
):
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.05)
    monkeypatch.setattr("webapp.core.problems.LINGER_SECONDS", 0.05)
    late_bodies(application)


@pytest.mark.django_db(databases="__all__")
def test_invented_credentials_of_heartbeats_are_counted_by_address_and_their_bodies_not_read(
    credential, monkeypatch
):
    monkeypatch.setattr("webapp.core.problems.LINGER_SECONDS", 0.0)
    looked_up: list[str] = []
    find = agents.host_by_credential
    monkeypatch.setattr(
        agents, "host_by_credential", lambda sent: (looked_up.append(sent), find(sent))[1]
    )
    monkeypatch.setattr(agents, "_known_until", {})
    monkeypatch.setattr(agents, "_body", None)  # whoever reads a body fails
    monkeypatch.setattr(agents, "STRANGER", STRANGER._replace(per_second=1e-6, burst=7))
    statuses = [knock(said(), bearer(f"invented {n}")).status for n in range(9)]
    assert statuses == [401] * 7 + [429] * 2
    monkeypatch.undo()
    for _ in range(3):
        assert knock(said(), bearer(credential)).status == 200
    assert set(looked_up[-3:]) != {credential}


@pytest.mark.django_db(databases="__all__")
def test_a_known_host_is_looked_up_once_until_it_is_refused(credential, host, monkeypatch):
    looked_up: list[str] = []
    find = agents.host_by_credential
    monkeypatch.setattr(
        agents, "host_by_credential", lambda sent: (looked_up.append(sent), find(sent))[1]
    )
    for expected, num_looked_up in ((200, 1), (200, 1)):
        assert knock(said(), bearer(credential)).status == expected
        assert len(looked_up) == num_looked_up
    type(host).objects.update(credential_hash="")
    for _ in range(2):
        answer = knock(said(), bearer(credential))
        assert (answer.status, answer.body["code"]) == (401, "unknown_credential")
    assert len(looked_up) == 2


# Headers that do not arrive: of connections to a real uvicorn.


async def exchange(port: int, text: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    async with asyncio.timeout(20):
        found = await reader.read()
    writer.close()
    return found


async def answer_late(scope, receive, send) -> None:
    if scope["type"] == "http":
        await asyncio.sleep(0.3 if scope["path"] == "/late" else 0)
        await send_answer(send, 200, [], b"there")


@async_to_sync
async def half_sent_headers() -> None:
    config = uvicorn.Config(
        answer_late, http=connections.HeaderDeadlineProtocol, lifespan="off", log_config=None,
    )  # fmt: skip
    config.load()
    state = uvicorn.server.ServerState()
    serve = partial(connections.HeaderDeadlineProtocol, config, state, {})
    server = await asyncio.get_running_loop().create_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    start = b"GET %s HTTP/1.1\r\nHost: x\r\n"
    whole = start + b"Connection: close\r\n\r\n"
    assert await exchange(port, b"") == b""
    assert await exchange(port, start % b"/") == b""
    assert (await exchange(port, whole % b"/late")).endswith(b"there")
    kept_alive = await exchange(port, start % b"/late" + b"\r\n" + start % b"/")
    assert kept_alive.count(b"there") == 1  # the answer is whole before the connection ends
    server.close()
    await server.wait_closed()


def test_headers_that_do_not_arrive_end_the_connection(monkeypatch):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.1)
    half_sent_headers()


def test_the_web_process_may_open_as_many_files_as_the_system_permits(monkeypatch):
    chosen: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, limits: chosen.append(limits))
    for limits in ((1024, 524_288), (1024, 4096), (1024, resource.RLIM_INFINITY), (9, 9)):
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, limits=limits: limits)
        asgi.raise_file_limit()
    most = connections.MOST_FILES
    assert chosen == [(most, 524_288), (4096, 4096), (most, resource.RLIM_INFINITY)]
