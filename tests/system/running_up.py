"""A real ``manage.py up`` with everything that it starts."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import psutil

from tests.webapp.boot.conftest import eventually
from tests.webapp.conftest import make_microbench
from webapp.boot import up

START_LIMIT_S = 600.0


def command_of(process: psutil.Process) -> str:
    """The command line of a process, empty when it ended since it was listed."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class RunningUp:
    """One real `manage.py up` and what it printed."""

    def __init__(self, data: Path, port: int, *options: str, **environment: str) -> None:
        self.data, self.port = data, port
        self.url = f"http://127.0.0.1:{port}"
        self.log = data.with_name(f"up-{port}.log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "manage.py", "up", "--port", str(port), *options],
                cwd=up.ROOT,
                env=os.environ | {"SLIPWAY_DATA_DIR": str(data)} | environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def words(self) -> str:
        return self.log.read_text()

    def wait_until_ready(self) -> "RunningUp":
        eventually(lambda: self.process.poll() is not None or self.is_ready, START_LIMIT_S)
        assert self.is_ready, self.words
        return self

    @property
    def is_ready(self) -> bool:
        return "Slipway is ready" in self.words

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz", timeout=5).is_success
        except httpx.HTTPError:
            return False

    def members(self) -> list[psutil.Process]:
        """Every process that works on this data folder, `up` itself included."""
        return [process for process in psutil.process_iter() if self._is_member(process)]

    def _is_member(self, process: psutil.Process) -> bool:
        try:
            is_told = process.environ().get("SLIPWAY_DATA_DIR") == str(self.data)
            is_redis = f"unixsocket:{self.data}" in " ".join(process.cmdline())  # hides its own
            return (is_told or is_redis) and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def pid_of(self, words: str) -> int | None:
        """The number of the first started process whose command holds the words."""
        found = [p for p in self.members() if words in command_of(p)]
        return min(found, key=psutil.Process.create_time).pid if found else None

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(60)

    def end_by_force(self) -> None:
        for process in self.members():
            process.kill()
        self.process.wait()


def spare_the_benchmark(running: RunningUp) -> None:
    """Let this machine count as measured: it takes a minute of a core, at which no test looks."""
    bench = make_microbench().model_dump_json()
    with closing(sqlite3.connect(running.data / "slipway.sqlite3", timeout=60)) as rows, rows:
        rows.execute("update hosts_host set microbench = ?", [bench])
    agent = psutil.Process(running.pid_of("runners work"))
    for process in agent.children(recursive=True):
        if "runners.jobs.bench.device_rates" in command_of(process):
            process.kill()
