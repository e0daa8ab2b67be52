"""Limits the memory of processes with a new child cgroup of this process's cgroup.

The limit covers allocations and the page cache of files that the processes read.
Standard library only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runners.supervision.cgroup import own_group
from runners.supervision.procfs import CGROUPS, PROC


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
