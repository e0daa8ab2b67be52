"""Who may open a tunnel, and what becomes of other WebSockets."""

import asyncio

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from tests.webapp.gateway.pair import Socket, until
from webapp import asgi as web
from webapp.core.pace import STRANGER, Pace
from webapp.gateway import asgi, tunnels
from webapp.hosts.services import credential_revoke

pytestmark = pytest.mark.django_db(databases="__all__")


def opened(
    socket: Socket, credential: str = "", path: str = tunnels.PATH, application=asgi.application
) -> asyncio.Task[None]:
    headers = [(b"authorization", f"Bearer {credential}".encode())] if credential else []
    scope = {"type": "websocket", "path": path, "headers": headers, "client": ("192.0.2.1", 1)}
    return asyncio.create_task(application(scope, socket.incoming.get, socket.send))


def test_a_host_opens_a_tunnel_with_its_credential_until_it_is_revoked(enrolled, monkeypatch):
    host, credential = enrolled
    monkeypatch.setattr(tunnels, "CREDENTIAL_CHECK_SECONDS", 0.01)

    @async_to_sync
    async def law() -> None:
        socket = Socket()
        serving = opened(socket, credential)
        await until(lambda: tunnels.tunnels.of(host.pk))
        assert socket.sent == [{"type": "websocket.accept"}]
        await sync_to_async(credential_revoke)(host=host, by="olga")
        async with asyncio.timeout(30):
            await serving
        assert socket.closed_with == (4401, "unknown_credential")
        assert tunnels.tunnels.of(host.pk) is None

    law()


def test_other_websockets_are_closed_and_strangers_are_limited(enrolled, monkeypatch):
    @async_to_sync
    async def law() -> None:
        for credential, path, code in (
            ("", tunnels.PATH, 4401),
            ("guess", tunnels.PATH, 4401),
            (enrolled[1], "/tunnel", 4404),
            ("", "/live/", 4404),
        ):
            socket = Socket()
            await opened(socket, credential, path)
            assert socket.sent[-1]["code"] == code, (credential, path)
        socket = Socket()
        await opened(socket, enrolled[1], application=web.application)  # not the web process's
        assert socket.sent == [{"type": "websocket.close", "code": 4404}]
        monkeypatch.setattr(tunnels, "calls", Pace(clock=lambda: 0.0))
        reasons = set()
        for _ in range(STRANGER.burst + 10):
            socket = Socket()
            await opened(socket, "guess")
            reasons.add(socket.closed_with[1])
        assert reasons == {"unknown_credential", "too_many_calls"}

    law()
