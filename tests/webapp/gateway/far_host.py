"""A host in a process of its own: its agent's end of the tunnel and an engine that never ends.

``python -m tests.webapp.gateway.far_host FOLDER PORT HOST``; no Django, as on a host.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from runners.host import tunnel
from runners.host.tunnel import keep_links
from runners.launchers.attempts import AttemptFolder
from runners.shared.config import Credential, HostDir
from runners.supervision import child

PING_SECONDS = 0.5  # of this test's two ends; the silence that is noticed is at most twice it
EVENT = b'data: {"n":1}\n\n: usage 7 0 3\n\n'


async def engine(_scope, receive, send) -> None:
    """Answer a stream without end, or the host's name where none is asked for."""
    body = (await receive())["body"]
    is_stream = json.loads(body).get("stream", False)
    kind = b"text/event-stream" if is_stream else b"application/json"
    fields = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    while is_stream:
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.sleep(0.01)
    await send({"type": "http.response.body", "body": b'{"from":"%s"}' % sys.argv[3].encode()})


async def serve(folder: Path, port: str, host: str) -> None:
    """Keep the tunnel of a host on which one attempt runs."""
    host_dir = HostDir(folder)
    host_dir.make()
    attempt = AttemptFolder(host_dir.attempts / host)
    attempt.path.mkdir()
    credential = Credential(
        server=f"http://127.0.0.1:{port}", host_id=host, name=host, credential=host,
        command_key="k", redis_url=None, beat_seconds=1.0,
    )  # fmt: skip
    listening = socket.create_server(("127.0.0.1", 0))
    port_here = listening.getsockname()[1]
    address = {"host": "127.0.0.1", "port": port_here, "model": "m", "has_keys": False}
    child.write_json(attempt.path / child.ENDPOINT, address)
    serving = uvicorn.Server(uvicorn.Config(engine, lifespan="off", log_level="warning"))
    with child.locked(attempt.lock):
        links = keep_links(host_dir, credential, ["/tunnel/"])
        await asyncio.gather(serving.serve([listening]), links)


class FarHost:
    """The process of a host."""

    def __init__(self, folder: Path, port: int, name: str) -> None:
        self.name = name
        command = [sys.executable, "-m", __name__, str(folder / name), str(port), name]
        self._process = subprocess.Popen(command, start_new_session=True)

    def signal(self, number: int) -> None:
        """Send a signal to all that runs there."""
        os.killpg(self._process.pid, number)


@contextmanager
def far_hosts(folder: Path, port: int, *names: str) -> Iterator[dict[str, FarHost]]:
    """Yield the running hosts by name."""
    hosts = {name: FarHost(folder, port, name) for name in names}
    try:
        yield hosts
    finally:
        for each in hosts.values():
            each.signal(signal.SIGKILL)
            each._process.wait()


if __name__ == "__main__":
    tunnel.TUNNEL_PING_SECONDS = tunnel.TUNNEL_PONG_SECONDS = PING_SECONDS
    asyncio.run(serve(Path(sys.argv[1]), *sys.argv[2:]))
