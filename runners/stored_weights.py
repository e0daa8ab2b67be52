"""The weights of a model folder: the bytes in its files, and the planner's count for its config.

Where both differ, the planner does not know the model's structure, and a plan's memory is off.
A process under limits reads both (``runners.jobs.folder_weights``), because the agent stays small.
"""

import os
import sys
from typing import NamedTuple

from runners.folder_queries import Answer, FolderQuery, run_query

MODULE = "runners.jobs.folder_weights"
SECONDS = 20.0
MEMORY_BYTES = 512 * 2**20  # of the process; a header of 50 MB fits, the largest known have 20
CLOSE = 0.05  # relative difference up to which two counts agree
GIB, MIB = 2**30, 2**20
SUFFIX = ".safetensors"


class StoredWeights(NamedTuple):
    """The bytes of a folder's weights: in its files, and counted from its config, if possible."""

    stored_bytes: int | None
    counted_bytes: int | None
    stored_problem: str = ""
    counted_problem: str = ""

    @property
    def sentence(self) -> str:
        """Return both counts as a sentence, with what prevented either."""
        stored, counted = self.stored_bytes, self.counted_bytes
        planner = f"the planner counts {size(counted or 0)} for its config.json"
        if counted is None:
            planner = f"the planner cannot read its config.json: {self.counted_problem}"
        if stored is None:
            return f"Its files were not counted: {self.stored_problem}; {planner}."
        files = f"Its files hold {size(stored)} of weights"
        if counted is None:
            return f"{files}; {planner}."
        return f"{files}, {'but ' if self.remedy else ''}{planner}."

    @property
    def remedy(self) -> str:
        """Return what to do where both counts differ, "" where they agree or one is absent."""
        stored, counted = self.stored_bytes, self.counted_bytes
        if stored is None or counted is None or not differ(counted, stored):
            return ""
        return (
            "The plan's memory may be off by the difference: plan with the config.json that "
            "belongs to these files."
        )


def size(count: int) -> str:
    """Return bytes in GiB, or in MiB below one GiB."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def differ(one: int, other: int) -> bool:
    """Return whether two counts of bytes differ by more than 5 %."""
    return abs(one - other) > CLOSE * other


def has_safetensors(query: FolderQuery) -> bool:
    """Return whether a folder has any safetensors file."""
    with os.scandir(query.folder) as entries:
        return any(entry.name.endswith(SUFFIX) for entry in entries)


def weights_of(query: FolderQuery) -> StoredWeights:
    """Return both counts of a folder with safetensors files."""
    argv = [sys.executable, "-m", MODULE]
    return _weights(run_query(query, argv, seconds=SECONDS, memory_bytes=MEMORY_BYTES))


def _weights(answer: Answer) -> StoredWeights:
    fields, reading = answer.fields, answer.fields.get("reading", "the folder")
    failure = f"{reading}: {answer.failure or 'its reader said nothing'}"
    return StoredWeights(
        fields.get("stored_bytes"),
        fields.get("counted_bytes"),
        str(fields.get("stored_problem", failure)),
        str(fields.get("counted_problem", failure)),
    )
