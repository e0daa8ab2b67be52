"""Why a job failed, on one page: its end, its memory, its last words, its host, the ways on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runners.reasons import Reason
from webapp.charts.figures import MAX_POINTS
from webapp.charts.memory import Backdrop, Layer, memory_timeline
from webapp.charts.svg import drawing
from webapp.core.units import memory
from webapp.jobs.endings import ending_words, host_rows, limit_words
from webapp.jobs.figures import elapsed_seconds
from webapp.jobs.memory_terms import (
    MemoryStory,
    TermRow,
    facts_of,
    story_of,
    story_sentence,
)
from webapp.jobs.models import Attempt, Job, JobState
from webapp.jobs.plots import series_of, span_ms
from webapp.jobs.reasons import words_for
from webapp.metrics.read import read_series

FAULTS = frozenset({JobState.FAILED, JobState.ERROR})


def has_postmortem(job: Job) -> bool:
    """Return whether there is something to explain: a failure, or an end by a limit."""
    return job.state in FAULTS or job.reason in {Reason.MAX_DURATION, Reason.QUOTA}


@dataclass(frozen=True)
class Rank:
    """The last lines of one rank of the attempt."""

    title: str
    ending: str
    lines: Sequence[str]


@dataclass(frozen=True)
class MemoryPart:
    """The memory section: its sentence, its rows, its chart."""

    story: MemoryStory
    sentence: str
    facts: Sequence[tuple[str, str]]
    figure: dict[str, Any]
    picture: dict[str, Any]
    is_oom: bool

    @property
    def rows(self) -> tuple[TermRow, ...]:
        """Return predicted beside measured by tensor class."""
        return self.story.rows


@dataclass(frozen=True)
class PostMortem:
    """Everything that the page shows."""

    sentence: str
    next_step: str
    ending: str
    memory: MemoryPart | None
    ranks: Sequence[Rank]
    host_rows: Sequence[tuple[str, str]]


def postmortem_of(job: Job) -> PostMortem:
    """Return the post-mortem of a job that has one."""
    attempt = job.current_attempt
    record: Mapping[str, Any] = attempt.exit_record if attempt else {}
    words = words_for(job.reason)
    return PostMortem(
        sentence=words.sentence,
        next_step=words.next_step,
        ending=_ending(job, record),
        memory=_memory(job),
        ranks=[_rank(each) for each in _ranks(attempt)],
        host_rows=host_rows(record),
    )


def _ending(job: Job, record: Mapping[str, Any]) -> str:
    if job.reason == Reason.MAX_DURATION:
        return limit_words(elapsed_seconds(job), job.max_duration_seconds)
    return ending_words(record)


def _ranks(attempt: Attempt | None) -> list[Attempt]:
    """Return every member of an attempt, rank 0 first; a member has an attempt row of its own."""
    if attempt is None:
        return []
    members = Attempt.objects.filter(job=attempt.job_id, number=attempt.number)
    return list(members.select_related("host", "job").order_by("node_rank"))


def _rank(attempt: Attempt) -> Rank:
    record = attempt.exit_record
    lines = record.get("last_lines") or []
    is_gang = attempt.leader_id is not None or attempt.job.num_hosts > 1
    title = f"rank {attempt.node_rank} on {attempt.host.name}" if is_gang else attempt.host.name
    return Rank(title, ending_words(record), lines)


def _memory(job: Job) -> MemoryPart | None:
    story = story_of(job)
    if story is None or job.current_attempt is None:
        return None
    stored = [
        each
        for each in read_series(job.current_attempt.pk, [story.metric[1]], points=MAX_POINTS)
        if each.source == story.metric[0]
    ]
    if not stored:
        return None
    series = series_of(stored[0])
    layers = [Layer(row.term, row.name, row.predicted) for row in story.rows if row.predicted]
    wanted = story.needed_bytes if story.said.asked else 0.0
    backdrop = Backdrop(layers, story.capacity_bytes, wanted)
    figure = memory_timeline(series, backdrop, *span_ms(job, [series]))
    return MemoryPart(
        story=story,
        sentence=story_sentence(story),
        facts=facts_of(story.said),
        figure=figure,
        picture=drawing(figure),
        is_oom=story.is_oom,
    )


def replan_words(story: MemoryStory) -> str:
    """Return what planning again would be held to."""
    return (
        f"The planner may then fill {memory(story.limit_bytes)} of the "
        f"{memory(story.room_bytes)} there were, as this job needed "
        f"{story.ratio:.2f} times what was predicted."
    )
