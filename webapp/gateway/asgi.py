"""The gateway as an ASGI application, in a process of its own.

``manage.py up`` runs one at the site's address. ``python -m uvicorn
webapp.gateway.asgi:application`` runs others beside the site, as many as wanted: each reads the
same database, and hosts open a tunnel to each (``SLIPWAY_GATEWAYS``).
"""

import asyncio
import os
from pathlib import Path

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
django.setup(set_prefix=False)

from django.conf import settings  # noqa: E402 (Django must be set up)

from runners.shared.tunnel import CLOSE_NOT_FOUND  # noqa: E402 (as above)
from webapp.core.answers import with_defaults  # noqa: E402 (as above)
from webapp.core.connections import raise_file_limit  # noqa: E402 (as above)
from webapp.core.problems import Receive, Scope, Send  # noqa: E402 (as above)
from webapp.gateway import tunnels  # noqa: E402 (as above)
from webapp.gateway.application import Gateway  # noqa: E402 (as above)

gateway = Gateway(Path(settings.DATA_DIR) / "gateway", tunnels=tunnels.tunnels)


async def serve(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request or a WebSocket of the gateway."""
    if scope["type"] == "http":
        await gateway(scope, receive, with_defaults(send))
    elif scope["path"] == tunnels.PATH:
        await tunnels.application(scope, receive, send)
    else:
        await receive()
        await send({"type": "websocket.close", "code": CLOSE_NOT_FOUND})


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer; at its end the process counts what was answered."""
    if scope["type"] != "lifespan":
        await serve(scope, receive, send)
        return
    while True:
        kind = (await receive())["type"]
        if kind == "lifespan.startup":
            raise_file_limit()
        else:
            await asyncio.to_thread(gateway.stop)
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
