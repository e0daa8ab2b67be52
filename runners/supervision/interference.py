"""Measures disturbances of an attempt: CPU contention, throttling, clock jumps, suspends.

Standard library only. Unreadable values are left out: a container may hide any of them.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from runners.supervision.procfs import CGROUPS, CLOCK_TICKS_PER_SECOND, PROC

CPUS = Path("/sys/devices/system/cpu")
# Indices of the times in a "cpu" line of /proc/stat (proc(5)); user time includes guest time.
_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ, _STEAL = 0, 1, 2, 5, 6, 7
_MICRO, _MILLI, _NANO = 1_000_000, 1000, 1e9
SMALLEST_JUMP_SECONDS = 0.5  # smaller ones are clock slewing and sampling delay


class Clocks(NamedTuple):
    """One sample of the clocks, in seconds; ``boot`` includes time suspended."""

    wall: float
    monotonic: float
    boot: float


def read_clocks() -> Clocks:
    """Return the present clocks."""
    boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return Clocks(time.time(), time.monotonic(), boot)


class InterferenceWatch:
    """Accumulates, sample by sample, the CPU time that other programs took from an attempt."""

    def __init__(
        self,
        clocks: Callable[[], Clocks] = read_clocks,
        proc: Path = PROC,
        cgroups: Path = CGROUPS,
        cpus: Path = CPUS,
    ) -> None:
        self._clocks, self._proc, self._cpus = clocks, proc, cpus
        self._group = _quota_group(proc, cgroups)
        quota = _quota(self._group) if self._group else None
        self._usable = min(len(os.sched_getaffinity(0)), quota or float("inf"))
        self._at = clocks()
        self._machine = _machine_busy(proc)
        self._group_busy = _group_busy(self._group)
        self._heat_at_start = dict(_throttled_seconds(cpus))
        self._began = self._at.monotonic
        self._taken_core_seconds = 0.0
        self._watched_seconds = 0.0
        self._jumped_seconds = 0.0
        self._slept_seconds = 0.0

    def update(self, own_cores: float) -> None:
        """Add the time since the last sample; ``own_cores`` is the attempt's own CPU use."""
        now = self._clocks()
        elapsed = now.monotonic - self._at.monotonic
        slept = (now.boot - self._at.boot) - elapsed
        jumped = (now.wall - self._at.wall) - (now.boot - self._at.boot)
        self._slept_seconds += slept if slept >= SMALLEST_JUMP_SECONDS else 0.0
        self._jumped_seconds += abs(jumped) if abs(jumped) >= SMALLEST_JUMP_SECONDS else 0.0
        machine, group = _machine_busy(self._proc), _group_busy(self._group)
        if machine and self._machine and elapsed > 0:
            foreign = (machine.seconds - self._machine.seconds) / elapsed - own_cores
            left = machine.cores - max(foreign, 0.0)
            taken = self._usable - left
            if group is not None and self._group_busy is not None:
                taken = max(taken, (group - self._group_busy) / elapsed - own_cores)
            self._taken_core_seconds += min(max(taken, 0.0), self._usable) * elapsed
            self._watched_seconds += elapsed
        self._at, self._machine, self._group_busy = now, machine, group

    def found(self) -> dict[str, float]:
        """Return the measurements under the field names of ``runners.messages.EndConditions``."""
        measurements = {
            "clock_jump_seconds": self._jumped_seconds,
            "suspended_seconds": self._slept_seconds,
        }
        if self._watched_seconds:
            measurements["usable_cores"] = float(self._usable)
            measurements["taken_cores"] = self._taken_core_seconds / self._watched_seconds
        elapsed = self._at.monotonic - self._began
        slowed = [
            seconds - self._heat_at_start[cpu]
            for cpu, seconds in _throttled_seconds(self._cpus)
            if cpu in self._heat_at_start
        ]
        if slowed and elapsed > 0:
            measurements["heat_throttled_ratio"] = min(max(0.0, *slowed) / elapsed, 1.0)
        return {name: round(value, 4) for name, value in measurements.items()}


class _Busy(NamedTuple):
    """Busy time of all cores since boot, in seconds, and the number of cores."""

    seconds: float
    cores: int


def _machine_busy(proc: Path) -> _Busy | None:
    try:
        lines = (proc / "stat").read_text().splitlines()
        times = [int(each) for each in lines[0].split()[1:]]
        busy = sum(times[at] for at in (_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ, _STEAL))
    except (OSError, ValueError, IndexError):
        return None
    cores = sum(1 for line in lines[1:] if line[:3] == "cpu" and line[3:4].isdigit())
    return _Busy(busy / CLOCK_TICKS_PER_SECOND, cores) if cores else None


def _throttled_seconds(cpus: Path) -> Iterator[tuple[str, float]]:
    """Yield each core's thermal throttling time since boot, in seconds."""
    for path in cpus.glob("cpu[0-9]*/thermal_throttle/core_throttle_total_time_ms"):
        with suppress(OSError, ValueError):
            yield path.parts[-3], int(path.read_text()) / _MILLI


# The cgroup that limits CPU time, if any: its other members share the limit.


def _quota_group(proc: Path, cgroups: Path) -> Path | None:
    """Return the cgroup with the tightest CPU quota of this process's groups, or None."""
    groups = [group for group in _groups(proc, cgroups) if _quota(group) is not None]
    return min(groups, key=lambda group: _quota(group) or 0.0, default=None)


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    with suppress(OSError, ValueError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = cgroups / "cpu" if controllers else cgroups
            folder = top / path.lstrip("/")
            yield folder
            while folder != top:
                folder = folder.parent
                yield folder


def _quota(group: Path) -> float | None:
    """Return a cgroup's CPU quota in cores, or None without a limit."""
    with suppress(OSError, ValueError):
        most, period = (group / "cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    with suppress(OSError, ValueError):
        most_us = int((group / "cpu.cfs_quota_us").read_text())
        period_us = int((group / "cpu.cfs_period_us").read_text())
        return most_us / period_us if most_us > 0 else None
    return None


def _group_busy(group: Path | None) -> float | None:
    """Return a cgroup's CPU seconds, or None if unreadable."""
    if group is None:
        return None
    with suppress(OSError, ValueError):
        for line in (group / "cpu.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "usage_usec":
                return int(value) / _MICRO
    with suppress(OSError, ValueError):
        return int((group / "cpuacct.usage").read_text()) / _NANO
    return None
