"""Start llama.cpp's process and read its listening address."""

import json
import os
import secrets
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from runners.jobs.runtime import BadInputError, num_threads
from runners.jobs.serve.contract import EngineProcessError
from runners.jobs.serve.process import OwnProcess

LISTENING = "LISTENING "  # prefix of the line with the address
START_SECONDS = 600.0  # a large file from a slow disk
LOOK_SECONDS = 0.05
_REFUSALS = (
    "error loading model", "failed to load model", "invalid magic", "unknown model",
    "failed to apply lora adapter", "failed to load lora adapter",
)  # fmt: skip


class Shape(NamedTuple):
    """The start settings of the engine."""

    path: Path
    slots: int  # sequences in parallel
    tokens_per_slot: int
    adapters: tuple[Path, ...] = ()  # GGUF files, by index


class EngineProcess(OwnProcess):
    """One life of the llama.cpp process."""

    def __init__(self, shape: Shape) -> None:
        self.key = secrets.token_urlsafe(24)
        self.address = ""
        self._shape = shape
        child = [sys.executable, "-m", "runners.jobs.serve.llamacpp.child"]
        super().__init__("llama.cpp", child)

    @property
    def has_adapters(self) -> bool:
        """Return whether requests may name adapters."""
        return bool(self._shape.adapters)

    def start(self) -> None:
        """Send the settings to the process and wait until it listens.

        Raises:
            BadInputError: it cannot load the model.
            EngineProcessError: it exited, or did not listen in time.
        """
        settings = {
            "path": str(self._shape.path),
            "key": self.key,
            "slots": self._shape.slots,
            "context_tokens": self._shape.slots * self._shape.tokens_per_slot,
            "adapters": [str(each) for each in self._shape.adapters],
            "threads": num_threads(),
            "parent": os.getpid(),
        }
        with suppress(OSError):  # it has exited already; the loop below raises
            self.stdin.write(json.dumps(settings) + "\n")
            self.stdin.flush()
        deadline = time.monotonic() + START_SECONDS
        while not self.address:
            if self.has_ended:
                self._raise_start_error()
            if time.monotonic() > deadline:
                self.kill()
                raise EngineProcessError(f"llama.cpp did not listen within {START_SECONDS:g} s")
            time.sleep(LOOK_SECONDS)

    def _raise_start_error(self) -> None:
        """Raise the error that explains the failed start."""
        error_line = next(
            (line for line in self.last_words() if any(w in line for w in _REFUSALS)), ""
        )
        if error_line:
            message = error_line.partition(": ")[2] or error_line
            msg = f"llama.cpp does not open {self._shape.path.name}: {message[:300]}"
            raise BadInputError(msg)
        raise EngineProcessError(f"llama.cpp did not start: {self.how()}")

    def handle_line(self, line: str) -> None:
        """Read the listening address; the process prints no other line."""
        if line.startswith(LISTENING):
            self.address = line.removeprefix(LISTENING).strip()
