"""One stage's process, seen from the proof: its records as they come, and how it ended."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from runners.prove import reaper
from runners.prove.report import RECORD, Record, StageState

MAX_ERROR = 600
MAX_BAD_LINE = 200
READ_BYTES = 2**16
TICK_SECONDS = 0.5
KILL_SECONDS = 5.0  # later, what a driver still holds is left to the reaper
REMOVAL_SECONDS = 60.0  # of the scratch folder, after the end of the tree


class StageProcess:
    """A stage that runs under its reaper: when it ends or is stopped, so does its whole tree.

    ``scratch`` is the folder that the reaper removes at the end. ``seconds`` limits the stage.
    """

    def __init__(self, argv: Sequence[str], scratch: Path, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._killed_at: float | None = None
        self._stopped_by: signal.Signals | None = None
        self._bad_line: str | None = None
        self._last = ""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._reaper = subprocess.Popen(
            [sys.executable, "-S", "-E", reaper.__file__, str(scratch), *argv],
            stdin=subprocess.PIPE,  # it closes if this process dies, however it dies
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # the terminal's Ctrl-C reaches the proof's command alone
        )

    def __enter__(self) -> "StageProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._wait()
        for each in (self._reaper.stdin, self._reaper.stdout, self._errors):
            if each is not None:
                each.close()

    def stop(self, by: signal.Signals) -> None:
        """End the stage for this signal; may be called from a signal's handler."""
        self._stopped_by = by
        self._kill()

    def records(self) -> Iterator[Record]:
        """Yield records until the whole tree has ended; it is killed at the deadline."""
        for line in self._lines():
            try:
                record = RECORD.validate_json(line)
            except ValidationError:
                self._bad_line = line.decode(errors="replace")[:MAX_BAD_LINE]
                continue
            self._last = record.name
            yield record

    def _lines(self) -> Iterator[bytes]:
        pipe = self._reaper.stdout
        if pipe is None:
            return
        poller = select.poll()
        poller.register(pipe, select.POLLIN)
        rest = b""
        while not self._is_given_up():
            if poller.poll(1000 * self._tick()):
                data = os.read(pipe.fileno(), READ_BYTES)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                yield from lines
            elif self._reaper.poll() is not None:  # killed: a process of the tree has the pipe
                break
            if self._killed_at is None and time.monotonic() >= self._deadline:
                self._kill()
        if rest:
            yield rest

    def _tick(self) -> float:
        return min(TICK_SECONDS, max(0.0, self._deadline - time.monotonic()) or TICK_SECONDS)

    def _is_given_up(self) -> bool:
        return self._killed_at is not None and time.monotonic() > self._killed_at + KILL_SECONDS

    def _kill(self) -> None:
        self._killed_at = self._killed_at or time.monotonic()
        self._reaper.send_signal(signal.SIGTERM)

    def _wait(self) -> int | None:
        """Return the code with which the stage ended, or None if its tree cannot be ended."""
        if self._reaper.returncode is not None:
            return self._reaper.returncode
        seconds = REMOVAL_SECONDS
        if self._killed_at is not None:
            seconds = max(0.0, self._killed_at + KILL_SECONDS - time.monotonic())
        try:
            code = self._reaper.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        if code == -signal.SIGKILL:  # perhaps the reaper itself was killed
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._reaper.pid, signal.SIGKILL)
        return code

    def end(self) -> tuple[StageState, str | None]:
        """Return the stage's state and, if it was cut or failed, why."""
        code = self._wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        words = lines[-1][:MAX_ERROR] if lines else ""
        last = f"; the last that it said is: {self._last}" if self._last else ""
        if code is None:
            words = f"Not all of its processes have ended. {words}"
        if self._stopped_by is not None and code != 0:
            stop = f"the proof was stopped by {self._stopped_by.name}"
            return "cut", f"{stop}{last}. {words}".strip()
        if self._killed_at is not None or code is None:
            return "cut", f"it was killed after {self._seconds:.0f} s{last}. {words}".strip()
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            return "failed", f"its process died by {name}. {words}"
        if code:
            return "failed", f"its process ended with code {code}. {words}"
        if self._bad_line is not None:
            return "failed", f"it printed a line that is no record: {self._bad_line}"
        return "done", None
