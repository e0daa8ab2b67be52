"""Memory of control groups: headroom, and a limit for child processes. Standard library only."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runners.supervision.procfs import CGROUPS, PROC

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
        room for folder, names in _groups(proc, cgroups) if (room := _headroom(folder, names))
    ]
    return min(headrooms, default=None)


def own_group(proc: Path = PROC, cgroups: Path = CGROUPS) -> tuple[Path, str] | None:
    """Return the folder of this process's memory cgroup and its limit file, or None."""
    for folder, names in _groups(proc, cgroups):
        if (folder / "cgroup.procs").is_file():
            return folder, names[0]
    return None


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
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
            raise NoMemoryCapError(str(error)) from error

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
        raise NoMemoryCapError("no memory controller is there")
    parent, limit_name = parent_group
    group = parent / name
    try:
        group.mkdir()
    except OSError as error:
        raise NoMemoryCapError(str(error)) from error
    try:
        cap = Cap(group, limit_name)
        cap.limit(limit_bytes)
        yield cap
    finally:
        group.rmdir()
