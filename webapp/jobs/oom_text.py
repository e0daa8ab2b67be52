"""Parse allocator messages on exhausted memory: requested, total and free bytes."""

import re
from collections.abc import Sequence
from typing import NamedTuple

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([0-9]+(?:\.[0-9]+)?) (bytes|[KMGT]iB)"
_ASKED = (
    re.compile(rf"[Tt]ried to allocate {_SIZE}"),  # torch, both allocators
    re.compile(rf"Unable to allocate {_SIZE}"),  # numpy
    re.compile(rf"allocating {_SIZE} on device"),  # llama.cpp
    re.compile(rf"memory allocation of {_SIZE} failed"),  # Rust
)
_CAPACITY = re.compile(rf"total capaci?ty of {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_IN_USE = re.compile(rf"this process has {_SIZE} memory in use")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")


class OutOfMemoryFigures(NamedTuple):
    """The figures of the last such message, in bytes; None if not stated."""

    asked: int | None = None
    capacity: int | None = None
    free: int | None = None
    in_use: int | None = None
    unallocated: int | None = None


def read_oom(lines: Sequence[str]) -> OutOfMemoryFigures:
    """Return the figures of the last allocator message in a job's last lines."""
    text = "\n".join(lines)
    requested = next((size for each in _ASKED if (size := _last(each, text)) is not None), None)
    return OutOfMemoryFigures(
        requested,
        _last(_CAPACITY, text),
        _last(_FREE, text),
        _last(_IN_USE, text),
        _last(_UNALLOCATED, text),
    )


def _last(pattern: re.Pattern[str], text: str) -> int | None:
    matches = pattern.findall(text)
    if not matches:
        return None
    number, unit = matches[-1]
    return int(float(number) * _UNITS[unit])
