"""A real server: open streams end quickly when it is told to stop."""

import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from django.core.signing import TimestampSigner

from webapp.live.publish import SALT


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def server(port, redis_server, settings):
    environment = os.environ | {
        "REDIS_URL": redis_server.url,
        "SLIPWAY_SECRET_KEY": settings.SECRET_KEY,
    }
    command = [sys.executable, "-m", "uvicorn", "webapp.asgi:application", "--port", str(port)]
    process = subprocess.Popen([*command, "--timeout-graceful-shutdown", "20"], env=environment)
    for _ in range(200):
        try:
            httpx.get(f"http://127.0.0.1:{port}/healthz")
            break
        except httpx.HTTPError:
            time.sleep(0.1)
    yield process
    process.kill()
    process.wait()


def test_term_ends_open_streams_with_a_farewell_at_once(server, port):
    ticket = TimestampSigner(salt=SALT).sign_object({"u": 1, "t": ["job:1"]})
    url = f"http://127.0.0.1:{port}/live/?ticket={ticket}"
    with httpx.stream("GET", url, timeout=10) as answer:
        chunks = answer.iter_text()
        assert "retry: 3000" in next(chunks)
        server.send_signal(signal.SIGTERM)
        rest = "".join(chunks)
    assert "event: bye" in rest
    server.wait(600)
