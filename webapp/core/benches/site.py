"""Slipway as its users start it, in a data folder of its own, for as long as a bench needs it."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from django.core.management.base import CommandError

ROOT = Path(__file__).resolve().parents[3]
START_LIMIT_S = 120.0


@dataclass(frozen=True)
class Site:
    """A running site: where it answers, whose process it is, how soon its first page came."""

    url: str
    data: Path
    process: subprocess.Popen[bytes]
    seconds_to_first_page: float

    def manage(self, *arguments: str) -> str:
        """Return what a management command of this site prints."""
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=ROOT,
            env=os.environ | {"SLIPWAY_DATA_DIR": str(self.data)},
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout


@contextlib.contextmanager
def running(data: Path) -> Iterator[Site]:
    """Start Slipway, yield it when it is ready, and stop it.

    Raises:
        CommandError: it did not become ready; its last words are in the message.
    """
    port = _free_port()
    command = [sys.executable, "manage.py", "up", "--port", str(port)]
    environment = os.environ | {"SLIPWAY_DATA_DIR": str(data)}
    with (data / "up.log").open("ab") as log:
        up = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    started = time.perf_counter()
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(lambda: _has_page(url), data / "up.log", up)
        seconds = time.perf_counter() - started
        words = "Slipway is ready"
        _wait(lambda: words in (data / "up.log").read_text("utf-8"), data / "up.log", up)
        yield Site(url, data, up, seconds)
    finally:
        up.terminate()
        up.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(is_reached: Callable[[], bool], log: Path, up: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not is_reached():
        if up.poll() is not None or time.monotonic() > deadline:
            raise CommandError(f"`up` did not become ready: {log.read_text('utf-8')[-500:]}")
        time.sleep(0.02)


def _has_page(url: str) -> bool:
    try:
        return httpx.get(f"{url}/", follow_redirects=True, timeout=5).is_success
    except httpx.HTTPError:
        return False
