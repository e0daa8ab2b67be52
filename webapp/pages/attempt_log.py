"""What pages show of an attempt: its log, its preflight checks, its parts on several hosts."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, cast

from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse

from runners.shared.log_text import lines_of as lines_of_text
from runners.shared.log_text import plain, shortened
from runners.shared.reasons import STOPPED, Reason
from webapp.audit.models import Event
from webapp.core.display import capitalised, clock, memory
from webapp.core.parameters import whole_in_query
from webapp.core.problems import InvalidProblem, QueryProblem
from webapp.core.search import folded
from webapp.hosts.services import Contact, contact_of, silent_seconds
from webapp.jobs.allocation import MAX_PREFLIGHTS
from webapp.jobs.gangs import members_of
from webapp.jobs.models import Attempt, AttemptEvent, Job, JobState

SUPERVISOR = "supervisor"
MOST_CHARACTERS = 256 * 1024  # of all lines read at once
EVENTS_AT_ONCE = 100  # rows per database read: one may hold 64 KiB
LEVELS = (("error", "bad"), ("traceback", "bad"), ("critical", "bad"), ("warn", "warn"))


@dataclass(frozen=True)
class Line:
    """One line of output; ``seq`` is the number of its event."""

    seq: int
    at: datetime
    stream: str
    text: str
    is_open: bool = False  # it has not ended: a later event of its stream may replace it

    @property
    def level(self) -> str:
        """Return ``bad``, ``warn`` or nothing, by keywords in the line."""
        text = self.text.lower()
        return next((look for word, look in LEVELS if word in text), "")


def log_lines(attempt: Attempt | None, *, limit: int, needle: str = "") -> list[Line]:
    """Return the last ``limit`` lines of an attempt, or of its lines that contain ``needle``.

    Fewer if they exceed ``MOST_CHARACTERS`` in total.
    """
    if attempt is None:
        return []
    events = AttemptEvent.objects.filter(attempt=attempt, kind__in=LOG_KINDS).order_by("-seq")
    stored = cast(
        "Generator[AttemptEvent, None, None]", events.iterator(chunk_size=EVENTS_AT_ONCE)
    )
    folded_needle = folded(needle)
    with closing(stored) as rows:
        newest_first = (
            line
            for event, is_replaced in with_replaced(rows)
            for line in reversed(list(lines_of(event, is_replaced=is_replaced)))
            if folded_needle in folded(line.text)
        )
        shown = (replace(line, text=shortened(line.text)) for line in newest_first)
        return list(_bounded(islice(shown, limit)))[::-1]


def with_replaced(newest_first: Iterable[AttemptEvent]) -> Iterator[tuple[AttemptEvent, bool]]:
    """Yield events, and whether a later one replaces the line that the event leaves open."""
    replacing: set[str] = set()  # streams whose next older open line was sent again
    for event in newest_first:
        stream, text = _output(event)
        is_replaced = stream in replacing and not text.endswith("\n") and bool(text)
        if is_replaced:
            replacing.remove(stream)
        if text.startswith("\r"):
            replacing.add(stream)
        yield event, is_replaced


def log_of(attempt: Attempt | None) -> Iterator[Line]:
    """Yield every line of an attempt in its order, in full."""
    stored = AttemptEvent.objects.filter(attempt=attempt, kind__in=LOG_KINDS)
    newest_first = _in_pages(stored.order_by("-seq"), "seq__lt")
    replaced = {event.seq for event, is_replaced in with_replaced(newest_first) if is_replaced}
    for event in _in_pages(stored.order_by("seq"), "seq__gt"):
        yield from lines_of(event, is_replaced=event.seq in replaced)


def _in_pages(events: QuerySet[AttemptEvent], following: str) -> Iterator[AttemptEvent]:
    """Yield events by queries of their own: who reads them may pause for long."""
    page = list(events[:EVENTS_AT_ONCE])
    while page:
        yield from page
        page = list(events.filter(**{following: page[-1].seq})[:EVENTS_AT_ONCE])


def is_full(lines: Sequence[Line], limit: int) -> bool:
    """Return whether ``log_lines`` may have omitted older lines."""
    return len(lines) >= limit or sum(len(line.text) for line in lines) >= MOST_CHARACTERS


def _bounded(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield lines up to the total character limit."""
    num_characters = 0
    for line in lines:
        yield line
        num_characters += len(line.text)
        if num_characters >= MOST_CHARACTERS:
            return


def lines_of(event: AttemptEvent, *, is_replaced: bool = False) -> Iterable[Line]:
    """Return the lines of one event; without its open one if a later event replaces that."""
    at = datetime.fromtimestamp(event.t_ms / 1000, tz=UTC)
    if event.kind in _NOTES:
        yield Line(event.seq, at, SUPERVISOR, _note(event))
        return
    stream, text = _output(event)
    *ended, last = lines_of_text(text) or [""]
    for line in ended:
        yield Line(event.seq, at, stream, line)
    if text.removeprefix("\r") and not is_replaced:
        yield Line(event.seq, at, stream, last, is_open=not text.endswith("\n"))


def _output(event: AttemptEvent) -> tuple[str, str]:
    """Return the stream and the plain text of a log event; no text of another event."""
    if event.kind != "log":
        return SUPERVISOR, ""
    text = plain(str(event.body.get("text", "")))  # stored by an older version: as it came
    return str(event.body.get("stream", "stdout")), text


def _note(event: AttemptEvent) -> str:
    """Return the text of a supervisor event as one line; invalid bodies are stored too."""
    try:
        return shortened(" ".join(lines_of_text(_NOTES[event.kind](event.body))))
    except (ArithmeticError, TypeError, ValueError):
        return f"“{event.kind}”, with invalid figures"


def _exit_words(body: Mapping[str, Any]) -> str:
    if body.get("signal"):
        return f"ended by signal {body['signal']}"
    return f"ended with exit code {body.get('exit_code')}"


_NOTES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "started": lambda body: f"process {body.get('pid')} started",
    "phase": lambda body: str(body.get("name", "")),
    "artefact": lambda body: f"saved {body.get('name')}, {memory(body.get('total_bytes', 0))}",
    "exited": _exit_words,
}
LOG_KINDS = ("log", *_NOTES)


# Preflight checklists for a page, from the job's events.


@dataclass(frozen=True)
class ChecklistLine:
    """One line of a checklist."""

    name: str
    is_ok: bool
    sentence: str
    remedy: str

    @property
    def status(self) -> str:
        """Return the status that selects the line's icon."""
        return "ready" if self.is_ok else "failed"


@dataclass(frozen=True)
class CheckRun:
    """One run of the preflight checks: title, time, and every check."""

    title: str
    at: datetime
    checks: tuple[ChecklistLine, ...]


@dataclass(frozen=True)
class Preflight:
    """The state of a job's preflight: a sentence, and the latest check runs."""

    sentence: str
    looks: tuple[CheckRun, ...]


def checks_of(event: Event) -> tuple[ChecklistLine, ...]:
    """Return the checks of an event: failed ones first, then those with advice."""
    checks = [
        ChecklistLine(
            capitalised(str(check.get("name", ""))),
            bool(check.get("ok")),
            str(check.get("sentence", "")),
            str(check.get("remedy", "")),
        )
        for check in event.detail.get("checks", ())
    ]
    return tuple(sorted(checks, key=lambda check: (check.is_ok, not check.remedy)))


def preflight_of(job: Job, events: Sequence[Event]) -> Preflight | None:
    """Return the preflight of a job in preflight or returned from it, else None."""
    is_back = job.state == JobState.QUEUED or job.reason == Reason.PREFLIGHT_FAILED
    check_events = [event for event in events if event.kind == "job.state" and event.detail]
    check_events = [event for event in check_events if event.detail.get("checks")]
    if not check_events or not (is_back or job.state == JobState.PREFLIGHT):
        return None
    last = check_events[-1]
    if job.state == JobState.PREFLIGHT:
        sentence = (
            f"{_host(job)} passes the checks by its last heartbeat. The host now runs its own "
            "checks, then the job starts."
        )
        return Preflight(sentence, (_check_run(last),))
    return Preflight(_outcome(job, events), (_check_run(last),))


def _host(job: Job) -> str:
    return job.place


def _outcome(job: Job, events: Sequence[Event]) -> str:
    failed = sum(1 for event in events if event.reason == Reason.PREFLIGHT_FAILED)
    if job.state == JobState.QUEUED:
        return f"Try {failed} of {MAX_PREFLIGHTS} failed; the next attempt is in half a minute."
    return f"{failed} tries failed, so the job ended. Correct the problem and clone the job."


def _check_run(event: Event) -> CheckRun:
    by_host = event.actor.startswith("host:")
    title = "Checked by the host" if by_host else "By the host's last heartbeat"
    return CheckRun(title, event.at, checks_of(event))


# The parts of a gang job, one per host, and the part that a page shows.


PARAMETER = "host"  # query parameter: rank of the host, from 0


@dataclass(frozen=True)
class Part:
    """One host of a job in the page's host selector."""

    attempt: Attempt
    url: str
    is_current: bool

    @property
    def words(self) -> str:
        """Return the part's state, where it adds to the job's own state."""
        reason = str(self.attempt.exit_record.get("reason") or "")
        if reason:
            return "succeeded" if reason == "ok" else reason.replace("_", " ")
        if self.is_silent:
            return f"unreachable for {clock(silent_seconds(self.attempt.host) or 0)}"
        return "running" if self.attempt.started_at else "not started"

    @property
    def is_silent(self) -> bool:
        """Return whether the host is unreachable while the part is open."""
        is_open = self.attempt.ended_at is None and bool(self.attempt.claimed_at)
        return is_open and contact_of(self.attempt.host) is Contact.UNREACHABLE

    @property
    def tone(self) -> str:
        """Return the CSS tone of the state."""
        reason = self.attempt.exit_record.get("reason")
        if self.is_silent:
            return "warn"
        if reason in {None, "", Reason.OK}:
            return ""
        return "quiet" if reason in STOPPED else "bad"


def part_at(job: Job, rank: int) -> Attempt | None:
    """Return the job's current attempt on host ``rank``; None if it has no attempt.

    Raises:
        InvalidProblem: the job runs on fewer hosts.
    """
    leader = job.current_attempt
    if leader is None or rank == 0:
        return leader
    part = leader.members.filter(node_rank=rank).select_related("host").first()
    if part is None:
        raise InvalidProblem(
            "no_such_host",
            f"There is no host of rank {rank}; the job runs on {job.num_hosts}, from 0 on.",
        )
    return part


def rank_of(request: HttpRequest) -> int:
    """Return the host rank in the query string; 0 if it is missing."""
    return whole_in_query(request, PARAMETER, least=0, default=0)


def shown_part(request: HttpRequest, job: Job) -> Attempt | None:
    """Return the requested part; the first while that host has not begun.

    Raises:
        QueryProblem: the job has no host of this rank.
    """
    rank = rank_of(request)
    try:
        return part_at(job, rank)
    except InvalidProblem as problem:
        if rank >= job.num_hosts:
            raise QueryProblem(PARAMETER, problem.detail) from problem
        return job.current_attempt


def parts_for(job: Job, shown: Attempt | None, page: str) -> list[Part]:
    """Return the selectable hosts; empty if there is only one."""
    if job.num_hosts == 1 or job.current_attempt is None or shown is None:
        return []
    address = reverse(page, args=[job.pk])
    return [
        Part(each, f"{address}?{PARAMETER}={each.node_rank}", each.pk == shown.pk)
        for each in members_of(job.current_attempt)
    ]
