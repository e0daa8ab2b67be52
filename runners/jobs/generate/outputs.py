"""The journal of answered prompts, and the output artefact.

A line is written and synced before its prompt counts as done. After a kill a partial last line is
dropped; a retried job reuses what its earlier attempts on this host wrote for the same prompts and
settings.
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
    """Answers by prompt position; ``digest`` identifies prompts and settings."""

    def __init__(self, path: Path, digest: str) -> None:
        self.path = path
        self.digest = digest
        self.records: dict[int, Record] = {}
        if not self._load(path):
            path.write_text(_line({"digest": digest}))

    def take_over(self, paths: Iterable[Path]) -> None:
        """Copy the answers of earlier attempts with the same digest."""
        for path in paths:
            earlier = read_records(path, self.digest) or {}
            self.add({at: each for at, each in earlier.items() if at not in self.records})

    def add(self, records: Mapping[int, Record]) -> None:
        """Append answers and sync them to disk."""
        with self.path.open("a") as file:
            file.writelines(_line({"at": at, **record}) for at, record in records.items())
            file.flush()
            os.fsync(file.fileno())
        self.records |= records

    def _load(self, path: Path) -> bool:
        records = read_records(path, self.digest)
        if records is None:
            return False
        lines = [_line({"at": at, **record}) for at, record in records.items()]
        path.write_text("".join([_line({"digest": self.digest}), *lines]))  # drops a partial line
        self.records = records
        return True


def read_records(path: Path, digest: str) -> dict[int, Record] | None:
    """Return the complete records of a journal; None if it is missing or has another digest."""
    try:
        head, *lines = path.read_bytes().split(b"\n")
        if json.loads(head) != {"digest": digest}:
            return None
    except (OSError, ValueError):
        return None
    records = [json.loads(line) for line in lines[:-1]]  # the last one is empty or partial
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
    """Write the answers in prompt order to ``output/outputs``, and announce them."""

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
