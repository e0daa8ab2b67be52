"""The gateway as an ASGI application: within the site's web process, or in one of its own.

``python -m uvicorn webapp.gateway.asgi:application`` runs one beside the site, as many times as
wanted: each reads the same database, and hosts open a tunnel to each (``SLIPWAY_GATEWAYS``).
"""

import asyncio
import os
from pathlib import Path

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
django.setup(set_prefix=False)

from django.conf import settings  # noqa: E402 (Django must be set up)

from runners.shared.tunnel import CLOSE_NOT_FOUND  # noqa: E402 (as above)
from webapp.core.problems import Receive, Scope, Send  # noqa: E402 (as above)
from webapp.gateway import tunnels  # noqa: E402 (as above)
from webapp.gateway.application import PREFIX, Gateway  # noqa: E402 (as above)

gateway = Gateway(Path(settings.DATA_DIR) / "gateway", tunnels=tunnels.tunnels)


def is_for_gateway(scope: Scope) -> bool:
    """Return whether a request or a WebSocket is the gateway's."""
    if scope["type"] == "websocket":
        return True
    path = scope.get("path", "")
    is_below = path == PREFIX or path.startswith(f"{PREFIX}/")
    return bool(scope["type"] == "http" and is_below)


async def serve(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request or a WebSocket of the gateway."""
    if scope["type"] == "http":
        await gateway(scope, receive, send)
    elif scope["path"] == tunnels.PATH:
        await tunnels.application(scope, receive, send)
    else:
        await receive()
        await send({"type": "websocket.close", "code": CLOSE_NOT_FOUND})


async def end() -> None:
    """Count what was answered, before the process ends."""
    await asyncio.to_thread(gateway.stop)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer as a process of its own, in which everything is the gateway's."""
    if scope["type"] != "lifespan":
        await serve(scope, receive, send)
        return
    while True:
        kind = (await receive())["type"]
        if kind == "lifespan.shutdown":
            await end()
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
