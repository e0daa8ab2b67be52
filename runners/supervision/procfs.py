"""What /proc says about processes: identity, trees, markers, memory and processor time.

A process is named by its pid *and* its start time in clock ticks, so that a reused pid is
never taken for the process that had it before. Standard library only.
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

# Where proc(5) puts the fields of /proc/<pid>/stat, counted after the ")" of the name.
_STATE, _PARENT, _USER_TICKS, _SYSTEM_TICKS, _START_TICKS, _RSS_PAGES = 0, 1, 11, 12, 19, 21


class Process(NamedTuple):
    """One line of the process table."""

    pid: int
    parent: int
    state: str
    start_ticks: int
    cpu_ticks: int
    rss_bytes: int

    @property
    def is_alive(self) -> bool:
        """Tell a running process from one that only waits to be reaped."""
        return self.state not in "ZX"


def read_process(pid: int) -> Process | None:
    """Return the process with this pid, or None when there is none."""
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
    """Yield every process of the machine, zombies included."""
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (process := read_process(int(entry.name))):
            yield process


def descendants(root: int) -> list[Process]:
    """Return the live processes below ``root``, parents before their children."""
    children: dict[int, list[Process]] = {}
    for process in all_processes():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    queue = [root]
    while queue:
        below = children.pop(queue.pop(0), [])
        found += below
        queue += [process.pid for process in below]
    return [process for process in found if process.is_alive]


def is_running(pid: int, start_ticks: int) -> bool:
    """Tell whether exactly this process is alive, not one that got its pid later."""
    process = read_process(pid)
    return process is not None and process.is_alive and process.start_ticks == start_ticks


def send_signal(pid: int, start_ticks: int, number: signal.Signals) -> bool:
    """Signal exactly this process; False when it is gone, whoever has its pid now."""
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
    """Return the live processes that carry the marker of an attempt in their environment."""
    wanted = f"{MARKER}={attempt_id}".encode()
    return [
        process
        for process in all_processes()
        if process.is_alive and wanted in _environment(process.pid)
    ]


def is_marked(pid: int) -> bool:
    """Tell whether a process belongs to any attempt."""
    return any(each.startswith(f"{MARKER}=".encode()) for each in _environment(pid))


def _environment(pid: int) -> list[bytes]:
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def sweep(attempt_id: str) -> int:
    """Kill every process that carries an attempt's marker; return how many there were.

    Scans until a scan comes back empty: one snapshot misses what forks meanwhile.
    """
    killed = set()
    while found := marked(attempt_id):
        for process in found:
            killed.add((process.pid, process.start_ticks))
            send_signal(process.pid, process.start_ticks, signal.SIGKILL)
            with suppress(OSError):  # not our child, as a rule: its own parent reaps it
                os.waitpid(process.pid, os.WNOHANG)
    return len(killed)


def boot_id(path: Path = BOOT_ID) -> str:
    """Return the identity of the machine's present boot."""
    return path.read_text().strip()


def oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return how often the kernel killed for memory in this process's control group.

    Version 2 of control groups counts in ``memory.events``, version 1 in
    ``memory.oom_control``; 0 where neither can be read.
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
