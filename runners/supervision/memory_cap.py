"""A control group of our own below this process's: whoever is in it has so much memory.

The limit holds for everything: what a process allocates, and the pages of the files it reads.
Standard library only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runners.supervision.cgroup import own_group
from runners.supervision.procfs import CGROUPS, PROC


class NoMemoryCapError(Exception):
    """This process may make no control group."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"a memory cap needs a control group below this process's own ({why}); run it as "
            "root, or in a delegated group"
        )


class Cap:
    """The control group that was made."""

    def __init__(self, group: Path, limit_name: str) -> None:
        self._group, self._limit_name = group, limit_name

    def limit(self, limit_bytes: int) -> None:
        """Let whoever is in it have so many bytes together.

        Raises:
            NoMemoryCapError: the kernel refuses the limit.
        """
        try:
            (self._group / self._limit_name).write_text(str(limit_bytes))
        except OSError as error:
            raise NoMemoryCapError(str(error)) from error

    def take_in(self, pid: int) -> None:
        """Let a process be in it: what it takes from now on counts."""
        (self._group / "cgroup.procs").write_text(str(pid))


@contextmanager
def memory_cap(
    name: str, limit_bytes: int, proc: Path = PROC, cgroups: Path = CGROUPS
) -> Iterator[Cap]:
    """Yield a cap; the processes that it takes in have the limit.

    They must have ended when the context does.

    Raises:
        NoMemoryCapError: none can be made here.
    """
    found = own_group(proc, cgroups)
    if found is None:
        raise NoMemoryCapError("no memory controller is there")
    parent, limit_name = found
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
