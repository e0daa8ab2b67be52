"""Keep a handful of processes alive, stop them in order, and leave none behind.

Each child leads its own session, so a Ctrl-C in the terminal reaches only ``up``, which then
stops them one after the other. A record on disk names every child with the instant it started;
after a ``kill -9`` of ``up`` the next one finds them by it and never signals a stranger that
got the same number.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
STEADY_AFTER_S = 30.0  # a child that lived this long starts again without a longer pause
LOG_CAP_BYTES = 5_000_000
POLL_S = 0.05


@dataclass
class Child:
    """One process to keep alive; ``grace_s`` is what it gets between TERM and KILL.

    Children of a higher ``stage`` are stopped before those of a lower one.
    """

    name: str
    command: list[str]
    stage: int = 1
    grace_s: float = 10.0
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_again_at: float | None = None
    pause_s: float = FIRST_PAUSE_S


class Crew:
    """The children of one ``up``, in the order in which they were started."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        """Keep logs and the record below ``folder``."""
        self.children: list[Child] = []
        self.record = folder / "processes.json"
        self.logs = folder / "logs"
        self.environment = environment
        self.logs.mkdir(mode=0o700, exist_ok=True)

    def start(self, child: Child) -> None:
        """Start a child and tend it from now on."""
        self.children.append(child)
        self._launch(child)

    def tend(self) -> list[str]:
        """Start again what died and cut long logs; return one line per event."""
        events = []
        for child in self.children:
            if child.start_again_at is not None:
                if time.monotonic() >= child.start_again_at:
                    self._launch(child)
            elif child.process is not None and child.process.poll() is not None:
                events.append(self._note_death(child, child.process))
            cut(self.log_of(child))
        return events

    def stop(self, *, hurry: Callable[[], bool] = lambda: False) -> None:
        """Stop the children, stage by stage; kill at once when ``hurry`` says so."""
        for stage in sorted({child.stage for child in self.children}, reverse=True):
            members = [child for child in self.children if child.stage == stage]
            for process in (child.process for child in members):
                if process is not None and process.poll() is None:
                    _signal_group(process.pid, signal.SIGTERM)
            for child in members:
                if child.process is not None:
                    _end_group(child.process.pid, child.process.poll, child.grace_s, hurry)
                    child.process.wait()
        self.children.clear()
        self.record.unlink(missing_ok=True)

    def log_of(self, child: Child) -> Path:
        """Return the file that takes what the child prints."""
        return self.logs / f"{child.name}.log"

    def tail(self, child: Child, num_lines: int = 12) -> str:
        """Return the last lines that a child wrote."""
        lines = self.log_of(child).read_text("utf-8", errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def _launch(self, child: Child) -> None:
        with self.log_of(child).open("ab") as log:
            child.process = subprocess.Popen(
                child.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment | child.environment,
                start_new_session=True,
            )
        child.started_at, child.start_again_at = time.monotonic(), None
        self._write_record()

    def _note_death(self, child: Child, process: subprocess.Popen[bytes]) -> str:
        """Plan the next start of a dead child; pauses double while it keeps dying early."""
        _signal_group(process.pid, signal.SIGKILL)  # what it may have left in its group
        lived_s = time.monotonic() - child.started_at
        if lived_s >= STEADY_AFTER_S:
            child.pause_s = FIRST_PAUSE_S
        child.start_again_at = time.monotonic() + child.pause_s
        words = f"{child.name} ended ({_cause(process.returncode)}) after {lived_s:.0f} s"
        words += f"; starting it again in {child.pause_s:.1f} s. Log: {self.log_of(child)}"
        child.pause_s = min(2 * child.pause_s, LONGEST_PAUSE_S)
        return words

    def _write_record(self) -> None:
        pids = [child.process.pid for child in self.children if child.process is not None]
        rows = [{"pid": pid, "started": started(pid)} for pid in pids]
        fresh = self.record.with_suffix(".new")
        fresh.write_text(json.dumps(rows), "utf-8")
        fresh.replace(self.record)


def end_leftovers(record: Path, grace_s: float = 10.0) -> int:
    """End the children of an ``up`` that was killed; return how many were still there."""
    try:
        rows = json.loads(record.read_text("utf-8"))
    except (OSError, ValueError):
        return 0
    num_ended = 0
    for row in reversed(rows):
        pid, birth = row["pid"], row["started"]
        if birth is not None and started(pid) == birth:
            num_ended += 1
            _signal_group(pid, signal.SIGTERM)
            _end_group(pid, _vanished(pid, birth), grace_s, lambda: False)
    record.unlink(missing_ok=True)
    return num_ended


def started(pid: int) -> str | None:
    """Return what identifies the process with this number now, or None if it is gone."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            fields = stat.read_text("utf-8").rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]  # state, start time in clock ticks
    shown = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return shown.stdout.strip() or None


def cut(log: Path, cap_bytes: int = LOG_CAP_BYTES) -> None:
    """Keep a log below its cap: the younger half goes to ``<name>.1``, the file starts afresh."""
    try:
        size = log.stat().st_size
    except FileNotFoundError:
        return
    if size > cap_bytes:
        with log.open("rb+") as file:
            file.seek(-cap_bytes // 2, os.SEEK_END)
            log.with_name(f"{log.name}.1").write_bytes(file.read())
            file.truncate(0)  # the child appends, so its next line is the first of the file


def _vanished(pid: int, birth: str) -> Callable[[], int | None]:
    return lambda: None if started(pid) == birth else 0


def _end_group(
    pid: int, poll: Callable[[], int | None], grace_s: float, hurry: Callable[[], bool]
) -> None:
    """Wait for a group that got TERM, and send KILL when its leader has not ended in time."""
    deadline = time.monotonic() + grace_s
    while poll() is None and time.monotonic() < deadline and not hurry():
        time.sleep(POLL_S)
    _signal_group(pid, signal.SIGKILL)


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):  # macOS says EPERM for a group of zombies
        return


def _cause(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
