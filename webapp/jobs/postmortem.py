"""Post-mortem of a failed job: its end, parts, memory, last output and next steps."""

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from django.utils.timezone import localtime

from runners.shared.reasons import Reason
from webapp.charts.plots import MAX_POINTS, drawing
from webapp.charts.timelines import Backdrop, Layer, memory_timeline
from webapp.core.clock import now
from webapp.core.display import capitalised, clock, listed, memory, number
from webapp.hosts.services import Contact, contact_of, silent_seconds
from webapp.jobs.gangs import first_ended, members_of
from webapp.jobs.job_charts import span_ms
from webapp.jobs.logs import SUPERVISOR, log_lines
from webapp.jobs.memory_comparison import (
    MemoryComparison,
    TermRow,
    facts_of,
    shortage_of,
    stories_of,
    story_sentence,
)
from webapp.jobs.models import Attempt, Job, JobState
from webapp.jobs.points import series_of
from webapp.jobs.progress import elapsed_seconds
from webapp.jobs.reason_words import words_for
from webapp.jobs.replanning import Change, smallest_changes
from webapp.jobs.services import words_of
from webapp.metrics.store import read_series

# Text for an attempt's end: exit code or signal, and the host's condition at that time.


CODES = {
    1: "an error that the program did not handle",
    2: "its command line was not valid",
    3: "it could not run with this specification",
    126: "the file is not executable",
    127: "the program was not found",
}
SIGNALS = {
    "SIGABRT": "it aborted itself, as after a failed check",
    "SIGBUS": "it accessed memory that does not exist, as when the disk of a mapped file is full",
    "SIGFPE": "it divided by zero or overflowed",
    "SIGILL": "it used an instruction that this processor does not have",
    "SIGINT": "somebody interrupted it",
    "SIGKILL": "the system or a person killed it; a program cannot do so by itself",
    "SIGPIPE": "the reader of its output closed the pipe",
    "SIGSEGV": "it accessed invalid memory (segmentation fault)",
    "SIGTERM": "it received a request to stop",
    "SIGXCPU": "its processor time was used up",
}
_SHELL_SIGNAL = 128  # shells report a signal as 128 plus its number


def ending_words(record: Mapping[str, Any]) -> str:
    """Return the exit code or signal of an exit record, and the rank, in sentences."""
    rank = record.get("rank")
    reported = "" if rank is None else f" Rank {rank} reported its failure first."
    return f"{_exit_words(record)}{reported}"


def _exit_words(record: Mapping[str, Any]) -> str:
    code, number_ = record.get("exit_code"), record.get("signal")
    if number_:
        return f"Ended by {_signal(int(number_))}."
    if code is None:
        return "No exit code: the process never reported one."
    if code > _SHELL_SIGNAL and _name(code - _SHELL_SIGNAL):
        return f"Exit code {code}: a child was ended by {_signal(code - _SHELL_SIGNAL)}."
    meaning = CODES.get(code)
    return (
        f"Exit code {code}: {meaning}."
        if meaning
        else f"Exit code {code}, which the program defines itself."
    )


def _signal(value: int) -> str:
    name = _name(value)
    meaning = SIGNALS.get(name)
    named = f"signal {value} ({name})" if name else f"signal {value}"
    return f"{named}: {meaning}" if meaning else named


def _name(value: int) -> str:
    try:
        return signal.Signals(value).name
    except ValueError:
        return ""


def limit_words(seconds: float, limit_seconds: float | None) -> str:
    """Return a job's duration relative to its limit as a sentence."""
    allowed = clock(limit_seconds) if limit_seconds else "its limit"
    return f"It ran {clock(seconds)}; the limit was {allowed}."


Row = tuple[str, str]  # label, value


def host_rows(record: Mapping[str, Any]) -> list[Row]:
    """Return the host's condition when the attempt ended, as far as it was recorded."""
    conditions = record.get("conditions") or {}
    return [*_machine(conditions), *_gpus(record.get("gpus") or ()), *_reports(conditions)]


def _machine(conditions: Mapping[str, Any]) -> Iterator[Row]:
    sizes = (
        ("memory_available_bytes", "Memory free"),
        ("group_memory_available_bytes", "Left to its control group"),
        ("swap_free_bytes", "Swap free"),
        ("disk_free_bytes", "Disk free"),
    )
    for name, label in sizes:
        if conditions.get(name) is not None:
            yield label, str(memory(conditions[name]))
    if conditions.get("load") is not None:
        yield "Load", f"{number(conditions['load'])} processes"
    if conditions.get("temperature_celsius") is not None:
        yield "Hottest sensor", f"{number(conditions['temperature_celsius'])} °C"


def _gpus(loads: Iterator[Any] | tuple[Any, ...]) -> Iterator[Row]:
    for index, load in enumerate(loads):
        parts = [f"{memory(load.get('memory_used_bytes') or 0)} held"]
        if load.get("temperature_celsius") is not None:
            parts.append(f"{number(load['temperature_celsius'])} °C")
        if load.get("foreign_pids"):
            parts.append(f"also used by {', '.join(map(str, load['foreign_pids']))}")
        yield f"GPU {index}", " · ".join(parts)


def _reports(conditions: Mapping[str, Any]) -> Iterator[Row]:
    for text in conditions.get("xids") or ():
        yield "Driver reported", str(text)


# The last output lines of a host, split by rank, and torchrun's own report.
#
# A rank's lines carry its number, added by the job or by torch. torchrun's report follows after a
# rank has failed, and names that rank.


_LABEL = re.compile(r"^\[rank ?([0-9]{1,6})\]:? ?")
_TORCHRUN = re.compile(r"^[WE][0-9]{4} .*torch/distributed/elastic/")
_RUN_PY = re.compile(r'^  File "<frozen runpy>"|torch/distributed/run\.py", line')
_BANNER = re.compile(r"^\*{20,}$|^Setting OMP_NUM_THREADS environment variable")
_ROOT_CAUSE = "Root Cause (first observed failure):"
_RANK = re.compile(r"^ +rank +: ([0-9]{1,6}) ")
_EXIT_CODE = re.compile(r"^ +exitcode +: (-?[0-9]{1,4}) ")


class Failure(NamedTuple):
    """The rank that torchrun reported as first to fail on its host, and its exit code."""

    rank: int
    exit_code: int | None

    @property
    def record(self) -> dict[str, Any]:
        """Return exit code and signal in the format of an exit record."""
        code = self.exit_code
        if code is not None and code < 0:
            return {"exit_code": None, "signal": -code}
        return {"exit_code": code, "signal": None}


class RankOutput(NamedTuple):
    """The last output of a host's processes: by rank, then torchrun's report."""

    by_rank: dict[int | None, list[str]]  # None: lines without a rank
    report: list[str]


def split_by_rank(lines: Sequence[str], *, is_one: bool = False) -> RankOutput:
    """Return the last lines of each rank; lines without a rank are under None.

    With ``is_one`` the host runs a single rank, to which those lines belong too.
    """
    start = _report_start(lines)
    numbers = {int(label[1]) for line in lines if (label := _LABEL.match(line))}
    unnumbered = numbers.pop() if is_one and len(numbers) == 1 else None
    by_rank: dict[int | None, list[str]] = {}
    report = []
    for index, line in enumerate(lines):
        label = _LABEL.match(line)
        if label:
            by_rank.setdefault(int(label[1]), []).append(line[label.end() :])
        elif index >= start:
            report.append(line)
        elif not _BANNER.match(line):
            by_rank.setdefault(unnumbered, []).append(line)
    if not any(line.strip() for line in by_rank.get(None, ["x"])):
        del by_rank[None]
    return RankOutput(by_rank, report)


def _report_start(lines: Sequence[str]) -> int:
    """Return the index where torchrun's report begins; ``len(lines)`` if there is none."""
    for index, line in enumerate(lines):
        if _TORCHRUN.match(line):
            return index
        if _RUN_PY.search(line):
            return max(0, index - 1)  # "Traceback (most recent call last):"
    return len(lines)


def first_failure(lines: Sequence[str]) -> Failure | None:
    """Return the rank that torchrun reported as first to fail; None if it reported none."""
    if _ROOT_CAUSE not in lines:
        return None
    after = lines[max(index for index, line in enumerate(lines) if line == _ROOT_CAUSE) :]
    rank = next((int(match[1]) for line in after if (match := _RANK.match(line))), None)
    code = next((int(match[1]) for line in after if (match := _EXIT_CODE.match(line))), None)
    return None if rank is None else Failure(rank, code)


def only_rank(said: RankOutput) -> int | None:
    """Return the rank number of a host that runs a single rank, from its output."""
    ranks = [rank for rank in said.by_rank if rank is not None]
    return ranks[0] if len(ranks) == 1 else None


# How each host's part of a job ended, which ended first, and the last lines of its ranks.


LOG_LINES = 2000  # log lines searched for the last ones of each rank
RANK_LINES = 40


@dataclass(frozen=True)
class RankLines:
    """The last lines of one rank."""

    title: str
    lines: Sequence[str]


@dataclass(frozen=True)
class PartEnd:
    """How a job's part on one host ended."""

    attempt: Attempt
    at: datetime | None  # by the server's clock; None: no end reported
    rank: int | None  # the first rank to end there, as far as the processes reported it
    how: str
    why: str
    silence: str
    is_first: bool
    is_shared: bool  # one of several processes, on this or other hosts
    ranks: Sequence[RankLines]
    report: Sequence[str]
    host_rows: Sequence[tuple[str, str]]

    @property
    def host_name(self) -> str:
        """Return the name of the part's host."""
        return self.attempt.host.name

    @property
    def rank_words(self) -> str:
        """Return for example ``rank 3`` if the rank is known and not the only one."""
        return "" if self.rank is None or not self.is_shared else f"rank {self.rank}"


def part_ends(job: Job) -> list[PartEnd]:
    """Return the parts of a job's latest attempt: the one that ended first, then by host."""
    if job.current_attempt is None:
        return []
    first = first_ended(job.current_attempt)
    decisive = first.member.pk if first else None
    parts = [_part(job, each, decisive) for each in members_of(job.current_attempt)]
    return sorted(parts, key=lambda part: (not part.is_first, part.attempt.node_rank))


def _part(job: Job, attempt: Attempt, decisive: str | None) -> PartEnd:
    record = attempt.exit_record
    last = [str(line) for line in record.get("last_lines") or ()]
    num_ranks = max(1, attempt.allocations.filter(device__kind="gpu").count())
    output = _rank_output(job, last, num_ranks)
    failure = first_failure(last)
    reason = record.get("reason")
    return PartEnd(
        attempt=attempt,
        at=_ended_at(attempt),
        rank=failure.rank if failure else only_rank(output),
        how=ending_words(failure.record if failure else record),
        why=words_for(str(reason)).sentence if reason else "",
        silence=_silence(attempt),
        is_first=attempt.pk == decisive,
        is_shared=job.is_shared_out,
        ranks=_rank_lines(attempt, output, num_ranks),
        report=output.report,
        host_rows=host_rows(record),
    )


def _ended_at(attempt: Attempt) -> datetime | None:
    ended_ms = attempt.exit_record.get("ended_at_ms")
    if not ended_ms:
        return None
    offset_ms = attempt.host.clock_offset_ms or 0
    return datetime.fromtimestamp((int(ended_ms) - offset_ms) / 1000, tz=UTC)


def _silence(attempt: Attempt) -> str:
    """Return the time since the last heartbeat of an open part's host; empty while in contact."""
    seconds = silent_seconds(attempt.host)
    if attempt.ended_at is not None or seconds is None:
        return ""
    return "" if contact_of(attempt.host) is Contact.LIVE else clock(seconds)


def _rank_output(job: Job, lines: Sequence[str], num_ranks: int) -> RankOutput:
    if job.is_shared_out:
        return split_by_rank(lines, is_one=num_ranks == 1)
    return RankOutput({None: list(lines)} if lines else {}, [])


def _rank_lines(attempt: Attempt, output: RankOutput, num_ranks: int) -> list[RankLines]:
    """Return the last lines of each rank: from the exit record, else from the log."""
    by_rank = output.by_rank
    if num_ranks > 1 or not by_rank:
        log_page = log_lines(attempt, limit=LOG_LINES)
        stored = [line.text for line in log_page if line.stream != SUPERVISOR]
        by_rank = {**_rank_output(attempt.job, stored, num_ranks).by_rank, **by_rank}
    return [
        RankLines("" if rank is None else f"rank {rank}", lines[-RANK_LINES:])
        for rank, lines in sorted(by_rank.items(), key=lambda each: (each[0] is None, each[0]))
    ]


def first_words(parts: Sequence[PartEnd]) -> str:
    """Return which part ended first, when and how; empty for a job of one process."""
    first = next((part for part in parts if part.is_first), None)
    if first is None or not first.is_shared:
        return ""
    if first.at is None:
        when = "at an unknown time"
    else:
        local = localtime(first.at)
        is_today = local.date() == localtime(now()).date()
        when = f"{local:%H:%M:%S}" if is_today else f"{local.day} {local:%b, %H:%M:%S}"
    place = ", ".join(text for text in (first.host_name, first.rank_words, when) if text)
    return f"Ended first on {place}. {capitalised(first.how)}"


def unheard_words(parts: Sequence[PartEnd]) -> str:
    """Return which parts never reported an end, and the likely consequence."""
    open_parts = [part for part in parts if part.attempt.ended_at is None]
    if not open_parts or len(parts) == 1:
        return ""
    names = listed(
        [
            f"{part.host_name} (no heartbeat for {part.silence})"
            if part.silence
            else part.host_name
            for part in open_parts
        ]
    )
    lost = any(
        part.is_first and part.attempt.exit_record.get("reason") == Reason.RANK_LOST
        for part in parts
    )
    cause = (
        " This host may be the cause: the other hosts only lost their connection to it."
        if lost
        else ""
    )
    return f"No end was reported by {names}.{cause}"


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
    words = words_of(job)
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
    needed = story.needed_bytes if story.allocator.requested_bytes else 0.0
    backdrop = Backdrop(layers, story.capacity_bytes, needed)
    figure = memory_timeline(series, backdrop, *span_ms(job, [series]))
    return MemoryPart(
        attempt=attempt,
        story=story,
        sentence=story_sentence(story),
        facts=facts_of(story.allocator),
        figure=figure,
        picture=drawing(figure),
        is_oom=story.is_oom,
    )


def replan_words(story: MemoryComparison) -> str:
    """Return the memory limit for planning again, as text."""
    if story.ratio <= 1:
        return (
            f"The planner may then fill {memory(story.limit_bytes)}: this job needed no more than "
            "was predicted, and there was no more room."
        )
    return (
        f"The planner may then fill {memory(story.limit_bytes)} of the "
        f"{memory(story.room_bytes)} there were, as this job needed "
        f"{story.ratio:.2f} times what was predicted."
    )


def fitting_changes(job: Job) -> list[Change]:
    """Return the smallest changes with which a job that ran out of memory would fit."""
    story = shortage_of(job) if has_postmortem(job) else None
    return smallest_changes(job, story) if story else []
