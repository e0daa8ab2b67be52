"""Reads processes from /proc: identity, trees, markers, memory and CPU time.

A process is identified by its pid *and* its start time in clock ticks, so that a reused pid
is not mistaken for the earlier process. Standard library only.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
BOOT_ID = PROC / "sys/kernel/random/boot_id"
CGROUPS = Path("/sys/fs/cgroup")
MARKER = "SLIPWAY_ATTEMPT"
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


def marked(attempt_id: str) -> list[Process]:
    """Return the live processes with an attempt's marker in their environment."""
    marker = f"{MARKER}={attempt_id}".encode()
    return [
        process
        for process in all_processes()
        if process.is_alive and marker in _environment(process.pid)
    ]


def is_marked(pid: int) -> bool:
    """Return whether a process belongs to any attempt."""
    return any(each.startswith(f"{MARKER}=".encode()) for each in _environment(pid))


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
    while processes := marked(attempt_id):
        for process in processes:
            killed.add((process.pid, process.start_ticks))
            send_signal(process.pid, process.start_ticks, signal.SIGKILL)
            with suppress(OSError):  # usually not our child: its parent reaps it
                os.waitpid(process.pid, os.WNOHANG)
    return len(killed)


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
