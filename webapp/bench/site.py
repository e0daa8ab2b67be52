"""A running site in a separate data folder, for benchmarks."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import httpx
import psutil
from django.core.management.base import CommandError

from runners.shared.log_text import last_line
from webapp.boot import broker

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 900.0  # a busy machine needs minutes; a start that failed ends at once
STOP_LIMIT_S = 60.0


def without_gpus() -> dict[str, str]:
    """Return this environment without GPUs, for ranks that are forks: CUDA survives no fork."""
    return os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Site:
    """A running site: URL, data folder, process, and time to its first page."""

    url: str
    data: Path
    process: subprocess.Popen[bytes]
    seconds_to_first_page: float

    def manage(self, *arguments: str) -> str:
        """Return the output of a management command of this site."""
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=ROOT,
            env=os.environ | {"SLIPWAY_DATA_DIR": str(self.data)},
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
        )
        return done.stdout

    def call(self, call: str) -> dict[str, Any]:
        """Return the JSON output of a function of ``webapp.bench.live_path``."""
        code = f"from webapp.bench import live_path; live_path.{call}"
        printed = self.manage("shell", "--no-imports", "-c", code)
        answer: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return answer

    @property
    def redis_url(self) -> str:
        """The URL of this site's Redis, with the default user."""
        return broker.choose(self.data, dict(os.environ)).url

    def part(self, name: str) -> psutil.Process:
        """Return the process of a part: "control", "webapp.asgi", "ticker" or "redis"."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if any(name in word for word in child.cmdline()[:4]):
                return child
        raise CommandError(f"the site has no process {name}")


@contextlib.contextmanager
def running(data: Path, **settings: str) -> Iterator[Site]:
    """Start a site, yield it when it is ready, and stop it.

    ``settings`` are additional environment variables.

    Raises:
        CommandError: the site did not become ready; the message has the end of its log.
    """
    port = _free_port()
    command = [sys.executable, "manage.py", "up", "--port", str(port)]
    environment = os.environ | {"SLIPWAY_DATA_DIR": str(data)} | settings
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
        _end(up)


def _end(up: subprocess.Popen[bytes]) -> None:
    """Stop a site, and kill what is left of it after ``STOP_LIMIT_S``."""
    parts = []
    with contextlib.suppress(psutil.NoSuchProcess):
        parts = psutil.Process(up.pid).children(recursive=True)
    try:
        up.terminate()
        up.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for part in parts:
            with contextlib.suppress(psutil.NoSuchProcess):
                part.kill()
        up.kill()
        up.wait()


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end a block as Ctrl-C does, so that its sites, jobs and folders end with it."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def in_background(*processes: BaseProcess) -> Iterator[None]:
    """Run processes beside a block: started with it, ended with it at the latest."""
    try:
        for process in processes:
            process.start()
        yield
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                process.kill()
                process.join()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(is_reached: Callable[[], bool], log: Path, up: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not is_reached():
        if up.poll() is not None or time.monotonic() > deadline:
            raise CommandError(f"`up` did not become ready: {last_line(log.read_bytes())}")
        time.sleep(0.02)


def _has_page(url: str) -> bool:
    try:
        return httpx.get(f"{url}/", follow_redirects=True, timeout=5).is_success
    except httpx.HTTPError:
        return False
