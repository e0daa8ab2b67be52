"""Attempts that wait to be sent and ask Slurm for the same: one array, with a task for each.

Each task is an attempt with its own folder, supervisor and end. Before the array is sent, each
folder gets its place in it: an agent killed in between finds the task by the array's name.
https://slurm.schedmd.com/job_array.html
"""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from runners.launchers.attempts import AttemptFolder
from runners.supervision import child, supervisor

PLACE = "slurm-array.json"
SCRIPT = "slurm-array.sh"
NAME = "slipway-array-"
PART = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+))?")  # a list over 64 bytes may end with "..."
OMP = 'export OMP_NUM_THREADS="${SLURM_CPUS_ON_NODE:-1}"\n'


class Place(NamedTuple):
    """An attempt's place in an array."""

    name: str  # of the array's job
    task: int

    @property
    def key(self) -> str:
        """Return the name by which the task is found among all jobs."""
        return key_of(self.name, self.task)


def key_of(name: str, task: int | str) -> str:
    """Return the name of an array's task: Slurm gives all tasks the array's."""
    return f"{name}_{task}"


def place_of(folder: AttemptFolder) -> Place | None:
    """Return an attempt's place in an array, or None if it has none."""
    found = child.read_json(folder.path / PLACE)
    return Place(str(found["name"]), int(found["task"])) if found else None


def indices(text: str) -> Iterator[int]:
    """Yield the tasks of Slurm's words for several; of a list that it cut, those that are left.

    >>> list(indices("2,4-5%2")), list(indices("0-6:3")), list(indices("1,3,..."))
    ([2, 4, 5], [0, 3, 6], [1, 3])
    """
    for first, last, step in bounds_of(text):
        yield from range(first, last + 1, step)


def bounds_of(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield the first and last task and the step of each part of such words."""
    for part in text.partition("%")[0].split(","):
        if found := PART.fullmatch(part):
            first, last, step = found.groups()
            yield int(first), int(last or first), max(1, int(step or 1))


def render_script(folders: Sequence[AttemptFolder]) -> str:
    """Return the batch script of an array, whose tasks are these attempts in order."""
    places = "\n".join(
        f"{index}) folder={shlex.quote(str(folder.path))} ;;"
        for index, folder in enumerate(folders)
    )
    program = shlex.join([sys.executable, "-S", "-E", supervisor.__file__])
    return (
        f'#!/bin/sh\n{OMP}case "$SLURM_ARRAY_TASK_ID" in\n{places}\nesac\n'
        f'cd "$folder" && exec {program} "$folder" {supervisor.STAY} >> slurm.out 2>&1\n'
    )
