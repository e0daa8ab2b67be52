"""One life of an engine that is a process of its own: its words, its memory, how it ended."""

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from runners.jobs.serve.contract import EngineLostError
from runners.programs import heard

LAST_LINES = 20
KIB = 1024
PROC = Path("/proc")
_GROUP_AT = 2  # field of /proc/PID/stat, after the name in brackets and the state


class OwnProcess:
    """A started engine; what it writes to stderr is passed on and its last lines are kept.

    It is the first of a process group of its own, so that it ends with all that it started.
    """

    def __init__(
        self, title: str, argv: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        self.title = title
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._peak_bytes = 0
        self._process = heard(argv, env, stdin=subprocess.PIPE, has_own_group=True)
        self._pumps = [
            threading.Thread(target=pump, name=f"engine-{name}", daemon=True)
            for name, pump in (("out", self._listen), ("log", self._pass_on))
        ]
        for each in self._pumps:
            each.start()

    @property
    def pid(self) -> int:
        """Return the process's number."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Return whether it is gone."""
        return self._process.poll() is not None

    @property
    def code(self) -> int | None:
        """Return its exit status, below 0 for a signal, or None while it runs."""
        return self._process.returncode

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until it ends, at most so long; return whether it did."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)
        return self.has_ended

    def how(self) -> str:
        """Return how it ended."""
        code = self.code
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"ended with code {code}; its last words: {' / '.join(self.last)[-300:]}"

    def last_words(self) -> list[str]:
        """Return its last lines, once all of them came in."""
        for pump in self._pumps:
            pump.join(1.0)
        return list(self.last)

    def peak_bytes(self) -> int:
        """Return the most that each process of its group held, summed; last known, once gone."""
        held = sum(_memory(pid) for pid in _group(self.pid))
        self._peak_bytes = max(self._peak_bytes, held)
        return self._peak_bytes

    def kill(self) -> None:
        """End it at once, with all that it started."""
        self.peak_bytes()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def hear(self, line: str) -> None:
        """Take a line that it writes to stdout."""
        self.take(line)

    def take(self, line: str) -> None:
        """Keep a line, and pass it on to the job's log."""
        self.last.append(line.strip())
        sys.stderr.write(line)

    @property
    def stdin(self) -> IO[str]:
        """Return where it reads.

        Raises:
            EngineLostError: it has no input.
        """
        if self._process.stdin is None:
            raise EngineLostError(f"{self.title} has no input")
        return self._process.stdin

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            self.hear(line)

    def _pass_on(self) -> None:
        for line in self._process.stderr or ():
            self.take(line)


def _group(leader: int) -> Iterator[int]:
    """Yield the live processes of a group."""
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[_GROUP_AT]) == leader:
                    yield int(folder.name)


def _memory(pid: int) -> int:
    """Return the most resident memory that a process had; 0 once it is gone."""
    with suppress(OSError):
        lines = (PROC / str(pid) / "status").read_text().splitlines()
        peaks = [int(each.split()[1]) * KIB for each in lines if each.startswith("VmHWM:")]
        return max(peaks, default=0)
    return 0
