"""Post-mortem of a failed job: its end, memory, last output, host conditions, next steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runners.reasons import Reason
from webapp.charts.figures import MAX_POINTS
from webapp.charts.memory import Backdrop, Layer, memory_timeline
from webapp.charts.svg import drawing
from webapp.core.units import memory
from webapp.jobs.endings import ending_words, limit_words
from webapp.jobs.figures import elapsed_seconds
from webapp.jobs.memory_terms import (
    MemoryComparison,
    TermRow,
    facts_of,
    stories_of,
    story_sentence,
)
from webapp.jobs.models import Attempt, Job, JobState
from webapp.jobs.part_ends import PartEnd, first_words, part_ends, unheard_words
from webapp.jobs.plots import span_ms
from webapp.jobs.points import series_of
from webapp.jobs.reasons import words_for
from webapp.metrics.read import read_series

FAULTS = frozenset({JobState.FAILED, JobState.ERROR})


def has_postmortem(job: Job) -> bool:
    """Return whether the job failed or ended by a limit."""
    return job.state in FAULTS or job.reason in {Reason.MAX_DURATION, Reason.QUOTA}


@dataclass(frozen=True)
class MemoryPart:
    """The memory of one host's part: sentence, rows, chart."""

    attempt: Attempt
    story: MemoryComparison
    sentence: str
    facts: Sequence[tuple[str, str]]
    figure: dict[str, Any]
    picture: dict[str, Any]
    is_oom: bool

    @property
    def key(self) -> str:
        """Return the key of its chart on the page."""
        return f"memory-timeline-{self.attempt.node_rank}"

    @property
    def element_id(self) -> str:
        """Return the id of the JSON element with its figure."""
        return f"figure-{self.key}"

    @property
    def rows(self) -> tuple[TermRow, ...]:
        """Return predicted and measured bytes per tensor class."""
        return self.story.rows


@dataclass(frozen=True)
class PostMortem:
    """The content of the post-mortem page."""

    sentence: str
    next_step: str
    ending: str
    first: str  # which rank ended first; empty for a single process
    unheard: str  # which hosts never reported an end
    memory: MemoryPart | None  # of the host that needed the most
    other_memory: Sequence[MemoryPart]
    parts: Sequence[PartEnd]

    @property
    def is_gang(self) -> bool:
        """Return whether the job ran on several hosts."""
        return len(self.parts) > 1


def postmortem_of(job: Job) -> PostMortem:
    """Return the post-mortem of a failed job."""
    record: Mapping[str, Any] = job.current_attempt.exit_record if job.current_attempt else {}
    words = words_for(job.reason)
    parts = part_ends(job)
    memories = memory_parts(job)
    first = first_words(parts)
    return PostMortem(
        sentence=words.sentence,
        next_step=words.next_step,
        ending=_ending(job, record, first),
        first=first,
        unheard=unheard_words(parts),
        memory=memories[0] if memories else None,
        other_memory=memories[1:],
        parts=parts,
    )


def _ending(job: Job, record: Mapping[str, Any], first: str) -> str:
    if job.reason == Reason.MAX_DURATION:
        return limit_words(elapsed_seconds(job), job.max_duration_seconds)
    return "" if first else ending_words(record)


def memory_parts(job: Job) -> list[MemoryPart]:
    """Return the memory of each host's part, the largest need first."""
    parts = [_memory(job, attempt, story) for attempt, story in stories_of(job)]
    return [part for part in parts if part is not None]


def _memory(job: Job, attempt: Attempt, story: MemoryComparison) -> MemoryPart | None:
    stored = [
        each
        for each in read_series(attempt.pk, [story.metric[1]], points=MAX_POINTS)
        if each.source == story.metric[0]
    ]
    if not stored:
        return None
    series = series_of(stored[0])
    layers = [Layer(row.term, row.name, row.predicted) for row in story.rows if row.predicted]
    needed = story.needed_bytes if story.said.asked else 0.0
    backdrop = Backdrop(layers, story.capacity_bytes, needed)
    figure = memory_timeline(series, backdrop, *span_ms(job, [series]))
    return MemoryPart(
        attempt=attempt,
        story=story,
        sentence=story_sentence(story),
        facts=facts_of(story.said),
        figure=figure,
        picture=drawing(figure),
        is_oom=story.is_oom,
    )


def replan_words(story: MemoryComparison) -> str:
    """Return the memory limit for planning again, as text."""
    return (
        f"The planner may then fill {memory(story.limit_bytes)} of the "
        f"{memory(story.room_bytes)} there were, as this job needed "
        f"{story.ratio:.2f} times what was predicted."
    )
