"""What was written so far: a line on disk for each answered prompt, and the artefact of all.

A line is written whole and synced before its prompt counts as done. After a kill a last line
that was cut off is dropped; a job that is tried again takes over what its earlier attempts on
this host wrote for the same prompts and settings.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runners.jobs.artefacts import publish_folder
from runners.jobs.runtime import Job

JOURNAL = "outputs.jsonl"
ARTEFACT = "outputs"
Record = dict[str, Any]


class Journal:
    """Answers by their position in the pile; ``digest`` names the pile and the settings."""

    def __init__(self, path: Path, digest: str) -> None:
        self.path = path
        self.digest = digest
        self.records: dict[int, Record] = {}
        if not self._take(path):
            path.write_text(_line({"digest": digest}))

    def take_over(self, paths: Iterable[Path]) -> None:
        """Write down what earlier attempts at the same pile had done."""
        for path in paths:
            earlier = read_records(path, self.digest) or {}
            self.add({at: each for at, each in earlier.items() if at not in self.records})

    def add(self, records: Mapping[int, Record]) -> None:
        """Write the answers and sync them to the disk."""
        with self.path.open("a") as file:
            file.writelines(_line({"at": at, **record}) for at, record in records.items())
            file.flush()
            os.fsync(file.fileno())
        self.records |= records

    def _take(self, path: Path) -> bool:
        found = read_records(path, self.digest)
        if found is None:
            return False
        lines = [_line({"at": at, **record}) for at, record in found.items()]
        path.write_text("".join([_line({"digest": self.digest}), *lines]))  # without a cut line
        self.records = found
        return True


def read_records(path: Path, digest: str) -> dict[int, Record] | None:
    """Return the whole lines of a journal, None when it is absent or of another pile."""
    try:
        head, *lines = path.read_bytes().split(b"\n")
        if json.loads(head) != {"digest": digest}:
            return None
    except (OSError, ValueError):
        return None
    records = [json.loads(line) for line in lines[:-1]]  # what follows the last end was cut off
    return {int(record.pop("at")): record for record in records}


def earlier_journals(job: Job) -> list[Path]:
    """Return the journals of other attempts of this job on this host."""
    specs = sorted((job.host_dir / "attempts").glob("*/spec.json"))
    return [
        spec.parent / "checkpoint" / JOURNAL
        for spec in specs
        if spec.parent != job.attempt_dir and _job_of(spec) == job.request.job_id
    ]


def publish_outputs(job: Job, records: Mapping[int, Record], facts: Mapping[str, Any]) -> None:
    """Write the answers in the order of the pile to ``output/outputs`` and announce them."""

    def write(building: Path) -> None:
        with (building / JOURNAL).open("w") as file:
            file.writelines(_line(records[at]) for at in sorted(records))

    publish_folder(job, ARTEFACT, "report", write, facts)


def _job_of(spec: Path) -> object:
    try:
        document = json.loads(spec.read_text())
    except (OSError, ValueError):
        return None
    return document.get("job_id") if isinstance(document, dict) else None


def _line(document: Mapping[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"
