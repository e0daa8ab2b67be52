"""Checkpoints that are written beside the steps: a step waits for a copy in host memory alone.

What is written is the state of the step at which it was copied, however far the steps have come
by the time that it stands on disk. One is written at a time; on the way there it is gathered in
a group of its own, so that its messages never mix with those of a step.
Source: Mohan et al. 2021 (CheckFreq), FAST, for copying first and writing beside.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from runners.jobs.memory import free_host_bytes
from runners.jobs.train.checkpoint import Saved, forget_older, write_checkpoint

SPARE = 1.25  # of the memory that a copy takes must be free, as the steps go on allocating
Tensors = dict[Any, torch.Tensor]  # by name, or by the box of a whole tensor that a part is


@dataclass(frozen=True)
class Staged:
    """One rank's part of a checkpoint: tables of tensors, and how the ranks make a whole of them.

    ``collect`` is called once by every rank, and gives the whole to the lead alone; it gives
    nothing where it has put the parts elsewhere itself, as the best weights are.
    """

    parts: Mapping[str, Tensors]
    collect: Callable[[Mapping[str, Tensors]], Saved | None]

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's part."""
        return sum(each.nbytes for table in self.parts.values() for each in table.values())

    def copied(self) -> "Staged":
        """Return the same with tensors of its own in host memory, which no step changes."""
        parts = {name: _host_copies(table) for name, table in self.parts.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies from the device go on by themselves till then
        return replace(self, parts=parts)

    def has_room(self) -> bool:
        """Tell whether the host has memory for a copy; unknown counts as room."""
        free = free_host_bytes()
        return free is None or self.nbytes * SPARE <= free


def _host_copies(table: Tensors) -> Tensors:
    return {name: _host_copy(each.detach()) for name, each in table.items()}


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return found.copy_(tensor, non_blocking=True)


@dataclass
class CheckpointWriter:
    """Writes one rank's checkpoints, one at a time, in the step or beside it."""

    folder: Path
    keep: int  # newest ones
    waited_seconds: float = 0.0  # by the steps, for copies and writes
    written_seconds: float = 0.0  # until whole ones stood, whoever waited
    copied_bytes: int = 0  # at most held beside the states
    num_written: int = 0
    no_room: str = ""  # why one was written in its step, though asked for beside
    _thread: threading.Thread | None = None
    _error: Exception | None = None
    _last_seconds: float = 0.0
    _num_told: int = 0

    @property
    def is_busy(self) -> bool:
        """Tell whether one is being written."""
        return self._thread is not None and self._thread.is_alive()

    def write(self, staged: Staged) -> None:
        """Write one, and return when it stands whole; one that is under way comes first.

        Raises:
            RankLostError: another rank did not send its part in time.
            OSError: it could not be written; the one before stands.
        """
        began = time.monotonic()
        self._await()
        self._write(staged)
        self.waited_seconds += time.monotonic() - began
        self.check()

    def begin(self, staged: Staged) -> None:
        """Copy one and have it written beside the next steps; without room for it, write it.

        Raises:
            RankLostError, OSError: as ``write`` does, also of the one before.
        """
        self.check()
        if not staged.has_room():
            size = staged.nbytes / 2**30
            self.no_room = f"host memory had no room for a copy of {size:.1f} GiB"
            self.write(staged)
            return
        began = time.monotonic()
        self._await()
        self.check()
        copied = staged.copied()
        self.copied_bytes = max(self.copied_bytes, copied.nbytes)
        self._thread = threading.Thread(
            target=self._write, args=(copied,), name="checkpoint", daemon=True
        )
        self._thread.start()
        self.waited_seconds += time.monotonic() - began

    def check(self) -> None:
        """Raise what ended a write that nobody waited for.

        Raises:
            RankLostError, OSError: as ``write`` does.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait until what is under way stands.

        Raises:
            RankLostError, OSError: as ``write`` does.
        """
        began = time.monotonic()
        self._await()
        self.waited_seconds += time.monotonic() - began
        self.check()

    def abandon(self, patience_seconds: float) -> None:
        """Give what is under way so long to stand: the training has ended with an error."""
        if self._thread is not None:
            self._thread.join(patience_seconds)

    def news(self) -> dict[str, float]:
        """Return the seconds of the newest write as a metric, once."""
        if self.is_busy or self.num_written == self._num_told:
            return {}
        self._num_told = self.num_written
        return {"checkpoint_write_seconds": self._last_seconds}

    def figures(self) -> dict[str, float]:
        """Return what all of them took, for the result; nothing where there was none."""
        if not self.num_written:
            return {}
        return {
            "checkpoints_written": float(self.num_written),
            "checkpoint_wait_seconds": self.waited_seconds,
            "checkpoint_write_seconds": self.written_seconds,
            "checkpoint_copy_bytes": float(self.copied_bytes),
        }

    def note(self) -> str:
        """Return in words how they were written."""
        if self.no_room:
            return f"written in the step that they are of: {self.no_room}"
        if self.copied_bytes:
            return "copied to host memory in the step, and written beside the steps after it"
        return "written in the step that they are of"

    def _await(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, staged: Staged) -> None:
        began = time.monotonic()
        try:
            saved = staged.collect(staged.parts)
            if saved is not None:
                write_checkpoint(self.folder, saved)
                forget_older(self.folder, self.keep)
                self.num_written += 1
                self._last_seconds = time.monotonic() - began
                self.written_seconds += self._last_seconds
        except Exception as error:  # noqa: BLE001 - raised where the steps are: see check
            self._error = error
