"""How much memory this process's control group still allows. Standard library only."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from runners.supervision.procfs import CGROUPS, PROC

# Per version of control groups: limit, use, and the field of memory.stat that can be taken back.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")
_NO_LIMIT_BYTES = 2**60  # version 1 writes "none" as a number of nearly 2**63


def memory_headroom(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the bytes that may still be taken, or None where no group sets a limit.

    A group is bound by those above it, so the tightest one counts. Cache of files that were not
    read for long is given back under pressure and counts as free.
    """
    found = [room for folder, names in _groups(proc, cgroups) if (room := _room(folder, names))]
    return min(found, default=None)


def own_group(proc: Path = PROC, cgroups: Path = CGROUPS) -> tuple[Path, str] | None:
    """Return the folder of this process's memory group and its limit's file, None without."""
    for folder, names in _groups(proc, cgroups):
        if (folder / "cgroup.procs").is_file():
            return folder, names[0]
    return None


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folders of this process's group and of those above it."""
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


def _room(folder: Path, names: tuple[str, str, str]) -> int | None:
    limit, used = _number(folder / names[0]), _number(folder / names[1])
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


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group from here, or "max"
        return None
