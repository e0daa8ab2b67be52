"""Which part of a job's memory outgrew its prediction, from what the job said that it held.

A job tells each tensor class once it holds it. What its peak has beyond them is what nobody can
count apart: activations where the prediction has some, else overhead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runners.reasons import Reason
from webapp.core.display import TERMS
from webapp.core.units import memory, number
from webapp.jobs.gangs import members_of
from webapp.jobs.models import Attempt, Job
from webapp.jobs.oom_text import Said, read_oom
from webapp.metrics.models import MetricSource
from webapp.metrics.read import read_raw

NOTABLE_RATIO = 1.05  # below it a measured term counts as what was predicted
ROOM_SHARE = 0.9  # of the capacity: a job that was refused below it shared the device
OOM = frozenset({Reason.OOM_GPU, Reason.OOM_HOST})


@dataclass(frozen=True)
class TermRow:
    """One tensor class: what was predicted, and what was measured where that is known."""

    term: str
    name: str
    predicted: float
    measured: float | None
    is_rest: bool = False  # what the peak holds beyond the counted terms

    @property
    def ratio(self) -> float | None:
        """Return measured over predicted."""
        return self.measured / self.predicted if self.measured and self.predicted else None

    @property
    def excess(self) -> float:
        """Return by how many bytes the prediction was exceeded."""
        return 0.0 if self.measured is None else self.measured - self.predicted


@dataclass(frozen=True)
class MemoryStory:
    """A job's memory against its prediction."""

    rows: tuple[TermRow, ...]
    predicted_bytes: float
    capacity_bytes: float
    peak_bytes: float
    said: Said
    metric: tuple[str, str]  # source and name of the series that the peak is of
    is_oom: bool = False

    @property
    def needed_bytes(self) -> float:
        """Return what would have been held had the last allocation been granted."""
        return self.peak_bytes + (self.said.asked or 0)

    @property
    def room_bytes(self) -> float:
        """Return what there really was: a refused job got no further than its peak."""
        return min(self.capacity_bytes, self.peak_bytes) if self.is_oom else self.capacity_bytes

    @property
    def ratio(self) -> float:
        """Return how many times its prediction the job needed."""
        return self.needed_bytes / self.predicted_bytes if self.predicted_bytes else 0.0

    @property
    def culprit(self) -> TermRow | None:
        """Return the term that outgrew its prediction by the most, if one did."""
        worst = max(self.rows, key=lambda row: row.excess, default=None)
        is_notable = worst and worst.measured and worst.measured > NOTABLE_RATIO * worst.predicted
        return worst if is_notable else None

    @property
    def limit_bytes(self) -> float:
        """Return the prediction that leaves as much to spare as this job turned out to need."""
        return self.room_bytes / self.ratio if self.ratio else 0.0


def story_of(job: Job) -> MemoryStory | None:
    """Return the memory of a job that had a prediction and ran; None for any other.

    Of a job on several hosts it is that of the host which needed most.
    """
    found = stories_of(job)
    return found[0][1] if found else None


def stories_of(job: Job) -> list[tuple[Attempt, MemoryStory]]:
    """Return each host's part with its memory, the one that needed most first."""
    if job.current_attempt is None:
        return []
    found = [
        (member, story)
        for member in members_of(job.current_attempt)
        if (story := _story(job, member)) is not None
    ]
    return sorted(found, key=lambda each: (not each[1].said.asked, -each[1].needed_bytes))


def _story(job: Job, attempt: Attempt) -> MemoryStory | None:
    answer = job.estimate.get("memory") if isinstance(job.estimate, Mapping) else None
    if not answer:
        return None
    reason = _reason_of(job, attempt)
    metric = _metric(reason, attempt)
    peak = _peak(attempt, metric)
    if not peak:
        return None
    lines = attempt.exit_record.get("last_lines", [])
    said = read_oom(lines) if reason in OOM else Said()
    rows = _rows(answer["breakdown_bytes"], _held(attempt), peak + (said.asked or 0))
    return MemoryStory(
        rows=tuple(rows),
        predicted_bytes=float(answer["per_device_peak_bytes"]),
        capacity_bytes=_capacity(answer, attempt, said),
        peak_bytes=peak,
        said=said,
        metric=metric,
        is_oom=reason in OOM,
    )


def _reason_of(job: Job, attempt: Attempt) -> str:
    """Return why this part ended; on several hosts each has a reason of its own."""
    own = str(attempt.exit_record.get("reason") or "")
    return own or ("" if job.num_hosts > 1 else job.reason)


def _metric(reason: str, attempt: Attempt) -> tuple[str, str]:
    """Return the series whose peak the prediction is of: the fullest GPU's, or the processes'."""
    stored = MetricSource.objects.filter(attempt_id=attempt.pk, source="gpu").first()
    names = [name for name in (stored.metrics if stored else ()) if name.endswith("memory_bytes")]
    if not names or reason == Reason.OOM_HOST:
        return "host", "rss_bytes"
    return "gpu", max(names, key=lambda name: _peak(attempt, ("gpu", name)))


def _peak(attempt: Attempt, metric: tuple[str, str]) -> float:
    values = read_raw(attempt.pk, *metric).value
    seen = float(values.max()) if len(values) else 0.0
    recorded = attempt.exit_record.get("peak_rss_bytes") or 0
    return max(seen, float(recorded)) if metric[0] == "host" else seen


def _held(attempt: Attempt) -> dict[str, float]:
    """Return the most that the job said it held of each tensor class."""
    stored = MetricSource.objects.filter(attempt_id=attempt.pk, source="job").first()
    held = {}
    for name in stored.metrics if stored else ():
        if name.startswith("held_") and name.endswith("_bytes"):
            values = read_raw(attempt.pk, "job", name).value
            held[name.removeprefix("held_").removesuffix("_bytes")] = float(values.max())
    return held


def _capacity(answer: Mapping[str, Any], attempt: Attempt, said: Said) -> float:
    """Return what one device holds: what the allocator said, a host's own limit, the plan's."""
    limit = attempt.facts.get("job_memory_bytes")
    return float(said.capacity or limit or answer["capacity_bytes"])


def _rows(
    predicted: Mapping[str, float], held: Mapping[str, float], needed: float
) -> list[TermRow]:
    counted = {
        term: sum(held[part] for part in parts if part in held)
        for term, _, parts in TERMS
        if any(part in held for part in parts)
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


def story_sentence(story: MemoryStory) -> str:
    """Return what went wrong with a job's memory, with the figures that show it."""
    return f"{_need_words(story)}{_room_words(story)}"


def _need_words(story: MemoryStory) -> str:
    needed, predicted = memory(story.needed_bytes), memory(story.predicted_bytes)
    if story.ratio <= NOTABLE_RATIO:
        return f"It needed no more than was predicted: {needed} against {predicted}."
    if (worst := story.culprit) is not None:
        return (
            f"{worst.name} measured {memory(worst.measured or 0)} against "
            f"{memory(worst.predicted)} predicted."
        )
    return f"It needed {needed}, {number(story.ratio)} times the predicted {predicted}."


def _room_words(story: MemoryStory) -> str:
    """Return that somebody else had the rest, where a job was refused long before the end."""
    if not story.is_oom or story.room_bytes >= ROOM_SHARE * story.capacity_bytes:
        return ""
    return (
        f" It was refused more at {memory(story.room_bytes)} of "
        f"{memory(story.capacity_bytes)}: there was less room than the plan counted on."
    )


def facts_of(said: Said) -> Sequence[tuple[str, str]]:
    """Return the allocator's own figures, as label and value."""
    labels = ("Last asked for", "The device holds", "Free then", "Held by this process")
    found = [
        (label, str(memory(value)))
        for label, value in zip(labels, said, strict=False)
        if value is not None
    ]
    if said.unallocated:
        found.append(("Reserved but unused", str(memory(said.unallocated))))
    return found
