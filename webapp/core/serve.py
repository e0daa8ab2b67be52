"""``python -m webapp.core.serve APPLICATION``: the web process or the gateway of ``manage.py up``.

Both accept from the same sockets (``webapp.core.handover``). The gateway serves in a fork of a
process that has loaded all modules: if the fork ends, the next one answers within a fraction of a
second, not after the seconds that loading takes. If that process ends, its fork serves on until
the next gateway has loaded and relieves it (``--after``), or ``up`` ends.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from webapp.core.connections import WEBSOCKETS
from webapp.core.handover import Channel, Fork, SharedProtocol, SharingServer, Side
from webapp.core.logs import freeze_loaded, give_back_memory

GRACE_SECONDS = 5  # for open requests, once it is to end
SIGNALS = (signal.SIGTERM, signal.SIGINT)
LEAST_SECONDS = 1.0  # that a fork lives: one that ends sooner is not repeated here


def main(arguments: list[str]) -> int:
    """Serve until a signal; return the exit status."""
    options = _parse(arguments)
    give_back_memory()  # before threads get their malloc arenas
    sockets = [socket.socket(fileno=int(each)) for each in options.sockets.split(",")]
    side = Side(Channel(socket.socket(fileno=options.channel)), options.gateway)
    config = config_of(
        options.application,
        partial(SharedProtocol, side=side),  # type: ignore[arg-type]  # makes protocols as a class
        options.proxies,
    )
    config.load()
    logging.getLogger("uvicorn.access").propagate = False  # which Django's set-up reset
    if not options.gateway:
        return _serve(config, side, sockets)
    freeze_loaded()
    return _serve_in_forks(config, side, sockets, options.after)


def config_of(
    application: str, http: type[asyncio.Protocol], proxies: str, **others: Any
) -> uvicorn.Config:
    """Return the server's settings; headers of ``proxies``, with commas, are believed."""
    return uvicorn.Config(
        application,
        http=http,
        **WEBSOCKETS,
        access_log=False,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=proxies or None,
        timeout_graceful_shutdown=GRACE_SECONDS,
        **others,
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m webapp.core.serve", description=__doc__)
    parser.add_argument("application", help="MODULE:NAME of the ASGI application")
    parser.add_argument("--sockets", required=True, help="descriptors that listen, with commas")
    parser.add_argument("--channel", required=True, type=int, help="descriptor of the channel")
    parser.add_argument("--gateway", action="store_true", help="take the gateway's requests")
    parser.add_argument(
        "--after", type=int, help="process group of an earlier gateway that this one relieves"
    )
    parser.add_argument("--proxies", default="", help="whose headers are believed, with commas")
    return parser.parse_args(arguments)


def _serve(
    config: uvicorn.Config, side: Side, sockets: list[socket.socket], fork: Fork | None = None
) -> int:
    server = SharingServer(config, side, fork)
    try:
        server.run(sockets)
    except SystemExit as ended:  # uvicorn's way to say that the application does not start
        return ended.code if isinstance(ended.code, int) else 1
    return 0


def _status_of(serve: Callable[[], int]) -> int:
    """Return the status of a fork, which never returns to what started its parent."""
    try:
        return serve()
    except BaseException:  # noqa: BLE001 -- as the interpreter's own end does
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _serve_in_forks(
    config: uvicorn.Config, side: Side, sockets: list[socket.socket], after: int | None
) -> int:
    """Keep one fork serving; return the status of one that ended on request, or at once."""
    child, is_ending, starter = 0, False, os.getppid()

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal is_ending
        is_ending = True
        if child:
            with suppress(ProcessLookupError):
                os.kill(child, number)

    while True:
        parent, own = os.pipe()  # at the fork's end of it is read that this process has ended
        began_at = time.monotonic()
        child = os.fork()
        if not child:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.close(own)
            fork = Fork(parent, starter, after)
            os._exit(_status_of(partial(_serve, config, side, sockets, fork)))
        after = None
        for number in SIGNALS:
            signal.signal(number, end)
        os.close(parent)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        child = 0
        os.close(own)
        if is_ending or time.monotonic() - began_at < LEAST_SECONDS:
            return 0 if is_ending else 1
        sys.stderr.write(f"The gateway ended ({status}); another one takes its place.\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
