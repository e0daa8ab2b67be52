"""Reads stored tensors into freeable memory instead of mapping their file.

Mapped pages that were read count as the process's memory, which would break memory limits.
"""

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from runners.jobs.pinned import host_copy
from runners.jobs.runtime import BadInputError

STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BYTES_TOO = {**STORED_DTYPES, "U8": torch.uint8}
HEADER_BYTES = struct.Struct("<Q")
Tensors = Mapping[str, torch.Tensor]


def in_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in host memory, pinned if it was on a GPU."""
    return host_copy(tensor) if tensor.is_cuda else tensor


def check_finite(tensors: Tensors, prefix: str) -> None:
    """Raise BadInputError for a tensor with NaN or infinity."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            msg = f"{prefix}{name} holds NaN or infinity; train or download the model again"
            raise BadInputError(msg)


class StoredTensors:
    """The tensors of a folder's safetensors files, each read into separate memory."""

    def __init__(self, folder: Path, dtypes: Mapping[str, torch.dtype] = STORED_DTYPES) -> None:
        """Open the files and read the tensors' positions.

        Raises:
            BadInputError: a tensor's dtype is not in ``dtypes`` (floats of 16 or 32 bits).
        """
        self._places: dict[str, _Place] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._places |= _places(path, dtypes)

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._places)

    def read(self, name: str, room: "Room | None" = None) -> torch.Tensor:
        """Return one tensor, in a buffer of ``room`` if given."""
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
    """Reusable read buffers; a read overwrites the previous content.

    New memory is zeroed by the system page by page, which takes as long as reading into it.
    """

    def __init__(self, key: Callable[[str], str]) -> None:
        """``key`` maps tensor names to buffers; names with equal keys share one in turn."""
        self._key = key
        self._held: dict[str, bytearray] = {}

    def of(self, name: str, num_bytes: int) -> bytearray:
        """Return the buffer of a tensor."""
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
    """Return the positions of a file's tensors; safetensors has already validated its header."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # whole tensors are read: no readahead
    length = HEADER_BYTES.unpack(os.pread(file, HEADER_BYTES.size, 0))[0]
    header = json.loads(os.pread(file, length, HEADER_BYTES.size))
    start = HEADER_BYTES.size + length
    places = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in dtypes:
            known = ", ".join(dtypes)
            msg = f"{name} is stored as {entry['dtype']}; layers are streamed from {known}"
            raise BadInputError(msg)
        begin, end = entry["data_offsets"]
        dtype, shape = dtypes[entry["dtype"]], tuple(entry["shape"])
        places[name] = _Place(file, start + begin, end - begin, dtype, shape)
    return places
