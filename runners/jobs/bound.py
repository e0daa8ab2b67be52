"""Exec a program that is killed with the job: ``python FILE PARENT_PID COMMAND ARGUMENT…``.

It also runs as a file, so that the program's environment needs no path to this package.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def bound(command: Sequence[str]) -> list[str]:
    """Return a command whose process, with the same id, is killed when the caller's ends.

    The caller starts it in its main thread, to which the kernel binds the signal.
    """
    return [sys.executable, "-P", __file__, str(os.getpid()), *command]


def main() -> None:
    """Set the parent-death signal and exec the command; the setting survives exec."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from runners.supervision.child import die_with  # below the path that was just named

    parent, *command = sys.argv[1:]
    die_with(int(parent))
    os.execv(command[0], command)  # noqa: S606 - no shell: a list that the job itself made


if __name__ == "__main__":
    main()
