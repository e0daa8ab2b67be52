"""Supervision of child processes: restart them, stop them in order, and leave none behind.

Each child has its own session, so that Ctrl-C in the terminal reaches only ``up``, which then
stops the children in order. A record on disk lists every child with its start time; after a
``kill -9`` of ``up``, the next one finds them by it and never signals an unrelated process with
the same pid. A failed write (full disk, read-only folder) is reported once and retried.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from runners.shared.log_text import character_at, last_line, lines_of

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
RELIEF_S = 30.0  # that what a dead child left serves on at most (``webapp.core.handover``)
STEADY_AFTER_S = 30.0  # the restart pause is reset for a child that ran this long
LOG_CAP_BYTES = 5_000_000
LINE_BYTES = 64 * 1024  # of a cut line, that may be left out
POLL_S = 0.05


@dataclass
class Child:
    """One supervised process; ``grace_s`` is the time between SIGTERM and SIGKILL.

    Children of a higher ``stage`` are stopped first; ``prepare`` runs before each start;
    ``descriptors`` are files that the child has open from its start. If ``is_relieved``, what a
    dead one had started serves on until the next one, told of it by ``--after GROUP``, ends it.
    """

    name: str
    command: list[str]
    stage: int = 1
    grace_s: float = 10.0
    environment: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[], None] = lambda: None
    descriptors: tuple[int, ...] = ()
    is_relieved: bool = False
    left: int | None = None  # the process group of a dead one that serves on
    left_until: float = 0.0  # monotonic; afterwards its number may be another's
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_again_at: float | None = None
    pause_s: float = FIRST_PAUSE_S


class ProcessGroup:
    """The children of one ``up``, in start order."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        """Store logs and the record in ``folder``."""
        self.children: list[Child] = []
        self.record = folder / "processes.json"
        self.logs = folder / "logs"
        self.environment = environment
        self._news: list[str] = []  # events to be returned by the next `restart_dead`
        self._is_recorded = True
        self._without_log: set[str] = set()
        self.logs.mkdir(mode=0o700, exist_ok=True)

    def start(self, child: Child) -> None:
        """Start a child and supervise it."""
        self.children.append(child)
        self._launch(child)

    def restart_dead(self) -> list[str]:
        """Restart dead children and cut long logs; return one line per event."""
        for child in self.children:
            if child.start_again_at is not None:
                if time.monotonic() >= child.start_again_at:
                    self._launch(child)
            elif child.process is not None and child.process.poll() is not None:
                self._news.append(self._schedule_restart(child, child.process))
            cut(self.log_of(child))
        if not self._is_recorded:
            self._write_record()
        events, self._news = self._news, []
        return events

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a child, if it is running."""
        for child in self.children:
            if child.name == name and child.process is not None and child.process.poll() is None:
                child.process.send_signal(number)

    def stop(self, *names: str, hurry: Callable[[], bool] = lambda: False) -> None:
        """Stop the children, stage by stage; kill at once if ``hurry`` returns true.

        With ``names``, stop only those children.
        """
        leaving = [child for child in self.children if not names or child.name in names]
        for stage in sorted({child.stage for child in leaving}, reverse=True):
            members = [child for child in leaving if child.stage == stage]
            for process in (child.process for child in members):
                if process is not None and process.poll() is None:
                    _signal_group(process.pid, signal.SIGTERM)
            for child in members:
                if child.process is not None:
                    _end_group(child.process.pid, child.process.poll, child.grace_s, hurry)
                    child.process.wait()
                _end_left(child)
        self.children = [child for child in self.children if child not in leaving]
        if self.children:
            return
        with suppress(OSError):  # harmless if it stays: a pid counts only with its start time
            self.record.unlink(missing_ok=True)

    def log_of(self, child: Child) -> Path:
        """Return the log file of a child."""
        return self.logs / f"{child.name}.log"

    def tail(self, child: Child, num_lines: int = 12) -> str:
        """Return the last lines of a child's log, or "" if it has none."""
        try:
            lines = lines_of(self.log_of(child).read_bytes())
        except OSError:
            return ""
        return "\n".join(lines[-num_lines:])

    def _launch(self, child: Child) -> None:
        """Start a child, or schedule a retry if the system refuses."""
        try:
            child.prepare()
            with ExitStack() as stack:
                after = [] if child.left is None else ["--after", str(child.left)]
                child.process = subprocess.Popen(
                    child.command + after,
                    stdin=subprocess.DEVNULL,
                    stdout=self._open_log(child, stack),
                    stderr=subprocess.STDOUT,
                    env=self.environment | child.environment,
                    start_new_session=True,
                    pass_fds=child.descriptors,
                )
        except OSError as error:
            child.process, child.start_again_at = None, time.monotonic() + child.pause_s
            words = f"{child.name} could not be started ({error}); trying again in "
            self._news.append(f"{words}{child.pause_s:.1f} s")
            child.pause_s = min(2 * child.pause_s, LONGEST_PAUSE_S)
            return
        child.started_at, child.start_again_at = time.monotonic(), None
        self._write_record()

    def _open_log(self, child: Child, stack: ExitStack) -> IO[bytes] | int:
        """Return the child's output file: its log, or DEVNULL if it cannot be written."""
        log = self.log_of(child)
        try:
            opened = stack.enter_context(log.open("ab"))
        except OSError as error:
            if child.name not in self._without_log:
                words = f"{log} cannot be written ({error.strerror}): {child.name} runs without it"
                self._news.append(words)
            self._without_log.add(child.name)
            return subprocess.DEVNULL
        self._without_log.discard(child.name)
        return opened

    def _schedule_restart(self, child: Child, process: subprocess.Popen[bytes]) -> str:
        """Schedule the restart of a dead child; the pause doubles while it keeps dying early."""
        if child.is_relieved:
            _end_left(child)
            child.left, child.left_until = process.pid, time.monotonic() + RELIEF_S
        else:
            _signal_group(process.pid, signal.SIGKILL)  # remaining processes of its group
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
        rows = [{"pid": pid, "started": start_time_of(pid)} for pid in pids]
        fresh = self.record.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(rows), "utf-8")
            fresh.replace(self.record)
        except OSError as error:
            if self._is_recorded:
                self._news.append(
                    f"{self.record} cannot be written ({error.strerror}): everything runs on, and "
                    "it is tried again. Should `up` be killed before, end what it left by hand"
                )
            self._is_recorded = False
            return
        if not self._is_recorded:
            self._news.append(f"{self.record} is written again")
        self._is_recorded = True


def end_leftovers(record: Path) -> int:
    """End the children of a killed ``up``; return the number that still ran."""
    try:
        rows = json.loads(record.read_text("utf-8"))
    except (OSError, ValueError):
        return 0
    num_ended = 0
    for row in reversed(rows):
        pid, birth = row["pid"], row["started"]
        if birth is not None and start_time_of(pid) == birth:
            num_ended += 1
            _signal_group(pid, signal.SIGTERM)
            _end_group(pid, _exit_poll(pid, birth), 10.0, lambda: False)
    with suppress(OSError):
        record.unlink(missing_ok=True)
    return num_ended


def start_time_of(pid: int) -> str | None:
    """Return the start time of the process with this pid, or None if it does not exist."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            fields = stat.read_text("utf-8").rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]  # state, start time in clock ticks
    shown = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, check=False
    )
    return last_line(shown.stdout) or None


def cut(log: Path, cap_bytes: int = LOG_CAP_BYTES) -> None:
    """Truncate a log over its cap; its newest lines, half a cap, are moved to ``<name>.1``.

    The first line there says how much was cut. On a full disk that part is lost; otherwise a
    growing log would keep the disk full.
    """
    with suppress(OSError):
        if log.stat().st_size <= cap_bytes or not log.is_file():
            return
        with log.open("rb+") as file:
            begin = file.seek(-cap_bytes // 2 - 1, os.SEEK_END)  # perhaps a line ends there
            younger = file.read()
            file.truncate(0)  # the child appends, so its next line starts the file
            at = younger.find(b"\n", 0, LINE_BYTES) + 1 or character_at(younger, 0)
            note = f"[{begin + at:,} bytes were cut here]\n".encode()
            log.with_name(f"{log.name}.1").write_bytes(note + younger[at:])


def _exit_poll(pid: int, birth: str) -> Callable[[], int | None]:
    return lambda: None if start_time_of(pid) == birth else 0


def _end_group(
    pid: int, poll: Callable[[], int | None], grace_s: float, hurry: Callable[[], bool]
) -> None:
    """Wait for a group's leader after SIGTERM, at most ``grace_s``; then SIGKILL the group."""
    deadline = time.monotonic() + grace_s
    while poll() is None and time.monotonic() < deadline and not hurry():
        time.sleep(POLL_S)
    _signal_group(pid, signal.SIGKILL)


def _end_left(child: Child) -> None:
    if child.left is not None and time.monotonic() < child.left_until:
        _signal_group(child.left, signal.SIGKILL)
    child.left = None


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):  # macOS raises EPERM for a group of zombies
        return


def _cause(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
