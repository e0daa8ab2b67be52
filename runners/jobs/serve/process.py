"""Engine processes: one life, its output, memory and exit; waiting, closing and failure."""

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from planner.specs.units import KIB
from runners.jobs.serve.contract import BoundedEngine, EngineProcessError, Limits
from runners.supervision import procfs
from runners.supervision.child import start_text_process

LAST_LINES = 20
MARKER = "SLIPWAY_ENGINE_PROCESS"
PROC = Path("/proc")
_GROUP_AT = 2  # field of /proc/PID/stat, after the name in brackets and the state


class OwnProcess:
    """A started engine process; its stderr is forwarded and the last lines are kept.

    It leads its own process group, and a variable of its environment marks what it starts: killing
    it also kills those, in whatever session they are.
    """

    def __init__(
        self, title: str, argv: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        self.title = title
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._peak_bytes = 0
        self._mark = secrets.token_hex(16)
        env = {**(os.environ if env is None else env), MARKER: self._mark}
        self._process = start_text_process(argv, env, stdin=subprocess.PIPE, has_own_group=True)
        self._pumps = [
            threading.Thread(target=pump, name=f"engine-{name}", daemon=True)
            for name, pump in (("out", self._read_stdout), ("log", self._read_stderr))
        ]
        for each in self._pumps:
            each.start()

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Return whether the process has exited."""
        return self._process.poll() is not None

    @property
    def code(self) -> int | None:
        """Return the exit status, negative for a signal, or None while it runs."""
        return self._process.returncode

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the process exits, at most ``timeout_seconds``; return whether it did."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)
        return self.has_ended

    def how(self) -> str:
        """Return how the process exited."""
        code = self.code
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"ended with code {code}; its last words: {' / '.join(self.last)[-300:]}"

    def last_output_lines(self) -> list[str]:
        """Return the last output lines, after all output was read."""
        for pump in self._pumps:
            pump.join(1.0)
        return list(self.last)

    def peak_bytes(self) -> int:
        """Return the peak memory of each process of the group, summed; last known after exit."""
        peak = sum(_memory(pid) for pid in _group(self.pid))
        self._peak_bytes = max(self._peak_bytes, peak)
        return self._peak_bytes

    def kill(self) -> None:
        """Kill the process at once, with every process it started."""
        self.peak_bytes()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        procfs.kill_marked(MARKER, self._mark)

    def handle_line(self, line: str) -> None:
        """Handle a line of stdout."""
        self.take(line)

    def take(self, line: str) -> None:
        """Keep a line and forward it to the job's log."""
        self.last.append(line.strip())
        sys.stderr.write(line)

    @property
    def stdin(self) -> IO[str]:
        """Return the process's stdin.

        Raises:
            EngineProcessError: the process has no stdin.
        """
        if self._process.stdin is None:
            raise EngineProcessError(f"{self.title} has no stdin")
        return self._process.stdin

    def _read_stdout(self) -> None:
        for line in self._process.stdout or ():
            self.handle_line(line)

    def _read_stderr(self) -> None:
        for line in self._process.stderr or ():
            self.take(line)


def _group(leader: int) -> Iterator[int]:
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[_GROUP_AT]) == leader:
                    yield int(folder.name)


def _memory(pid: int) -> int:
    """Return a process's peak resident memory; 0 after it exited."""
    with suppress(OSError):
        lines = (PROC / str(pid) / "status").read_text().splitlines()
        peaks = [int(each.split()[1]) * KIB for each in lines if each.startswith("VmHWM:")]
        return max(peaks, default=0)
    return 0


# The base of engines that run in processes of their own: closing and failure.


class EngineLife(Protocol):
    """The life of an engine process, or of several."""

    @property
    def title(self) -> str:
        """Return the engine's title; of several, that of the one that exited."""

    def how(self) -> str:
        """Return how it exited."""

    def kill(self) -> None:
        """Kill it at once, with every process it started."""


class ProcessEngine(BoundedEngine):
    """One life of an engine in its own process."""

    def __init__(self, process: EngineLife, limits: Limits) -> None:
        super().__init__(limits)
        self._life = process

    def close(self) -> None:
        """Kill the engine; unfinished answers end with an error."""
        self.is_closed = True
        self._life.kill()

    def ended(self) -> None:
        """Clean up after the process exited.

        Raises:
            EngineProcessError: the process exited without having been closed.
        """
        self._life.kill()  # also kills the processes it started
        if not self.is_closed:
            self.is_closed = True
            raise EngineProcessError(f"{self._life.title} {self._life.how()}")
