"""Stored tensors read into memory that is given back, not mapped from their file.

A mapped file counts as the process's own memory as soon as it was read once, and no limit
would hold.
"""

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from runners.jobs.runtime import BadInputError

STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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

    def __init__(self, folder: Path) -> None:
        """Open the files and read what is where.

        Raises:
            BadInputError: a tensor is stored as something else than a float of 16 or 32 bits.
        """
        self._places: dict[str, _Place] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._places |= _places(path)

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._places)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        place = self._places[name]
        data = bytearray(place.num_bytes)
        view = memoryview(data)
        done = 0
        while done < len(data):
            count = os.preadv(place.file, [view[done:]], place.offset + done)
            if not count:
                msg = f"the file of {name} became shorter while it was read; copy it again"
                raise BadInputError(msg)
            done += count
        return torch.frombuffer(data, dtype=place.dtype).reshape(place.shape)


@dataclass(frozen=True)
class _Place:
    file: int
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _places(path: Path) -> dict[str, _Place]:
    """Return where a file's tensors are; its header was read by safetensors before."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    length = HEADER_BYTES.unpack(os.pread(file, HEADER_BYTES.size, 0))[0]
    header = json.loads(os.pread(file, length, HEADER_BYTES.size))
    start = HEADER_BYTES.size + length
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in STORED_DTYPES:
            known = ", ".join(STORED_DTYPES)
            msg = f"{name} is stored as {entry['dtype']}; layers are streamed from {known}"
            raise BadInputError(msg)
        begin, end = entry["data_offsets"]
        dtype, shape = STORED_DTYPES[entry["dtype"]], tuple(entry["shape"])
        found[name] = _Place(file, start + begin, end - begin, dtype, shape)
    return found
