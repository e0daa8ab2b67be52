"""The journal of answered prompts, the output artefact and a generation's metrics."""

import json
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runners.jobs.artefacts import publish_folder
from runners.jobs.generate.static import BatchRun
from runners.jobs.memory import Peak
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


# The metrics of a generation, under the names that the planner predicts.


@dataclass
class Figures:
    """Sums over what this process generated; earlier attempts are not timed."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    wall_seconds: float = 0.0
    first_seconds: list[float] = field(default_factory=list)  # per prompt
    gap_seconds: list[float] = field(default_factory=list)  # mean time between tokens, per prompt
    prefill_seconds: float = 0.0  # of whole batches, if they have a separate prefill
    decode_seconds: float = 0.0
    decoded_tokens: int = 0
    kv_cache_bytes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def add_one(self, prompt: int, output: int, first: float, later: float) -> None:
        """Add one prompt: its tokens, and the seconds to the first token and of the later ones."""
        self.prompt_tokens += prompt
        self.output_tokens += output
        self.first_seconds.append(first)
        if output > 1:
            self.gap_seconds.append(later / (output - 1))

    def add_batch(self, run: BatchRun, prompt_tokens: int) -> dict[str, float]:
        """Add one batch and return the speeds so far, by result name."""
        outputs = sum(len(each.ids) for each in run.answers)
        decoded = max(0, outputs - len(run.answers))
        seconds = run.prefill_seconds + run.decode_seconds
        self.prompt_tokens += prompt_tokens
        self.output_tokens += outputs
        self.wall_seconds += seconds
        self.first_seconds += [run.prefill_seconds] * len(run.answers)
        self.prefill_seconds += run.prefill_seconds
        self.decode_seconds += run.decode_seconds
        self.decoded_tokens += decoded
        self.kv_cache_bytes = max(self.kv_cache_bytes, run.kv_cache_bytes)
        if run.num_steps:
            self.gap_seconds += [run.decode_seconds / run.num_steps] * len(run.answers)
        return {name: value for name, value in self._speeds().items() if "per_second" in name}

    @property
    def tokens_per_second(self) -> float:
        """Return the output tokens per second so far."""
        return self.output_tokens / self.wall_seconds if self.wall_seconds else 0.0

    def measured(self, peak: Peak, parameter_bytes: int) -> dict[str, float]:
        """Return the figures of the job's result."""
        figures = {
            "peak_memory_bytes": float(peak.bytes),
            "runtime_memory_bytes": float(peak.start_bytes),
            "parameter_bytes": float(parameter_bytes),
            "prompt_tokens": float(self.prompt_tokens),
            "output_tokens": float(self.output_tokens),
        }
        if self.kv_cache_bytes:
            figures["kv_cache_bytes"] = float(self.kv_cache_bytes)
        return figures | self._speeds() | self._guesses()

    def _speeds(self) -> dict[str, float]:
        if not self.first_seconds:
            return {}
        speeds = {
            "tokens_per_second": self.tokens_per_second,
            "ttft_seconds": statistics.median(self.first_seconds),
        }
        if self.gap_seconds:
            speeds["tpot_seconds"] = statistics.median(self.gap_seconds)
        if self.prefill_seconds:
            speeds["prefill_tokens_per_second"] = self.prompt_tokens / self.prefill_seconds
        if self.decode_seconds and self.decoded_tokens:
            speeds["decode_tokens_per_second"] = self.decoded_tokens / self.decode_seconds
        return speeds

    def _guesses(self) -> dict[str, float]:
        if not self.drafted_tokens:
            return {}
        return {
            "drafted_tokens": float(self.drafted_tokens),
            "accepted_tokens": float(self.accepted_tokens),
            "acceptance_ratio": self.accepted_tokens / self.drafted_tokens,
        }


def notes_of(peak: Peak, num_before: int) -> dict[str, str]:
    """Return notes on how the figures were measured."""
    notes = {
        "peak_memory_bytes": peak.how,
        "runtime_memory_bytes": "held before the model was loaded: interpreter and libraries",
        "tokens_per_second": "written tokens over the seconds of all prompts, prefill included",
        "ttft_seconds": "median over prompts, from when each was begun with",
        "tpot_seconds": "median over prompts of the mean between two of its tokens",
    }
    if num_before:
        notes["resumed"] = f"{num_before} prompts were answered before; they are not timed"
    return notes
