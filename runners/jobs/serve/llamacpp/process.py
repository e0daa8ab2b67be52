"""Start llama.cpp's process and hear where it listens."""

import json
import os
import secrets
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from runners.jobs.runtime import BadInputError, num_threads
from runners.jobs.serve.contract import EngineLostError
from runners.jobs.serve.process import OwnProcess

LISTENING = "LISTENING "  # begins the line that says where
START_SECONDS = 600.0  # a large file from a slow disk
LOOK_SECONDS = 0.05
_REFUSALS = (
    "error loading model", "failed to load model", "invalid magic", "unknown model",
    "failed to apply lora adapter", "failed to load lora adapter",
)  # fmt: skip


class Shape(NamedTuple):
    """What the engine is started with."""

    path: Path
    slots: int  # answered together
    tokens_per_slot: int
    adapters: tuple[Path, ...] = ()  # GGUF files, by their number


class EngineProcess(OwnProcess):
    """One life of llama.cpp."""

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
        """Hand it its wish and wait until it listens.

        Raises:
            BadInputError: it does not open the model.
            EngineLostError: it ended, or did not come up in time.
        """
        wish = {
            "path": str(self._shape.path),
            "key": self.key,
            "slots": self._shape.slots,
            "context_tokens": self._shape.slots * self._shape.tokens_per_slot,
            "adapters": [str(each) for each in self._shape.adapters],
            "threads": num_threads(),
            "parent": os.getpid(),
        }
        with suppress(OSError):  # it is gone already: why is said below
            self.stdin.write(json.dumps(wish) + "\n")
            self.stdin.flush()
        deadline = time.monotonic() + START_SECONDS
        while not self.address:
            if self.has_ended:
                self._refuse()
            if time.monotonic() > deadline:
                self.kill()
                raise EngineLostError(f"llama.cpp did not listen within {START_SECONDS:g} s")
            time.sleep(LOOK_SECONDS)

    def _refuse(self) -> None:
        """Say why it did not come up."""
        said = next((line for line in self.last_words() if any(w in line for w in _REFUSALS)), "")
        if said:
            words = said.partition(": ")[2] or said
            msg = f"llama.cpp does not open {self._shape.path.name}: {words[:300]}"
            raise BadInputError(msg)
        raise EngineLostError(f"llama.cpp did not start: {self.how()}")

    def hear(self, line: str) -> None:
        """Take the line that says where it listens; it has no other to say."""
        if line.startswith(LISTENING):
            self.address = line.removeprefix(LISTENING).strip()
