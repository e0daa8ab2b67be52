"""Run real job processes in attempt folders, as a supervisor would, and read their events."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runners.jobs.events import Emitter, read_events
from runners.jobs.runtime import Job
from runners.jobspec import JobSpec
from runners.launchers.launch import render_argv
from runners.shared.messages import RunRequest

PROJECT = Path(__file__).resolve().parents[3]
SHARED = ("cache", "environments")  # tokens and packages: 8 s of a core and more for each host


def shared(name: str) -> Path:
    """Return a folder that all hosts of a test run have in common."""
    folder = Path(tempfile.gettempdir()) / "shared-by-hosts" / name  # the run's, as TMPDIR says
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass
class Finished:
    """A job that ended, and what it said."""

    folder: Path
    returncode: int
    events: list[dict[str, Any]]
    stderr: str

    def bodies(self, kind: str) -> list[dict[str, Any]]:
        return [each["body"] for each in self.events if each["kind"] == kind]

    @property
    def measured(self) -> dict[str, float]:
        return self.bodies("result")[0]["measured"]

    def metric(self, name: str) -> list[float]:
        values = [body["values"] for body in self.bodies("metric")]
        return [each[name] for each in values if name in each]


class Host:
    """A host folder with attempts, whose jobs run as processes of one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "attempts").mkdir(parents=True)
        (path / "models").mkdir()
        for name in SHARED:
            (path / name).symlink_to(shared(name))

    def attempt(self, name: str, spec: JobSpec, job_id: str = "") -> Path:
        folder = self.path / "attempts" / name
        folder.mkdir(exist_ok=True)
        request = RunRequest(
            attempt_id=name, job_id=job_id or name, number=1, fence="f", spec=spec
        )
        (folder / "spec.json").write_text(request.model_dump_json())
        return folder

    def start(self, folder: Path) -> subprocess.Popen[str]:
        request = RunRequest.model_validate_json((folder / "spec.json").read_bytes())
        with (folder / "events.jsonl").open("ab") as events:
            return subprocess.Popen(
                render_argv(request.spec, folder),
                env=self.environment() | {"SLIPWAY_EVENT_FD": str(events.fileno())},
                pass_fds=[events.fileno()],
                stderr=subprocess.PIPE,
                text=True,
            )

    def environment(self) -> dict[str, str]:
        ours = {"SLIPWAY_HOST_DIR": str(self.path), "OMP_NUM_THREADS": "1"}
        return os.environ | ours | {"PYTHONPATH": str(PROJECT)}

    def run(self, name: str, spec: JobSpec) -> Finished:
        folder = self.attempt(name, spec)
        return self.finish(folder, self.start(folder))

    def run_once(self, name: str, spec: JobSpec) -> Finished:
        """Run an attempt in a process, or copy what it left on another host of this test run."""
        kept, folder = shared("attempts") / name, self.path / "attempts" / name
        with (shared("locks") / name).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be at it
            if not kept.exists():
                finished = self.run(name, spec)
                how = {"returncode": finished.returncode, "stderr": finished.stderr}
                (folder / "ended.json").write_text(json.dumps(how))
                shutil.copytree(folder, kept)
                return finished
        shutil.copytree(kept, folder)
        ended = json.loads((folder / "ended.json").read_text())
        return Finished(folder, events=read_events(folder / "events.jsonl"), **ended)

    def run_here(self, name: str, spec: JobSpec, work: Callable[[Job], None]) -> Finished:
        """Run the job's work in this process: the same code without seconds of imports."""
        folder = self.attempt(name, spec)
        emitter = Emitter(os.open(folder / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        request = RunRequest.model_validate_json((folder / "spec.json").read_bytes())
        handler = signal.getsignal(signal.SIGTERM)
        work(Job(folder, self.path, request, emitter, threading.Event()))
        signal.signal(signal.SIGTERM, handler)
        emitter.close()
        return Finished(folder, 0, read_events(folder / "events.jsonl"), "")

    def finish(self, folder: Path, process: subprocess.Popen[str]) -> Finished:
        _out, stderr = process.communicate(timeout=600)
        sys.stderr.write(f"{folder.name} ended with {process.returncode}\n{stderr}")  # if it fails
        return Finished(folder, process.returncode, read_events(folder / "events.jsonl"), stderr)


def wait_until(path: Path, pattern: str, process: subprocess.Popen[str]) -> None:
    """Wait until a file matching ``pattern`` stands below ``path``; fail when the job ends."""
    deadline = time.monotonic() + 600.0
    while not any(path.glob(pattern)):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
