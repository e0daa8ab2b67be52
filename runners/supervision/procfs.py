"""Processes as the kernel shows them: identity, state, memory."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

# ---------------------------------------------------------------------------
# Reads processes from /proc: identity, trees, memory, CPU time, disturbances.
# ---------------------------------------------------------------------------


PROC = Path("/proc")
BOOT_ID = PROC / "sys/kernel/random/boot_id"
CGROUPS = Path("/sys/fs/cgroup")
MARKER = "SLIPWAY_ATTEMPT"
ATTEMPTS = "attempts"  # the folder of attempt folders, as runners/shared/config.py has it
CLOCK_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# Indices of the fields of /proc/<pid>/stat after the ")" of the name (proc(5)).
_STATE, _PARENT, _USER_TICKS, _SYSTEM_TICKS, _START_TICKS, _RSS_PAGES = 0, 1, 11, 12, 19, 21


class Process(NamedTuple):
    """One process of the process table."""

    pid: int
    parent: int
    state: str
    start_ticks: int
    cpu_ticks: int
    rss_bytes: int

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs; False for a zombie or dead one."""
        return self.state not in "ZX"


def read_process(pid: int) -> Process | None:
    """Return the process with this pid, or None."""
    try:
        text = (PROC / str(pid) / "stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return Process(
        pid=pid,
        parent=int(fields[_PARENT]),
        state=fields[_STATE],
        start_ticks=int(fields[_START_TICKS]),
        cpu_ticks=int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS]),
        rss_bytes=int(fields[_RSS_PAGES]) * PAGE_BYTES,
    )


def all_processes() -> Iterator[Process]:
    """Yield every process of the machine, including zombies."""
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (process := read_process(int(entry.name))):
            yield process


def descendants(root: int) -> list[Process]:
    """Return the live descendants of ``root``, parents before their children."""
    children: dict[int, list[Process]] = {}
    for process in all_processes():
        children.setdefault(process.parent, []).append(process)
    processes: list[Process] = []
    queue = [root]
    while queue:
        below = children.pop(queue.pop(0), [])
        processes += below
        queue += [process.pid for process in below]
    return [process for process in processes if process.is_alive]


def sampled_descendants(root: int) -> list[Process]:
    """Return the live descendants of ``root`` without scanning all processes.

    May miss a process that starts or ends concurrently: good enough for sampling, not for ending
    a tree. Scans all processes if the kernel has no ``children`` files.
    """
    queue, processes = [root], []
    while queue:
        children = _children(queue.pop())
        if children is None:
            return descendants(root)
        queue += children
        processes += [process for pid in children if (process := read_process(pid))]
    return [process for process in processes if process.is_alive]


def _children(pid: int) -> list[int] | None:
    """Return the child pids of a process, or None if the kernel does not list them."""
    tasks = PROC / str(pid) / "task"
    try:
        threads = os.listdir(tasks)  # noqa: PTH208 - names alone, without an object for each
    except OSError:
        return []  # it has ended
    pids: list[int] = []
    for thread in threads:
        try:
            with open(f"{tasks}/{thread}/children", "rb") as children:  # noqa: PTH123 - once a thread, every second
                pids += map(int, children.read().split())
        except FileNotFoundError:
            if not os.path.exists(f"{PROC}/self/task/{os.getpid()}/children"):  # noqa: PTH110 - as above
                return None
        except OSError:
            continue
    return pids


def is_running(pid: int, start_ticks: int) -> bool:
    """Return whether exactly this process is alive, not a later one with the same pid."""
    process = read_process(pid)
    return process is not None and process.is_alive and process.start_ticks == start_ticks


def send_signal(pid: int, start_ticks: int, number: signal.Signals) -> bool:
    """Signal exactly this process; return False when it has ended."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # The handle pins the process, so the comparison holds until the signal is sent.
        if not is_running(pid, start_ticks):
            return False
        signal.pidfd_send_signal(handle, number)
    except (ProcessLookupError, PermissionError):
        return False
    else:
        return True
    finally:
        os.close(handle)


def processes_of_attempt(attempt_id: str) -> list[Process]:
    """Return the live processes of an attempt, wherever they are in the tree."""
    return [
        process
        for process in all_processes()
        if process.is_alive and _attempt_of(process.pid) == attempt_id
    ]


def is_marked(pid: int) -> bool:
    """Return whether a process belongs to any attempt."""
    return bool(_attempt_of(pid))


def _attempt_of(pid: int) -> str:
    """Return the attempt whose marker is in a process's environment, "" if it has none.

    A program that writes its title over its environment, as vLLM's processes do
    (github.com/dvarrazzo/py-setproctitle), is known by its working folder: the attempt's.
    """
    environment, marker = _environment(pid), f"{MARKER}=".encode()
    found = next((each for each in environment if each.startswith(marker)), None)
    if found is not None:
        return found.removeprefix(marker).decode(errors="replace")
    if any(b"=" in each for each in environment):
        return ""
    with suppress(OSError):
        folder = (PROC / str(pid) / "cwd").readlink()
        return folder.name if folder.parent.name == ATTEMPTS else ""
    return ""


def _environment(pid: int) -> list[bytes]:
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def sweep(attempt_id: str) -> int:
    """Kill every process with an attempt's marker; return their number.

    Repeats until a scan is empty: one scan misses concurrent forks.
    """
    killed = set()
    while processes := processes_of_attempt(attempt_id):
        for process in processes:
            killed.add((process.pid, process.start_ticks))
            send_signal(process.pid, process.start_ticks, signal.SIGKILL)
            with suppress(OSError):  # usually not our child: its parent reaps it
                os.waitpid(process.pid, os.WNOHANG)
    return len(killed)


def kill_marked(name: str, value: str) -> None:
    """Kill every process whose environment has a variable of this value, without reaping any.

    Ends when a scan finds none that was not signalled: one scan misses concurrent forks.
    """
    marker, signalled = f"{name}={value}".encode(), set[tuple[int, int]]()
    while (
        found := {
            (each.pid, each.start_ticks)
            for each in all_processes()
            if each.is_alive and marker in _environment(each.pid)
        }
        - signalled
    ):
        for pid, start_ticks in found:
            send_signal(pid, start_ticks, signal.SIGKILL)
        signalled |= found


def boot_id(path: Path = BOOT_ID) -> str:
    """Return the machine's boot id."""
    return path.read_text().strip()


def oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the number of OOM kills in this process's cgroup.

    Read from ``memory.events`` (version 2) or ``memory.oom_control`` (version 1); 0 if neither
    is readable.
    """
    for line in _read_lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            counter = cgroups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            counter = cgroups / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        for entry in _read_lines(counter):
            name, _, value = entry.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


# Memory and CPU use of a process tree between successive samples of /proc.
#
# Standard library only.


class TreeSampler:
    """Turns successive process lists of one tree into metric values."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.peak_rss_bytes = 0
        self._clock = clock
        self._sampled_at = clock()
        self._cpu_ticks: dict[tuple[int, int], int] = {}

    def sample(self, tree: Iterable[Process]) -> dict[str, float]:
        """Return ``rss_bytes`` and ``cpu_utilization`` (cores busy) since the last call.

        Memory is summed over the processes, so shared pages count once per process.
        """
        now, processes = self._clock(), list(tree)
        ticks = {(each.pid, each.start_ticks): each.cpu_ticks for each in processes}
        spent = sum(value - self._cpu_ticks.get(key, 0) for key, value in ticks.items())
        elapsed = max(now - self._sampled_at, 1e-3)
        rss_bytes = sum(each.rss_bytes for each in processes)
        self.peak_rss_bytes = max(self.peak_rss_bytes, rss_bytes)
        self._cpu_ticks, self._sampled_at = ticks, now
        return {
            "rss_bytes": float(rss_bytes),
            "cpu_utilization": spent / CLOCK_TICKS_PER_SECOND / elapsed,
        }


# Measures disturbances of an attempt: CPU contention, throttling, clock jumps, suspends.
#
# Standard library only. Unreadable values are left out: a container may hide any of them.


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
        self._usable = usable_cores(proc, cgroups)
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

    def conditions(self) -> dict[str, float]:
        """Return the measurements under the field names of ``EndConditions``."""
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


def usable_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Return the cores that this process may keep busy: its affinity, or less by a quota."""
    group = _quota_group(proc, cgroups)
    quota = _quota(group) if group else None
    return min(len(os.sched_getaffinity(0)), quota or float("inf"))


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


# ---------------------------------------------------------------------------
# Memory of control groups: headroom, and a limit for child processes. Standard library only.
# ---------------------------------------------------------------------------


# Memory headroom of this process's control group. Standard library only.


# Per cgroup version: limit, usage, and the reclaimable field of memory.stat.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")
_NO_LIMIT_BYTES = 2**60  # version 1 writes "no limit" as a number near 2**63


def memory_headroom(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the bytes that may still be allocated, or None if no group sets a limit.

    The tightest limit of the group and its ancestors counts. Inactive file cache is reclaimable
    and counts as free.
    """
    headrooms = [
        room
        for folder, names in _memory_groups(proc, cgroups)
        if (room := _headroom(folder, names))
    ]
    return min(headrooms, default=None)


def own_group(proc: Path = PROC, cgroups: Path = CGROUPS) -> tuple[Path, str] | None:
    """Return the folder of this process's memory cgroup and its limit file, or None."""
    for folder, names in _memory_groups(proc, cgroups):
        if (folder / "cgroup.procs").is_file():
            return folder, names[0]
    return None


def _memory_groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folders of this process's cgroup and its ancestors, with their file names."""
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top, names = (cgroups / "memory", _V1) if controllers else (cgroups, _V2)
            folder = top / path.lstrip("/")
            yield folder, names
            while folder != top:
                folder = folder.parent
                yield folder, names


def _headroom(folder: Path, names: tuple[str, str, str]) -> int | None:
    limit, used = _read_int(folder / names[0]), _read_int(folder / names[1])
    if limit is None or used is None or limit >= _NO_LIMIT_BYTES:
        return None
    return max(1, limit - used + _reclaimable(folder / "memory.stat", names[2]))


def _reclaimable(path: Path, field: str) -> int:
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == field:
                return int(value)
    return 0


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # the group is not visible here, or "max"
        return None


# Limits the memory of processes with a new child cgroup of this process's cgroup.
#
# The limit covers allocations and the page cache of files that the processes read. Standard
# library only.


class NoMemoryCapError(Exception):
    """This process cannot create or limit a cgroup."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"a memory cap needs a control group below this process's own ({why}); run it as "
            "root, or in a delegated group"
        )


class Cap:
    """A cgroup with a memory limit."""

    def __init__(self, group: Path, limit_name: str) -> None:
        self._group, self._limit_name = group, limit_name

    def limit(self, limit_bytes: int) -> None:
        """Set the memory limit of all members together, in bytes.

        Raises:
            NoMemoryCapError: the kernel refuses the limit.
        """
        try:
            (self._group / self._limit_name).write_text(str(limit_bytes))
        except OSError as error:
            raise NoMemoryCapError(
                f"{self._group / self._limit_name} takes no {limit_bytes} bytes: {error.strerror}"
            ) from error

    def take_in(self, pid: int) -> None:
        """Add a process; only its later allocations count."""
        (self._group / "cgroup.procs").write_text(str(pid))


@contextmanager
def memory_cap(
    name: str, limit_bytes: int, proc: Path = PROC, cgroups: Path = CGROUPS
) -> Iterator[Cap]:
    """Yield a cap for processes to be added to.

    They must have ended before the context ends.

    Raises:
        NoMemoryCapError: no cgroup can be created here.
    """
    parent_group = own_group(proc, cgroups)
    if parent_group is None:
        raise NoMemoryCapError(f"no memory controller is there for this process below {cgroups}")
    parent, limit_name = parent_group
    group = parent / name
    try:
        group.mkdir()
    except OSError as error:
        raise NoMemoryCapError(
            f"no cgroup can be made at {group}: {error.strerror}; delegate {parent} to this user"
        ) from error
    try:
        cap = Cap(group, limit_name)
        cap.limit(limit_bytes)
        yield cap
    finally:
        group.rmdir()
