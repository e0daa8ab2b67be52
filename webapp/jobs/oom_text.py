"""The figures in what an allocator wrote when memory ran out: what it wanted, what there was."""

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


class Said(NamedTuple):
    """What the last such message says, in bytes; what it leaves out is None."""

    asked: int | None = None
    capacity: int | None = None
    free: int | None = None
    in_use: int | None = None
    unallocated: int | None = None


def read_oom(lines: Sequence[str]) -> Said:
    """Return the figures of an allocator's last message in a job's last lines."""
    text = "\n".join(lines)
    asked = next((size for each in _ASKED if (size := _last(each, text)) is not None), None)
    return Said(
        asked,
        _last(_CAPACITY, text),
        _last(_FREE, text),
        _last(_IN_USE, text),
        _last(_UNALLOCATED, text),
    )


def _last(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.findall(text)
    if not found:
        return None
    number, unit = found[-1]
    return int(float(number) * _UNITS[unit])
