"""Pinned host memory of exactly the size that was asked for.

torch's own (``pin_memory=True``) rounds each tensor up to a power of two and keeps it when it is
freed (``CachingHostAllocator.h``, torch 2.13): 36 GiB of weights could take 64. Here ordinary
pages are registered with the driver, and are given back with the last tensor on them.
"""

import contextlib
import ctypes
import math
import mmap
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class _Pages(mmap.mmap):
    """Anonymous pages, registered with the driver as long as they exist."""

    is_registered = False

    def __del__(self) -> None:
        if self.is_registered:
            with contextlib.suppress(Exception):  # the driver may be gone as the process ends
                torch.cuda.synchronize()  # a copy may still read or write them
                _unregister(_address(self))


def host_empty(shape: Sequence[int], dtype: torch.dtype, *, is_pinned: bool) -> torch.Tensor:
    """Return uninitialised host memory, pinned for the GPU or plain.

    Memory that the driver does not pin, as above a limit of locked pages, is plain: copies are
    then slower and wait, and hold the same.
    """
    count = math.prod(shape)
    if not is_pinned or not count:
        return torch.empty(tuple(shape), dtype=dtype)
    pages = _Pages(-1, count * dtype.itemsize)
    pages.is_registered = _register(_address(pages), len(pages))
    return torch.frombuffer(pages, dtype=dtype, count=count).view(tuple(shape))


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, pinned if the tensor is on a GPU; the copy is complete."""
    copy = host_empty(tensor.shape, tensor.dtype, is_pinned=tensor.is_cuda)
    return copy.copy_(tensor)


def _address(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def _register(address: int, size: int) -> bool:
    """Register pages with the CUDA or HIP driver; return whether it did."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(cudart.cudaHostRegister(address, size, PORTABLE)) == 0


def _unregister(address: int) -> None:
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostUnregister(address)


class HostBuffers:
    """Pinned buffers that are used again by tensors of the same size, such as each step's.

    A buffer is free again when the last tensor on it is. Copies into and out of it are ordered by
    the current stream.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._free: dict[int, list[torch.Tensor]] = {}
        self.nbytes = 0  # of all buffers, free or not

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous host tensor of this shape and dtype."""
        free = self._free.setdefault(tensor.nbytes, [])
        if not free:
            free.append(host_empty((tensor.nbytes,), torch.uint8, is_pinned=self._is_pinned))
            self.nbytes += tensor.nbytes
        buffer = free.pop()
        view = buffer.view(tensor.dtype).view(tensor.shape)
        weakref.finalize(view, free.append, buffer)
        return view


@contextlib.contextmanager
def activations_in_host(
    buffers: HostBuffers, kept: frozenset[int], smallest_bytes: int
) -> Iterator[None]:
    """Hold what the block's forward passes save for their backward passes in host memory.

    ``kept`` are the addresses of storages that stay, such as the weights', and so do tensors
    below ``smallest_bytes``. As ``torch.autograd.graph.save_on_cpu``, in buffers of its size.
    """

    def pack(tensor: torch.Tensor) -> torch.Tensor | tuple[torch.device, torch.Tensor]:
        is_kept = tensor.untyped_storage().data_ptr() in kept
        if is_kept or tensor.nbytes < smallest_bytes:
            return tensor
        host = buffers.empty_like(tensor)
        host.copy_(tensor.detach(), non_blocking=True)
        return tensor.device, host

    def unpack(packed: torch.Tensor | tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        device, host = packed
        return host.clone() if host.device == device else host.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
