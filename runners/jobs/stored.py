"""Stored tensors read into memory that is given back, not mapped from their file.

A mapped file counts as the process's own memory as soon as it was read once, and no limit
would hold.
"""

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from runners.jobs.runtime import BadInputError

STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BYTES_TOO = {**STORED_DTYPES, "U8": torch.uint8}
HEADER_BYTES = struct.Struct("<Q")
Tensors = Mapping[str, torch.Tensor]


def in_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in host memory, from where a GPU can fetch it by itself."""
    held = tensor.cpu()
    return held.pin_memory() if tensor.is_cuda else held


def check_finite(tensors: Tensors, prefix: str) -> None:
    """Raise BadInputError for a tensor with NaN or infinity."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            msg = f"{prefix}{name} holds NaN or infinity; train or download the model again"
            raise BadInputError(msg)


class StoredTensors:
    """The tensors of a folder's safetensors files, each read into memory of its own."""

    def __init__(self, folder: Path, dtypes: Mapping[str, torch.dtype] = STORED_DTYPES) -> None:
        """Open the files and read what is where.

        Raises:
            BadInputError: a tensor is stored as something else than ``dtypes`` has, floats of
                16 or 32 bits.
        """
        self._places: dict[str, _Place] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._places |= _places(path, dtypes)

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._places)

    def read(self, name: str, room: "Room | None" = None) -> torch.Tensor:
        """Return one tensor, in the memory that ``room`` has for it where there is one."""
        place = self._places[name]
        data = room.of(name, place.num_bytes) if room else bytearray(place.num_bytes)
        view = memoryview(data)
        done = 0
        while done < len(data):
            count = os.preadv(place.file, [view[done:]], place.offset + done)
            if not count:
                msg = f"the file of {name} became shorter while it was read; copy it again"
                raise BadInputError(msg)
            done += count
        return torch.frombuffer(data, dtype=place.dtype).reshape(place.shape)


class Room:
    """Memory that is read into again and again: what was there before is gone then.

    Fresh memory is cleared by the system page by page, which takes as long as reading into it.
    """

    def __init__(self, key: Callable[[str], str]) -> None:
        """``key`` gives names the same one where they may have the same memory in turn."""
        self._key = key
        self._held: dict[str, bytearray] = {}

    def of(self, name: str, num_bytes: int) -> bytearray:
        """Return the memory of a tensor."""
        key = self._key(name)
        if len(self._held.get(key, b"")) != num_bytes:
            self._held[key] = bytearray(num_bytes)
        return self._held[key]


@dataclass(frozen=True)
class _Place:
    file: int
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _places(path: Path, dtypes: Mapping[str, torch.dtype]) -> dict[str, _Place]:
    """Return where a file's tensors are; its header was read by safetensors before."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # whole tensors: reading on would be waste
    length = HEADER_BYTES.unpack(os.pread(file, HEADER_BYTES.size, 0))[0]
    header = json.loads(os.pread(file, length, HEADER_BYTES.size))
    start = HEADER_BYTES.size + length
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in dtypes:
            known = ", ".join(dtypes)
            msg = f"{name} is stored as {entry['dtype']}; layers are streamed from {known}"
            raise BadInputError(msg)
        begin, end = entry["data_offsets"]
        dtype, shape = dtypes[entry["dtype"]], tuple(entry["shape"])
        found[name] = _Place(file, start + begin, end - begin, dtype, shape)
    return found
