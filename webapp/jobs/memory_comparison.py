"""A job's memory beside its prediction, by kind of tensor, and what out-of-memory errors say."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from runners.shared.reasons import Reason
from webapp.core.display import TERMS, memory, number
from webapp.jobs.gangs import members_of
from webapp.jobs.models import Attempt, Job
from webapp.jobs.points import (
    HOST_SERIES,
    gpu_memories,
    highest_host_sample,
    highest_of,
)
from webapp.metrics.models import MetricSource
from webapp.metrics.store import read_raw

# Parse allocator messages on exhausted memory: requested, total and free bytes.


_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([0-9]+(?:\.[0-9]+)?) (bytes|[KMGT]iB)"
_REQUESTED = (
    re.compile(rf"[Tt]ried to allocate {_SIZE}"),  # torch, both allocators
    re.compile(rf"Unable to allocate {_SIZE}"),  # numpy
    re.compile(rf"allocating {_SIZE} on device"),  # llama.cpp
    re.compile(rf"memory allocation of {_SIZE} failed"),  # Rust
)
_CAPACITY = re.compile(rf"total capaci?ty of {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_IN_USE = re.compile(rf"this process has {_SIZE} memory in use")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")


class OutOfMemoryFigures(NamedTuple):
    """The figures of the last such message, in bytes; None if not stated."""

    requested_bytes: int | None = None
    capacity: int | None = None
    free: int | None = None
    in_use: int | None = None
    unallocated: int | None = None


def read_oom(lines: Sequence[str]) -> OutOfMemoryFigures:
    """Return the figures of the last allocator message in a job's last lines."""
    text = "\n".join(lines)
    requested = next(
        (size for each in _REQUESTED if (size := _last(each, text)) is not None), None
    )
    return OutOfMemoryFigures(
        requested,
        _last(_CAPACITY, text),
        _last(_FREE, text),
        _last(_IN_USE, text),
        _last(_UNALLOCATED, text),
    )


def _last(pattern: re.Pattern[str], text: str) -> int | None:
    matches = pattern.findall(text)
    if not matches:
        return None
    number, unit = matches[-1]
    return int(float(number) * _UNITS[unit])


NOTABLE_RATIO = 1.05  # up to this ratio a term counts as predicted
ROOM_SHARE = 0.9  # of the capacity: if an allocation failed below it, the device was shared
OOM = frozenset({Reason.OOM_GPU, Reason.OOM_HOST})


@dataclass(frozen=True)
class TermRow:
    """One tensor class: predicted bytes, and measured bytes if known."""

    term: str
    name: str
    predicted: float
    measured: float | None
    is_rest: bool = False  # the peak's remainder beyond the counted terms

    @property
    def ratio(self) -> float | None:
        """Return measured over predicted."""
        return self.measured / self.predicted if self.measured and self.predicted else None

    @property
    def excess(self) -> float:
        """Return by how many bytes the prediction was exceeded."""
        return 0.0 if self.measured is None else self.measured - self.predicted


@dataclass(frozen=True)
class MemoryComparison:
    """A job's memory compared with its prediction."""

    rows: tuple[TermRow, ...]
    predicted_bytes: float
    capacity_bytes: float
    peak_bytes: float
    allocator: OutOfMemoryFigures
    metric: tuple[str, str]  # source and name of the series with the peak
    is_oom: bool = False

    @property
    def needed_bytes(self) -> float:
        """Return the peak plus the last failed allocation."""
        return self.peak_bytes + (self.allocator.requested_bytes or 0)

    @property
    def room_bytes(self) -> float:
        """Return the available bytes: the capacity, for an out-of-memory job at most its peak."""
        return min(self.capacity_bytes, self.peak_bytes) if self.is_oom else self.capacity_bytes

    @property
    def ratio(self) -> float:
        """Return the needed over the predicted memory."""
        return self.needed_bytes / self.predicted_bytes if self.predicted_bytes else 0.0

    @property
    def culprit(self) -> TermRow | None:
        """Return the term that exceeded its prediction the most, if notable."""
        worst = max(self.rows, key=lambda row: row.excess, default=None)
        is_notable = worst and worst.measured and worst.measured > NOTABLE_RATIO * worst.predicted
        return worst if is_notable else None

    @property
    def limit_bytes(self) -> float:
        """Return a limit for predictions that keeps the margin which this job needed.

        It is at most the room that there was: a job that needed less than predicted was short of
        room, and its need says nothing about the prediction's margin.
        """
        return self.room_bytes / max(1.0, self.ratio) if self.ratio else 0.0


def story_of(job: Job) -> MemoryComparison | None:
    """Return the memory comparison of a job with a prediction; else None.

    For a job on several hosts it is that of the host that needed the most.
    """
    stories = stories_of(job)
    return stories[0][1] if stories else None


def shortage_of(job: Job) -> MemoryComparison | None:
    """Return the memory comparison of the part that ran out of memory; None if none did."""
    return next((story for _, story in stories_of(job) if story.is_oom), None)


def stories_of(job: Job) -> list[tuple[Attempt, MemoryComparison]]:
    """Return each host's part with its memory comparison.

    Parts that ran out of memory come first, then those with the largest need.
    """
    if job.current_attempt is None:
        return []
    stories = [
        (member, story)
        for member in members_of(job.current_attempt)
        if (story := _story(job, member)) is not None
    ]
    return sorted(
        stories,
        key=lambda each: (
            not each[1].is_oom,
            not each[1].allocator.requested_bytes,
            -each[1].needed_bytes,
        ),
    )


def _story(job: Job, attempt: Attempt) -> MemoryComparison | None:
    answer = job.estimate.get("memory") if isinstance(job.estimate, Mapping) else None
    if not answer:
        return None
    reason = str(attempt.exit_record.get("reason") or "")  # each host of a gang has its own
    if not reason and job.num_hosts == 1:
        reason = job.reason
    metric = _metric(reason, attempt)
    peak = _peak(attempt, metric)
    if not peak:
        return None
    lines = attempt.exit_record.get("last_lines", [])
    oom = read_oom(lines) if reason in OOM else OutOfMemoryFigures()
    rows = _rows(answer["breakdown_bytes"], _held(attempt), peak + (oom.requested_bytes or 0))
    return MemoryComparison(
        rows=tuple(rows),
        predicted_bytes=float(answer["per_device_peak_bytes"]),
        capacity_bytes=_capacity(answer, attempt, oom),
        peak_bytes=peak,
        allocator=oom,
        metric=metric,
        is_oom=reason in OOM,
    )


def _metric(reason: str, attempt: Attempt) -> tuple[str, str]:
    """Return the series with the predicted peak: the fullest GPU's, or the processes' RSS."""
    names = gpu_memories(attempt)
    if not names or reason == Reason.OOM_HOST:
        return "host", HOST_SERIES
    return "gpu", max(names, key=lambda name: highest_of(attempt, [name]))


def _peak(attempt: Attempt, metric: tuple[str, str]) -> float:
    """Return the highest sample, the same as in the job's captions."""
    if metric[0] == "host":
        return highest_host_sample(attempt)
    return highest_of(attempt, [metric[1]])


def _held(attempt: Attempt) -> dict[str, float]:
    """Return the peak bytes that the job reported per tensor class."""
    stored = MetricSource.objects.filter(attempt_id=attempt.pk, source="job").first()
    peaks = {}
    for name in stored.metrics if stored else ():
        if name.startswith("held_") and name.endswith("_bytes"):
            values = read_raw(attempt.pk, "job", name).value
            peaks[name.removeprefix("held_").removesuffix("_bytes")] = float(values.max())
    return peaks


def _capacity(answer: Mapping[str, Any], attempt: Attempt, oom: OutOfMemoryFigures) -> float:
    """Return a device's capacity: from the allocator, else the host's limit, else planned."""
    limit = attempt.facts.get("job_memory_bytes")
    return float(oom.capacity or limit or answer["capacity_bytes"])


def _rows(
    predicted: Mapping[str, float], reported: Mapping[str, float], needed: float
) -> list[TermRow]:
    counted = {
        term: sum(reported[part] for part in parts if part in reported)
        for term, _, parts in TERMS
        if any(part in reported for part in parts)
    }
    expected = {term: sum(predicted.get(part, 0.0) for part in parts) for term, _, parts in TERMS}
    rest = "activations" if expected["activations"] else "overhead"
    if counted and rest not in counted:
        counted[rest] = max(0.0, needed - sum(counted.values()))
    rows = [
        TermRow(term, name, expected[term], counted.get(term), is_rest=term == rest)
        for term, name, _ in TERMS
    ]
    return [row for row in rows if row.predicted or row.measured]


def story_sentence(story: MemoryComparison) -> str:
    """Return a sentence on what went wrong with a job's memory, with its figures."""
    return f"{_need_words(story)}{_room_words(story)}"


def _need_words(story: MemoryComparison) -> str:
    needed, predicted = memory(story.needed_bytes), memory(story.predicted_bytes)
    if story.ratio <= NOTABLE_RATIO:
        if not story.is_oom:  # it may have ended before it held everything
            return f"It held at most {needed} until it ended; {predicted} were predicted."
        return f"It needed no more than was predicted: {needed} against {predicted}."
    if (worst := story.culprit) is not None:
        return (
            f"{worst.name} measured {memory(worst.measured or 0)} against "
            f"{memory(worst.predicted)} predicted."
        )
    return f"It needed {needed}, {number(story.ratio)} times the predicted {predicted}."


def _room_words(story: MemoryComparison) -> str:
    """Return a sentence about a shared device, if the job ran out of memory below its capacity."""
    if not story.is_oom or story.room_bytes >= ROOM_SHARE * story.capacity_bytes:
        return ""
    return (
        f" A further allocation was refused at {memory(story.room_bytes)} of "
        f"{memory(story.capacity_bytes)}: less memory was available than planned."
    )


def facts_of(figures: OutOfMemoryFigures) -> Sequence[tuple[str, str]]:
    """Return the allocator's figures as (label, value)."""
    labels = ("Last allocation request", "The device holds", "Free then", "Held by this process")
    rows = [
        (label, str(memory(value)))
        for label, value in zip(labels, figures, strict=False)
        if value is not None
    ]
    if figures.unallocated:
        rows.append(("Reserved but unused", str(memory(figures.unallocated))))
    return rows
