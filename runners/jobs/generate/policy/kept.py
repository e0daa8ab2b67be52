"""An offloaded KV cache of one layer, in host memory or a file, prefetched for its turn.

Tokens are the first dimension, so that new ones are appended contiguously.
"""

# mypy: disable-error-code="no-untyped-call"
# torch ships types, but leaves some of its functions untyped.

import os
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import DynamicLayer

from runners.jobs.generate.caches import Packed
from runners.jobs.generate.policy.places import Place, PolicyFigures
from runners.jobs.pinned import host_empty

Parts = tuple[torch.Tensor, ...]


class Store(Protocol):
    """Storage for the tokens of one layer and micro-batch; parts are [tokens, ...]."""

    place: Place

    def add(self, newer: Parts) -> None:
        """Append tokens."""

    def come(self) -> None:
        """Start to prefetch the stored tokens."""

    def all_with(self, newer: Parts) -> Parts:
        """Append tokens, and return all of them on the device."""


class HostStore:
    """Tokens in host memory; without an accelerator that is the device's memory, used in place."""

    place: Place = "host_memory"

    def __init__(self, capacity: int, figures: PolicyFigures) -> None:
        """``capacity``: the maximum number of tokens."""
        self._capacity, self._figures = capacity, figures
        self._tokens: Parts = ()
        self._count = 0

    def add(self, newer: Parts) -> None:
        """Append tokens."""
        if not self._tokens:
            self._tokens = tuple(_host_room(each, self._capacity) for each in newer)
        count = len(newer[0])
        for buffer, new in zip(self._tokens, newer, strict=True):
            buffer[self._count : self._count + count].copy_(new)
        self._count += count

    def come(self) -> None:
        """Do nothing: copies from host memory are made on use."""

    def all_with(self, newer: Parts) -> Parts:
        """Append tokens, and return all of them on the device."""
        self.add(newer)
        tokens = tuple(each[: self._count].to(newer[0].device) for each in self._tokens)
        self._figures.cache_bytes += sum(each.nbytes for each in tokens)
        return tokens


class DiskStore:
    """Tokens in an unnamed file; one thread reads and writes, in order."""

    place: Place = "disk"

    def __init__(
        self, folder: Path, capacity: int, thread: ThreadPoolExecutor, figures: PolicyFigures
    ) -> None:
        self._capacity, self._thread, self._figures = capacity, thread, figures
        self._owner = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - lives on
        weakref.finalize(self, self._owner.close)
        self.file = self._owner.fileno()
        self._templates: Parts = ()  # one token of each part, empty
        self._count = 0
        self._prefetch: Future[Parts] | None = None
        self._written: list[Future[None]] = []

    def add(self, newer: Parts) -> None:
        """Append tokens; the thread writes them.

        Raises:
            OSError: an earlier write failed.
        """
        if not self._templates:
            self._templates = tuple(torch.empty_like(each[:0], device="cpu") for each in newer)
        for each in self._written:
            if each.done():
                each.result()
        buffer = tuple(each.cpu().contiguous() for each in newer)
        pending = [each for each in self._written if not each.done()]
        self._written = [*pending, self._thread.submit(self._write, buffer, self._count)]
        self._count += len(newer[0])

    def come(self) -> None:
        """Start to read the stored tokens."""
        if self._count and self._prefetch is None:
            self._prefetch = self._thread.submit(self._read, self._count)

    def all_with(self, newer: Parts) -> Parts:
        """Append tokens, and return all of them on the device."""
        self.come()
        old = self._count
        tokens = self._prefetch.result() if self._prefetch else ()
        self._prefetch = None
        self.add(newer)
        for whole, new in zip(tokens, newer, strict=True):
            whole[old : self._count].copy_(new)
        self._figures.cache_bytes += sum(each[:old].nbytes for each in tokens)
        device = newer[0].device
        return tuple(each[: self._count].to(device) for each in tokens)

    def _read(self, count: int) -> Parts:
        parts = []
        for part, offset in zip(self._templates, self._offsets(), strict=True):
            whole = part.new_empty((count + 1, *part.shape[1:]))  # room for the next token
            _read_whole(self.file, _bytes_of(whole[:count]), offset)
            parts.append(whole)
        return tuple(parts)

    def _write(self, newer: Parts, at: int) -> None:
        for part, offset in zip(newer, self._offsets(), strict=True):
            begin = offset + at * _token_bytes(part)
            _write_whole(self.file, _bytes_of(part), begin)

    def _offsets(self) -> list[int]:
        sizes = [self._capacity * _token_bytes(each) for each in self._templates]
        return [sum(sizes[:at]) for at in range(len(sizes))]


class KeptLayer(DynamicLayer):
    """The offloaded cache of one layer and micro-batch, plain or in few bits.

    The layer gets the same as from a cache on the device: the first keys and values unquantised,
    later all of them as stored.
    """

    def __init__(self, store: Store, bits: int | None) -> None:
        """``bits``: 4 or 2; None: not quantised."""
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
        """Append keys and values [rows, heads, tokens, width] and return all."""
        newer = self._stored_form(key_states, value_states)
        is_first = not self._length
        self._length += key_states.shape[-2]
        self.num_bytes += sum(each.nbytes for each in newer)
        if is_first:
            self.is_initialized = True
            self.store.add(newer)
            return key_states, value_states
        whole = [each.permute(1, 2, 0, 3) for each in self.store.all_with(newer)]
        return self._restored(whole, key_states.dtype)

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        return self._length

    def _stored_form(self, *states: torch.Tensor) -> Parts:
        """Return keys and values as they are stored, tokens first."""
        bits = self._bits
        stored = [part for each in states for part in (Packed.of(each, bits) if bits else (each,))]
        return tuple(each.permute(2, 0, 1, 3).contiguous() for each in stored)

    def _restored(
        self, parts: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._bits:
            return parts[0], parts[1]
        half = len(Packed._fields)
        keys, values = Packed(*parts[:half]), Packed(*parts[half:])
        return keys.unpacked(self._bits, dtype), values.unpacked(self._bits, dtype)


def _host_room(like: torch.Tensor, capacity: int) -> torch.Tensor:
    """Allocate host memory for tokens, pinned if the source is on a GPU."""
    shape = (capacity, *like.shape[1:])
    return host_empty(shape, like.dtype, is_pinned=like.is_cuda)


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
