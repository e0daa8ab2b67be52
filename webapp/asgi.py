"""The ASGI door: ``/live/`` goes to the raw relay, beats to their desk, the rest to Django."""

import os
import signal
import threading
from collections.abc import MutableMapping
from types import FrameType
from typing import Any

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
django_application = get_asgi_application()

from webapp.api import beat_door  # noqa: E402 (Django must be set up first)
from webapp.live import stream  # noqa: E402 (as above)

STRICT_HEADERS = [
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
]


async def application(scope: stream.Scope, receive: stream.Receive, send: stream.Send) -> None:
    """Answer one connection."""
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
    elif scope["type"] == "http" and scope["path"].startswith(stream.PREFIX):
        await stream.application(scope, receive, with_policy(send))
    elif scope["type"] == "http" and beat_door.is_beat(scope):
        await beat_door.application(scope, receive, with_policy(send))
    else:
        await django_application(scope, receive, send)  # type: ignore[arg-type]  # asgiref narrows


def with_policy(send: stream.Send) -> stream.Send:
    """Add to what a branch without Django answers the headers that let nothing of it act."""

    async def guarded(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *STRICT_HEADERS]
        await send(message)

    return guarded


async def _lifespan(receive: stream.Receive, send: stream.Send) -> None:
    """Say yes to start and stop; a server waits for open streams before it says stop."""
    while True:
        kind = (await receive())["type"]
        if kind == "lifespan.startup":
            end_streams_on_signals()
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def end_streams_on_signals() -> None:
    """End open streams as soon as the server is told to stop, before it waits for them."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.getsignal(number)

        def handle(received: int, frame: FrameType | None, before: object = before) -> None:
            stream.close_all()
            if callable(before):
                before(received, frame)

        signal.signal(number, handle)
