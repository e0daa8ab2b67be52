"""Exec an engine that is killed with the job: ``python -m … PARENT_PID COMMAND ARGUMENT…``."""

import os
import sys

from runners.supervision.child import die_with


def main() -> None:
    """Set the parent-death signal and exec the command; the setting survives exec."""
    parent, *command = sys.argv[1:]
    die_with(int(parent))
    os.execv(command[0], command)  # noqa: S606 - no shell: a list that the job itself made


if __name__ == "__main__":
    main()
