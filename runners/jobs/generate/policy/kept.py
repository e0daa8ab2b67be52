"""A layer's keys and values off the device: in host memory or a file, brought for its turn.

Tokens come first in what is kept, so that new ones go behind the others in one piece.
"""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import DynamicLayer

from runners.jobs.generate.caches import Packed
from runners.jobs.generate.policy.places import Place, PolicyFigures

Parts = tuple[torch.Tensor, ...]


class Store(Protocol):
    """Where the tokens of one layer and micro-batch are kept; parts are [tokens, ...]."""

    place: Place

    def add(self, newer: Parts) -> None:
        """Keep more tokens behind the others."""

    def come(self) -> None:
        """Begin to bring what is kept: it is wanted soon."""

    def all_with(self, newer: Parts) -> Parts:
        """Keep more tokens, and return all of them on the device."""


class HostStore:
    """Tokens in host memory; without an accelerator that is the device's own, used in place."""

    place: Place = "host_memory"

    def __init__(self, capacity: int, figures: PolicyFigures) -> None:
        """``capacity``: the tokens that will come at most."""
        self._capacity, self._figures = capacity, figures
        self._held: Parts = ()
        self._count = 0

    def add(self, newer: Parts) -> None:
        """Keep more tokens behind the others."""
        if not self._held:
            self._held = tuple(_host_room(each, self._capacity) for each in newer)
        count = len(newer[0])
        for held, new in zip(self._held, newer, strict=True):
            held[self._count : self._count + count].copy_(new)
        self._count += count

    def come(self) -> None:
        """Nothing is begun: a copy from host memory is made when it is wanted."""

    def all_with(self, newer: Parts) -> Parts:
        """Keep more tokens, and return all of them on the device."""
        self.add(newer)
        found = tuple(each[: self._count].to(newer[0].device) for each in self._held)
        self._figures.cache_bytes += sum(each.nbytes for each in found)
        return found


class DiskStore:
    """Tokens in a file without a name; one thread reads and writes, in order."""

    place: Place = "disk"

    def __init__(
        self, folder: Path, capacity: int, thread: ThreadPoolExecutor, figures: PolicyFigures
    ) -> None:
        self._capacity, self._thread, self._figures = capacity, thread, figures
        self._owner = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - lives on
        self.file = self._owner.fileno()
        self._like: Parts = ()  # one token of each part, empty
        self._count = 0
        self._coming: Future[Parts] | None = None
        self._written: list[Future[None]] = []

    def add(self, newer: Parts) -> None:
        """Keep more tokens behind the others; they are written meanwhile.

        Raises:
            OSError: the disk took an earlier piece not whole.
        """
        if not self._like:
            self._like = tuple(torch.empty_like(each[:0], device="cpu") for each in newer)
        for each in self._written:
            if each.done():
                each.result()
        held = tuple(each.cpu().contiguous() for each in newer)
        pending = [each for each in self._written if not each.done()]
        self._written = [*pending, self._thread.submit(self._write, held, self._count)]
        self._count += len(newer[0])

    def come(self) -> None:
        """Begin to read what is kept: it is wanted soon."""
        if self._count and self._coming is None:
            self._coming = self._thread.submit(self._read, self._count)

    def all_with(self, newer: Parts) -> Parts:
        """Keep more tokens, and return all of them on the device."""
        self.come()
        old = self._count
        found = self._coming.result() if self._coming else ()
        self._coming = None
        self.add(newer)
        for whole, new in zip(found, newer, strict=True):
            whole[old : self._count].copy_(new)
        self._figures.cache_bytes += sum(each[:old].nbytes for each in found)
        device = newer[0].device
        return tuple(each[: self._count].to(device) for each in found)

    def _read(self, count: int) -> Parts:
        found = []
        for part, offset in zip(self._like, self._offsets(), strict=True):
            whole = part.new_empty((count + 1, *part.shape[1:]))  # one more comes soon
            _read_whole(self.file, _bytes_of(whole[:count]), offset)
            found.append(whole)
        return tuple(found)

    def _write(self, newer: Parts, at: int) -> None:
        for part, offset in zip(newer, self._offsets(), strict=True):
            begin = offset + at * _token_bytes(part)
            _write_whole(self.file, _bytes_of(part), begin)

    def _offsets(self) -> list[int]:
        sizes = [self._capacity * _token_bytes(each) for each in self._like]
        return [sum(sizes[:at]) for at in range(len(sizes))]


class KeptLayer(DynamicLayer):
    """The cache of one layer and micro-batch in a place off the device, in few bits or as it is.

    What a layer sees is what one on the device sees: the first keys and values as they went in,
    later all of them as they were kept.
    """

    def __init__(self, store: Store, bits: int | None) -> None:
        """``bits``: 4 or 2, None as they are."""
        super().__init__()
        self.store, self._bits = store, bits
        self._length = 0
        self.num_bytes = 0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: Any,
        **_options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep new keys and values [rows, heads, tokens, width] and return all."""
        newer = self._narrowed(key_states, value_states)
        is_first = not self._length
        self._length += key_states.shape[-2]
        self.num_bytes += sum(each.nbytes for each in newer)
        if is_first:
            self.is_initialized = True
            self.store.add(newer)
            return key_states, value_states
        whole = [each.permute(1, 2, 0, 3) for each in self.store.all_with(newer)]
        return self._widened(whole, key_states.dtype)

    def get_seq_length(self) -> int:
        """Return how many tokens are kept."""
        return self._length

    def _narrowed(self, *states: torch.Tensor) -> Parts:
        """Return what is kept of keys and values, tokens first."""
        bits = self._bits
        kept = [part for each in states for part in (Packed.of(each, bits) if bits else (each,))]
        return tuple(each.permute(2, 0, 1, 3).contiguous() for each in kept)

    def _widened(
        self, parts: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._bits:
            return parts[0], parts[1]
        half = len(Packed._fields)
        keys, values = Packed(*parts[:half]), Packed(*parts[half:])
        return keys.unpacked(self._bits, dtype), values.unpacked(self._bits, dtype)


def _host_room(like: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return room for tokens in host memory, from where a GPU can fetch them by itself."""
    shape = (capacity, *like.shape[1:])
    return torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)


def _token_bytes(part: torch.Tensor) -> int:
    return prod(part.shape[1:]) * part.element_size()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous tensor's memory."""
    return tensor.view(torch.uint8).numpy().reshape(-1).data


def _read_whole(file: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if not count:
            msg = f"the cache's file ends {len(view) - done} bytes early"
            raise OSError(msg)
        done += count


def _write_whole(file: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(file, view[done:], offset + done)
