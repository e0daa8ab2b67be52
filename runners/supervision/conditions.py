"""Reads the host's condition at an attempt's end: memory, disk, load, temperature, GPU errors.

Standard library only. Unreadable values are left out: a container may hide any of them.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from runners.supervision.cgroup import memory_headroom
from runners.supervision.procfs import PROC

KERNEL_LOG = Path("/dev/kmsg")
THERMAL = Path("/sys/class/thermal")
MAX_XIDS = 8
_RECORD_BYTES = 8192
_MILLI = 1000
_MICRO = 1_000_000
# Such as "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus." (NVIDIA, Xid Errors).
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+), (.*)")


def read(folder: Path, since_monotonic_s: float) -> dict[str, Any]:
    """Return the present conditions and the Xid errors since an instant of this boot."""
    values: dict[str, Any] = {
        **_memory(PROC / "meminfo"),
        "load": os.getloadavg()[0],
        "temperature_celsius": _hottest(THERMAL),
        "xids": list(xids(KERNEL_LOG, since_monotonic_s))[-MAX_XIDS:],
    }
    with suppress(OSError):
        disk = os.statvfs(folder)
        values["disk_free_bytes"] = disk.f_bavail * disk.f_frsize
    if (room := memory_headroom()) is not None:
        values["group_memory_available_bytes"] = room
    return {name: value for name, value in values.items() if value is not None}


def _memory(meminfo: Path) -> dict[str, int]:
    names = {"MemAvailable": "memory_available_bytes", "SwapFree": "swap_free_bytes"}
    values = {}
    with suppress(OSError, ValueError):
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in names:
                values[names[name]] = int(rest.split()[0]) * 1024
    return values


def _hottest(thermal: Path) -> float | None:
    """Return the highest temperature of the machine's sensors, in degrees Celsius."""
    degrees = []
    for zone in thermal.glob("thermal_zone*/temp"):
        with suppress(OSError, ValueError):
            degrees.append(int(zone.read_text()) / _MILLI)
    return max(degrees, default=None)


def xids(log: Path, since_monotonic_s: float) -> Iterator[str]:
    """Yield the GPU driver's Xid errors since an instant, if the kernel log is readable."""
    for record in _records(log):
        head, _, text = record.partition(";")
        at = head.split(",")[2:3]  # level, number, microseconds since boot
        match = _XID.search(text)
        if match and at and int(at[0]) / _MICRO >= since_monotonic_s:
            yield f"Xid {match[2]} on {match[1]}: {match[3][:120]}"


def _records(log: Path) -> Iterator[str]:
    """Yield the kernel log's records; the device returns one per read until its end."""
    try:
        handle = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        while True:
            try:
                data = os.read(handle, _RECORD_BYTES)
            except BrokenPipeError:  # this record was overwritten: read the next one
                continue
            except OSError:
                return
            if not data:
                return
            yield from data.decode(errors="replace").splitlines()
    finally:
        os.close(handle)
