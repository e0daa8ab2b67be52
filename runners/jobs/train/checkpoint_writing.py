"""Asynchronous checkpoints: a step waits only for a copy to host memory.

The file holds the state at the time of the copy. One checkpoint is written at a time, and gathered
in a process group of its own, so that its messages never mix with those of a step.
Source: Mohan et al. 2021 (CheckFreq), FAST: snapshot first, then write in the background.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from runners.jobs.memory import free_host_bytes
from runners.jobs.pinned import HostBuffers
from runners.jobs.train.checkpoint import Saved, forget_older, write_checkpoint

SPARE = 1.25  # times the copy's size has to be free, since the steps go on allocating
Tensors = dict[Any, torch.Tensor]  # by name, or by the position of a shard in its tensor


@dataclass(frozen=True)
class Staged:
    """One rank's part of a checkpoint: tables of tensors, and how to assemble the whole.

    Every rank calls ``collect`` once; only the lead gets the whole. It returns None if it has
    stored the parts elsewhere itself, as for the best weights.
    """

    parts: Mapping[str, Tensors]
    collect: Callable[[Mapping[str, Tensors]], Saved | None]

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's part."""
        return sum(each.nbytes for table in self.parts.values() for each in table.values())

    def copied(self, buffers: HostBuffers) -> "Staged":
        """Return a copy in host memory that no step changes, in buffers of former ones."""
        parts = {name: _host_copies(table, buffers) for name, table in self.parts.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # device copies are asynchronous
        return replace(self, parts=parts)

    def has_room(self, held_bytes: int = 0) -> bool:
        """Return whether the host has memory for a copy, beside buffers that are held already."""
        free = free_host_bytes()
        return free is None or self.nbytes * SPARE - held_bytes <= free


def _host_copies(table: Tensors, buffers: HostBuffers) -> Tensors:
    return {name: _host_copy(each.detach(), buffers) for name, each in table.items()}


def _host_copy(tensor: torch.Tensor, buffers: HostBuffers) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    return buffers.empty_like(tensor).copy_(tensor, non_blocking=True)


@dataclass
class CheckpointWriter:
    """Writes one rank's checkpoints, one at a time, synchronously or in the background."""

    folder: Path
    keep: int  # newest ones
    waited_seconds: float = 0.0  # time that steps waited for copies and writes
    written_seconds: float = 0.0  # total write time, synchronous or not
    copied_bytes: int = 0  # peak of the host copies
    num_written: int = 0
    no_room: str = ""  # why a background write was done synchronously
    # Pinning takes longer than a copy: buffers stay for the next checkpoint.
    _buffers: HostBuffers = field(default_factory=lambda: HostBuffers(is_pinned=True))
    _thread: threading.Thread | None = None
    _error: Exception | None = None
    _last_seconds: float = 0.0
    _num_told: int = 0

    @property
    def is_busy(self) -> bool:
        """Return whether a write is running."""
        return self._thread is not None and self._thread.is_alive()

    def write(self, staged: Staged) -> None:
        """Write one synchronously, after any write that is running.

        Raises:
            RankFailedError: another rank did not send its part in time.
            OSError: the write failed; the previous checkpoint remains.
        """
        began = time.monotonic()
        self._await()
        self._write(staged)
        self.waited_seconds += time.monotonic() - began
        self.check()

    def begin(self, staged: Staged) -> None:
        """Copy a checkpoint and write it in the background; without memory for it, write it now.

        Raises:
            RankFailedError, OSError: as in ``write``, also of the previous write.
        """
        self.check()
        if not staged.has_room(self._buffers.nbytes):
            size = staged.nbytes / 2**30
            self.no_room = f"host memory had no room for a copy of {size:.1f} GiB"
            self.write(staged)
            return
        began = time.monotonic()
        self._await()
        self.check()
        copied = staged.copied(self._buffers)
        self.copied_bytes = max(self.copied_bytes, copied.nbytes)
        self._thread = threading.Thread(
            target=self._write, args=(copied,), name="checkpoint", daemon=True
        )
        self._thread.start()
        self.waited_seconds += time.monotonic() - began

    def check(self) -> None:
        """Raise the error of a background write, if any.

        Raises:
            RankFailedError, OSError: as in ``write``.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait until the running write is complete.

        Raises:
            RankFailedError, OSError: as in ``write``.
        """
        began = time.monotonic()
        self._await()
        self.waited_seconds += time.monotonic() - began
        self.check()

    def abandon(self, patience_seconds: float) -> None:
        """Wait at most ``patience_seconds`` for the running write, after the training failed."""
        if self._thread is not None:
            self._thread.join(patience_seconds)

    def news(self) -> dict[str, float]:
        """Return the duration of the newest write as a metric, once."""
        if self.is_busy or self.num_written == self._num_told:
            return {}
        self._num_told = self.num_written
        return {"checkpoint_write_seconds": self._last_seconds}

    def figures(self) -> dict[str, float]:
        """Return the totals of all writes for the result; empty if there was none."""
        if not self.num_written:
            return {}
        return {
            "checkpoints_written": float(self.num_written),
            "checkpoint_wait_seconds": self.waited_seconds,
            "checkpoint_write_seconds": self.written_seconds,
            "checkpoint_copy_bytes": float(self.copied_bytes),
        }

    def note(self) -> str:
        """Return a note on how the checkpoints were written."""
        if self.no_room:
            return f"written in the step that they are of: {self.no_room}"
        if self.copied_bytes:
            return "copied to host memory in the step, and written in the background"
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
        except Exception as error:  # noqa: BLE001 - raised by check() in the training thread
            self._error = error
