"""Start the engine's process, hear where it listens, and tell how it ended."""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from runners.jobs.runtime import BadInputError, num_threads
from runners.jobs.serve.contract import EngineLostError

LISTENING = "LISTENING "  # begins the line that says where
START_SECONDS = 600.0  # a large file from a slow disk
LAST_LINES = 20
LOOK_SECONDS = 0.05
KIB = 1024
_REFUSALS = ("error loading model", "failed to load model", "invalid magic", "unknown model")


class Shape(NamedTuple):
    """What the engine is started with."""

    path: Path
    slots: int  # answered together
    tokens_per_slot: int


class EngineProcess:
    """One life of the engine."""

    def __init__(self, shape: Shape) -> None:
        self.key = secrets.token_urlsafe(24)
        self.address = ""
        self._shape = shape
        self._peak_bytes = 0
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "runners.jobs.serve.llamacpp.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._pumps = [
            threading.Thread(target=self._hear, name="engine-address", daemon=True),
            threading.Thread(target=self._pass_on, name="engine-log", daemon=True),
        ]

    @property
    def pid(self) -> int:
        """Return the process's number."""
        return self._process.pid

    def start(self) -> None:
        """Hand it its wish and wait until it listens.

        Raises:
            BadInputError: it does not open the model.
            EngineLostError: it ended, or did not come up in time.
        """
        for pump in self._pumps:
            pump.start()
        wish = {
            "path": str(self._shape.path),
            "key": self.key,
            "slots": self._shape.slots,
            "context_tokens": self._shape.slots * self._shape.tokens_per_slot,
            "threads": num_threads(),
            "parent": os.getpid(),
        }
        with suppress(OSError):  # it is gone already: why is said below
            self._stdin.write(json.dumps(wish) + "\n")
            self._stdin.flush()
        deadline = time.monotonic() + START_SECONDS
        while not self.address:
            if self._process.poll() is not None:
                self._refuse()
            if time.monotonic() > deadline:
                self.kill()
                raise EngineLostError(f"llama.cpp did not listen within {START_SECONDS:g} s")
            time.sleep(LOOK_SECONDS)

    @property
    def _stdin(self) -> IO[str]:
        if self._process.stdin is None:
            raise EngineLostError("llama.cpp has no input")
        return self._process.stdin

    def _refuse(self) -> None:
        """Say why it did not come up."""
        for pump in self._pumps:
            pump.join(1.0)
        said = next((line for line in self._last if any(w in line for w in _REFUSALS)), "")
        if said:
            words = said.partition(": ")[2] or said
            msg = f"llama.cpp does not open {self._shape.path.name}: {words[:300]}"
            raise BadInputError(msg)
        raise EngineLostError(f"llama.cpp did not start: {self.how()}")

    def wait(self) -> None:
        """Wait until it ends."""
        self._process.wait()

    def how(self) -> str:
        """Return how it ended."""
        code = self._process.returncode
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"ended with code {code}; its last words: {' / '.join(self._last)[-300:]}"

    def peak_bytes(self) -> int:
        """Return the most memory that it held; what was read last, once it is gone."""
        with suppress(OSError):
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
            found = [int(each.split()[1]) * KIB for each in lines if each.startswith("VmHWM")]
            self._peak_bytes = max([self._peak_bytes, *found])
        return self._peak_bytes

    def kill(self) -> None:
        """End it at once."""
        self.peak_bytes()
        self._process.kill()

    def _hear(self) -> None:
        for line in self._process.stdout or ():
            if line.startswith(LISTENING):
                self.address = line.removeprefix(LISTENING).strip()

    def _pass_on(self) -> None:
        for line in self._process.stderr or ():
            self._last.append(line.strip())
            sys.stderr.write(line)
