"""The ASGI application: routes ``/live/``, heartbeats, and the rest to Django.

``/v1/`` and tunnels are the gateway's, a process of its own (``webapp.gateway.asgi``).
"""

import asyncio
import os
import signal
import threading
from collections.abc import MutableMapping
from types import FrameType
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth import SESSION_KEY
from django.core.asgi import get_asgi_application
from django.db import DatabaseError, close_old_connections, connections
from django.http import parse_cookie

from webapp.core.logs import collect_and_trim, freeze_loaded, give_back_memory

give_back_memory()  # before threads get their malloc arenas
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
django_application = get_asgi_application()

from django.contrib.sessions.backends.db import SessionStore  # noqa: E402 (Django must be set up)

from runners.shared.tunnel import CLOSE_NOT_FOUND  # noqa: E402 (as above)
from webapp.accounts.tokens import PREFIX, token_find  # noqa: E402 (as above)
from webapp.api import agents, jobs  # noqa: E402 (as above)
from webapp.core.answers import with_defaults  # noqa: E402 (as above)
from webapp.core.connections import raise_file_limit  # noqa: E402 (as above)
from webapp.core.middleware import PERMISSIONS_POLICY, SerializePerCredential, limited  # noqa: E402 (as above)
from webapp.core.problems import Receive, Scope, Send  # noqa: E402 (as above)
from webapp.core.queries import SchemaError, check_schema  # noqa: E402 (as above)
from webapp.hosts.services import host_by_credential  # noqa: E402 (as above)
from webapp.live import stream  # noqa: E402 (as above)

COLLECT_SECONDS = 20
STRICT_HEADERS = [
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"permissions-policy", PERMISSIONS_POLICY.encode()),
]


async def _application(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
    elif scope["type"] == "http" and scope["path"].startswith(stream.PREFIX):
        await stream.application(scope, receive, with_policy(send))
    elif scope["type"] == "http" and agents.is_beat(scope):
        await agents.application(scope, receive, with_policy(send))
    else:
        await in_turns(scope, receive, send)


def with_policy(send: Send) -> Send:
    """Return a ``send`` that adds strict security headers, for responses without Django."""

    async def guarded(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *STRICT_HEADERS]
        await send(message)

    return guarded


in_turns = SerializePerCredential(django_application, with_policy)  # type: ignore[arg-type]  # asgiref narrows


async def is_known(scope: Scope) -> bool:
    """Return whether a request has a person's session or token, or a host's credential."""
    headers = scope.get("headers", ())
    sent = [
        b"; ".join(value for key, value in headers if key == name).decode("latin-1")
        for name in (b"authorization", b"cookie")
    ]
    return await sync_to_async(_is_known)(*sent)


def _is_known(authorization: str, cookie: str) -> bool:
    """Look the sender up; while the database does not answer, Django says so to everybody."""
    try:
        kind, _, token = authorization.partition(" ")
        if kind.lower() == "bearer" and (sent := token.strip()):
            find = token_find if sent.startswith(PREFIX) else host_by_credential
            if find(sent) is not None:
                return True
        cookies = parse_cookie(cookie)
        return SESSION_KEY in SessionStore(cookies.get(settings.SESSION_COOKIE_NAME))
    except DatabaseError:
        close_old_connections()
        return True


_limited = limited(_application, with_policy, is_known)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request; every response has the headers that Django gives to its pages."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": CLOSE_NOT_FOUND})
        return
    if scope["type"] == "http":
        send = with_defaults(send)
    await _limited(scope, receive, send)


async def _lifespan(receive: Receive, send: Send) -> None:
    """Handle startup and shutdown events; the server waits for open streams before shutdown."""
    collecting: asyncio.Task[None] | None = None
    while True:
        kind = (await receive())["type"]
        if kind == "lifespan.startup":
            if refusal := await sync_to_async(_schema_refusal)():
                await send({"type": "lifespan.startup.failed", "message": refusal})
                return
            end_streams_on_signals()
            freeze_loaded()
            raise_file_limit()
            collecting = asyncio.create_task(_collect_periodically())
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            if collecting is not None:
                collecting.cancel()
            return


async def _collect_periodically() -> None:
    """Collect garbage and trim memory periodically; each run takes about 10 ms."""
    while True:
        await asyncio.sleep(COLLECT_SECONDS)
        collect_and_trim()


def _schema_refusal() -> str:
    """Return why this version cannot use the database; "" if it can or the database is down."""
    try:
        check_schema()
    except SchemaError as error:
        return str(error)
    except DatabaseError:
        return ""
    finally:
        connections.close_all()
    return ""


def end_streams_on_signals() -> None:
    """Install signal handlers that close open streams, before the server waits for them."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.getsignal(number)

        def handle(received: int, frame: FrameType | None, before: object = before) -> None:
            stream.close_all()
            jobs.close_streams()
            if callable(before):
                before(received, frame)

        signal.signal(number, handle)
