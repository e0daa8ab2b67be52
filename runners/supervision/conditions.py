"""How the machine was at the end of an attempt: memory, disk, load, heat, reports of the driver.

Standard library only. What cannot be read is left out: a container may hide any of it.
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
    """Return the conditions now, with the driver's reports since an instant of this boot."""
    found: dict[str, Any] = {
        **_memory(PROC / "meminfo"),
        "load": os.getloadavg()[0],
        "temperature_celsius": _hottest(THERMAL),
        "xids": list(xids(KERNEL_LOG, since_monotonic_s))[-MAX_XIDS:],
    }
    with suppress(OSError):
        disk = os.statvfs(folder)
        found["disk_free_bytes"] = disk.f_bavail * disk.f_frsize
    if (room := memory_headroom()) is not None:
        found["group_memory_available_bytes"] = room
    return {name: value for name, value in found.items() if value is not None}


def _memory(meminfo: Path) -> dict[str, int]:
    names = {"MemAvailable": "memory_available_bytes", "SwapFree": "swap_free_bytes"}
    found = {}
    with suppress(OSError, ValueError):
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in names:
                found[names[name]] = int(rest.split()[0]) * 1024
    return found


def _hottest(thermal: Path) -> float | None:
    """Return the highest temperature that the machine's own sensors tell."""
    degrees = []
    for zone in thermal.glob("thermal_zone*/temp"):
        with suppress(OSError, ValueError):
            degrees.append(int(zone.read_text()) / _MILLI)
    return max(degrees, default=None)


def xids(log: Path, since_monotonic_s: float) -> Iterator[str]:
    """Yield what the GPU driver reported since an instant, where the kernel's log may be read."""
    for record in _records(log):
        head, _, text = record.partition(";")
        at = head.split(",")[2:3]  # level, number, microseconds since the boot
        found = _XID.search(text)
        if found and at and int(at[0]) / _MICRO >= since_monotonic_s:
            yield f"Xid {found[2]} on {found[1]}: {found[3][:120]}"


def _records(log: Path) -> Iterator[str]:
    """Yield the kernel's records; a device gives one a read, and none when it is at its end."""
    try:
        handle = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        while True:
            try:
                data = os.read(handle, _RECORD_BYTES)
            except BrokenPipeError:  # this record was overwritten meanwhile: the next one follows
                continue
            except OSError:
                return
            if not data:
                return
            yield from data.decode(errors="replace").splitlines()
    finally:
        os.close(handle)
