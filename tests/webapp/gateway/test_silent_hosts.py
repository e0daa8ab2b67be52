"""A host that is gone without a word in the middle of answers: nothing closes its sockets."""

import asyncio
import json
import signal
from dataclasses import replace

import httpx

from runners.shared.event_streams import TokensUsed
from runners.shared.timing import TUNNEL_PING_SECONDS, TUNNEL_PONG_SECONDS
from tests.webapp.gateway.far_host import PING_SECONDS, FarHost, far_hosts
from tests.webapp.gateway.pair import served, until
from tests.webapp.gateway.test_gateway import CHAT, KEY, ROUTE, SECRET, Fixed
from webapp.core import connections
from webapp.core.connections import HeaderDeadlineProtocol
from webapp.gateway.application import Gateway
from webapp.gateway.journal import read_answer
from webapp.gateway.routes import Target
from webapp.gateway.tunnels import Tunnels

TARGETS = tuple(Target(f"r-{name}", name, name, "inner") for name in ("one", "two"))
FORMS = {  # path: what a client of the API asks, and how it finds the error in the last event
    "/v1/chat/completions": (CHAT, lambda event: json.loads(event)["error"]["code"] == "lost"),
    "/v1/responses": (
        {"model": "small", "input": "Hi"},
        lambda event: json.loads(event)["error"]["code"] == "lost",
    ),
    "/v1/messages": (
        CHAT | {"max_tokens": 9},
        lambda event: json.loads(event)["error"]["type"] == "api_error",
    ),
}


class Site:
    """A gateway on a port: hosts' tunnels and clients' requests."""

    def __init__(self, folder) -> None:
        self.tunnels = Tunnels()
        self.routes = Fixed()
        self.gateway = Gateway(folder, routes=self.routes, tunnels=self.tunnels)
        self.gateway.journal.start = lambda: None
        self._folder = folder

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "websocket":
            host = dict(scope["headers"])[b"authorization"].decode().removeprefix("Bearer ")
            await self.tunnels.serve(host, receive, send)
        else:
            await self.gateway(scope, receive, send)

    def set(self, *targets: Target) -> None:
        """Let replicas serve."""
        self.routes.set(replace(ROUTE, targets=targets), key=replace(KEY, hold_seconds=0.2))

    @property
    def counted(self):
        lines = b"".join(each.read_bytes() for each in self._folder.glob("*.jsonl")).splitlines()
        return [read_answer(line) for line in lines]


async def read(http: httpx.AsyncClient, path: str, begun: asyncio.Semaphore) -> str:
    """Read a stream to its end; return the data of its last event."""
    document, last = FORMS[path][0] | {"stream": True}, ""
    async with http.stream("POST", path, json=document) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                begun.release()
                last = line.removeprefix("data: ")
    return last


def test_a_silent_host_ends_its_streams_and_others_answer_until_none_is_left(
    tmp_path, monkeypatch
):
    assert TUNNEL_PING_SECONDS + TUNNEL_PONG_SECONDS == 40.0  # the limit, which is shortened here
    for name in ("ws_ping_interval", "ws_ping_timeout"):
        monkeypatch.setitem(connections.WEBSOCKETS, name, PING_SECONDS)
    asyncio.run(law(Site(tmp_path / "journal"), tmp_path))


async def law(site: Site, tmp_path) -> None:
    headers = {"authorization": f"Bearer {SECRET}"}
    async with served(site, HeaderDeadlineProtocol) as server:
        base = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=base, headers=headers, trust_env=False) as http:
            with far_hosts(tmp_path, server.port, "one", "two") as hosts:
                await until(lambda: all(map(site.tunnels.of, hosts)))
                await silenced(site, http, hosts)


async def silenced(site: Site, http: httpx.AsyncClient, hosts: dict[str, FarHost]) -> None:
    async def ask() -> httpx.Response:
        return await http.post("/v1/chat/completions", json=CHAT, timeout=30)

    site.set(*TARGETS[:1])
    begun = {path: asyncio.Semaphore(0) for path in FORMS}
    reading = [asyncio.ensure_future(read(http, *each)) for each in begun.items()]
    async with asyncio.timeout(30):
        for each in begun.values():
            await each.acquire()
    hosts["one"].signal(signal.SIGSTOP)
    unlucky = asyncio.ensure_future(ask())  # sent to the silent host
    await until(lambda: site.gateway._running["r-one"] == len(FORMS) + 1)
    site.set(*TARGETS)
    async with asyncio.timeout(30):
        for path, last in zip(FORMS, await asyncio.gather(*reading), strict=True):
            assert FORMS[path][1](last), (path, last)
        assert (await unlucky).json() == (await ask()).json() == {"from": "two"}
    counted = site.counted
    assert [(each.status, each.used) for each in counted if each.is_cut] == [
        (200, TokensUsed(7, 0, 3))
    ] * len(FORMS)
    assert len(counted) == len(FORMS) + 2
    hosts["two"].signal(signal.SIGSTOP)
    await until(lambda: site.tunnels.of("two") is None)
    refused = await ask()
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], int(refused.headers["retry-after"]) > 0) == (
        503, "unreachable", True,
    )  # fmt: skip
    hosts["one"].signal(signal.SIGCONT)
    await until(lambda: site.tunnels.of("one"))
    assert (await ask()).json() == {"from": "one"}
