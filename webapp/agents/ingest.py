"""Store the numbered events of attempts, exactly once and without gaps.

There is one way, ``_store``, for one batch and for many in one transaction. A batch alone waits
for its job's lock and may hold every kind of event. Many share a transaction if they are routine:
they need no lock beyond those of their jobs and attempts, and skip what another one has locked.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import structlog
from django.db import DataError, IntegrityError, transaction
from pydantic import ValidationError

from runners.jobspec.base import excerpt
from runners.shared.log_text import lines_of, plain
from runners.shared.messages import (
    EventAck,
    EventBatch,
    MetricPoint,
    ReceivedBatch,
    RefusedEvent,
    RunEvent,
    first_fault,
)
from webapp.agents.event_effects import (
    ROUTINE,
    TooManyError,
    apply_event,
    job_figures,
    job_update,
)
from webapp.agents.live_messages import Message, messages_of
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, Problem
from webapp.core.queries import RowChange, update_each
from webapp.hosts.models import Host
from webapp.hosts.pools import (
    QuotaProblem,
    Refusal,
    keep_events,
    quota_refusal_record,
    refusals_record,
)
from webapp.jobs.models import LIVE_STATES, Attempt, AttemptEvent, Job
from webapp.live.stream import publish_all
from webapp.metrics import store

log = structlog.get_logger(__name__)
# Errors that an event's content can cause; an unreachable database is not among them.
FAULTS_OF_A_MESSAGE = (
    ArithmeticError,
    DataError,
    IntegrityError,
    LookupError,
    TypeError,
    ValueError,
)
ReceivedEvent = RunEvent | RefusedEvent


class HostBatch(NamedTuple):
    """A batch with the id of its sender and its transmitted size in bytes."""

    host_id: str
    batch: EventBatch | ReceivedBatch
    num_bytes: int = 0


class SplitBatch(NamedTuple):
    """A batch of events, split into new events, duplicates and gaps."""

    fresh: list[ReceivedEvent]
    duplicates: int
    gaps: int


def split_batch(events: Sequence[ReceivedEvent], acked_seq: int) -> SplitBatch:
    """Return the events that follow ``acked_seq`` without a gap, and count the others."""
    fresh: list[ReceivedEvent] = []
    duplicates = gaps = 0
    for event in events:
        expected = acked_seq + len(fresh) + 1
        if event.seq == expected:
            fresh.append(event)
        elif event.seq < expected:
            duplicates += 1
        else:
            gaps += 1
    return SplitBatch(fresh, duplicates, gaps)


@dataclass
class _Report:
    """The events that one locked attempt reports in this transaction."""

    attempt: Attempt
    team_id: str
    is_current: bool  # the job is live and has no newer attempt
    stored_seq: int  # before this transaction
    has_reported: bool = False
    events: list[RunEvent] = field(default_factory=list)  # rows, even if their body is invalid
    understood: list[RunEvent] = field(default_factory=list)
    points: list[store.Point] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)  # of the job, not written yet

    def take(self, batch: EventBatch | ReceivedBatch) -> int:
        """Accept the next events and return the last sequence number stored afterwards."""
        attempt = self.attempt
        sifted = split_batch(batch.events, attempt.acked_seq)
        attempt.acked_seq += len(sifted.fresh)
        attempt.dropped_duplicates += sifted.duplicates
        attempt.refused_gaps += sifted.gaps
        for event in sifted.fresh:
            if isinstance(event, RefusedEvent):
                self._refuse(event.reason, event.excerpt)
            elif event.kind == "metric":
                self._take_point(event)
            else:
                self.events.append(storable(event))
        self.has_reported = True
        return attempt.acked_seq

    def _take_point(self, event: RunEvent) -> None:
        try:
            self.points.append(metric_point(event))
        except ValidationError as error:
            self._refuse(f"metric: {first_fault(error)}", excerpt(event.body))
        else:
            self.understood.append(event)

    def apply(self) -> None:
        """Apply the stored events in their order.

        Figures that routine events leave for the job are kept for one statement of all reports;
        before an event that may change the job's state, they are written.
        """
        for event in self.events:
            refusal = self._gather(event) if event.kind in ROUTINE else self._apply(event)
            if refusal:
                self._refuse(f"{event.kind}: {refusal}", excerpt(event.body))
            else:
                self.understood.append(event)
        if any(event.kind not in ROUTINE for event in self.events):  # the job may have ended
            self._write_figures()

    def _gather(self, event: RunEvent) -> str:
        """Read the job's figures from an event; return why its body is invalid, or ""."""
        try:
            self.figures |= job_figures(event.kind, event.body)
        except ValidationError as error:
            return first_fault(error)
        return ""

    def _apply(self, event: RunEvent) -> str:
        """Apply an event; return why its body is invalid, or "".

        Raises:
            Exception: a valid "exited" event could not be applied. The host sends it again: a job
                whose end is skipped would never end.
        """
        self._write_figures()
        try:
            with transaction.atomic():
                apply_event(self.attempt, event)
        except FAULTS_OF_A_MESSAGE as error:
            if event.kind == "exited" and not isinstance(error, ValidationError):
                raise
            return _error_text(error)
        return ""

    def _write_figures(self) -> None:
        if self.figures:
            job_update(self.attempt, **self.figures)
            self.figures = {}

    def _refuse(self, reason: str, text: str = "") -> None:
        self.refused.append(Refusal("event", reason, text, self.attempt.pk))

    def leave_out(self, reasons: Iterable[str]) -> None:
        """Record why points were left out of the metric store."""
        for reason in reasons:
            self._refuse(reason)


def is_routine(batch: ReceivedBatch) -> bool:
    """Return whether a batch holds only valid events that change no state."""
    return all(isinstance(each, RunEvent) and each.kind in ROUTINE for each in batch.events)


def events_accept(
    *, host: Host, batch: EventBatch | ReceivedBatch, num_bytes: int = 0
) -> EventAck:
    """Store a batch of one attempt's events and return the highest number stored.

    An invalid event is skipped and recorded among the host's refused messages, so that it does
    not block later ones. ``num_bytes`` is the size of the batch as transmitted.

    Raises:
        ConflictProblem: this host has no such attempt with this fence.
        QuotaProblem: the host exceeded its hourly quota.
    """
    (outcome,) = _store([HostBatch(host.pk, batch, num_bytes)], waits=True)
    if isinstance(outcome, QuotaProblem):
        quota_refusal_record(host.pk, outcome)
    if isinstance(outcome, Problem):
        raise outcome
    return EventAck(attempt_id=batch.attempt_id, acked_seq=outcome)


def events_accept_together(batches: Sequence[HostBatch]) -> list[int | None]:
    """Store routine batches and return for each the highest number stored.

    None means that a batch must be stored alone: its host has no such attempt with this fence or
    exceeded its quota, or another transaction has locked the job.
    """
    outcomes = _store(batches, waits=False)
    return [None if isinstance(each, Problem) else each for each in outcomes]


def _store(batches: Sequence[HostBatch], *, waits: bool) -> list[int | Problem]:
    """Store batches in one transaction; return the highest number stored, or why none is."""
    with transaction.atomic():
        reports = _locked(batches, waits=waits)
        outcomes = [_take(reports.get(each.batch.attempt_id), each) for each in batches]
        reporting = [report for report in reports.values() if report.has_reported]
        _write(reporting)
        transaction.on_commit(
            lambda: publish_all(message for each in reporting for message in _messages(each)),
            robust=True,
        )
    for each in reporting:
        if refused := each.refused:  # one line per report: a host must not flood the log
            first, attempt = refused[0].reason, each.attempt.pk
            log.warning("events refused", attempt=attempt, num_events=len(refused), first=first)
    return outcomes


def _locked(batches: Sequence[HostBatch], *, waits: bool) -> dict[str, _Report]:
    """Return the senders' own attempts by id, each locked after its job.

    That is the lock order used everywhere. Only one batch may wait for a lock: waiting for one
    job while holding another may deadlock. Without waiting, what is locked is left out.
    """
    sent = {(each.batch.attempt_id, each.host_id, each.batch.fence) for each in batches}
    found = Attempt.objects.filter(pk__in={attempt_id for attempt_id, _, _ in sent})
    own = {
        pk: job
        for pk, host, fence, job in found.values_list("pk", "host_id", "fence", "job_id")
        if (pk, host, fence) in sent
    }
    jobs = {
        pk: (team, current if state in LIVE_STATES else None)
        for pk, team, current, state in Job.objects.select_for_update(skip_locked=not waits)
        .filter(pk__in=set(own.values()))
        .order_by("pk")
        .values_list("pk", "team_id", "current_attempt_id", "state")
    }
    attempts = (
        Attempt.objects.select_for_update(skip_locked=not waits)
        .filter(pk__in=own, job__in=jobs)
        .order_by("pk")
        .defer("facts", "exit_record", "taken_ports")
    )
    return {
        each.pk: _Report(
            each, jobs[each.job_id][0], jobs[each.job_id][1] == each.pk, each.acked_seq
        )
        for each in attempts
    }


def _take(report: _Report | None, sent: HostBatch) -> int | Problem:
    """Accept a batch; return the highest number stored afterwards, or why it is refused."""
    host_id, batch, num_bytes = sent
    if report is None or (report.attempt.host_id, report.attempt.fence) != (host_id, batch.fence):
        return ConflictProblem("unknown_attempt", "This host has no such attempt with this fence.")
    try:
        keep_events(host_id, batch.attempt_id, num_events=len(batch.events), num_bytes=num_bytes)
    except QuotaProblem as problem:
        return problem
    return report.take(batch)


def _write(reports: Collection[_Report]) -> None:
    """Write points, rows and effects of the reports, and the numbers that are stored now."""
    surplus = store.append(
        store.Delivery(each.attempt.pk, each.points, each.stored_seq) for each in reports
    )
    AttemptEvent.objects.bulk_create(
        event_row(each.attempt, event) for each in reports for event in each.events
    )
    for each in reports:
        each.leave_out(surplus.get(each.attempt.pk, ()))
        each.apply()
    update_each(Attempt, map(_attempt_change, reports))
    update_each(
        Job,
        (
            RowChange(each.attempt.job_id, each.figures)
            for each in reports
            if each.is_current and each.figures
        ),
    )
    for each in reports:
        refusals_record(each.attempt.host_id, each.refused)


def _attempt_change(report: _Report) -> RowChange:
    attempt = report.attempt
    values = {
        "acked_seq": attempt.acked_seq,
        "missed_beats": 0,
        "dropped_duplicates": attempt.dropped_duplicates,
        "refused_gaps": attempt.refused_gaps,
    }
    return RowChange(attempt.pk, values)


def _messages(report: _Report) -> list[Message]:
    """Return the live messages of a report; none if they cannot be built, as others' must go."""
    try:
        return list(messages_of(report.attempt, report.team_id, report.understood))
    except FAULTS_OF_A_MESSAGE:
        log.exception("live messages not built", attempt=report.attempt.pk)
        return []


def _error_text(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return first_fault(error)
    return str(error) if isinstance(error, TooManyError) else type(error).__name__


def metric_point(event: RunEvent) -> store.Point:
    """Return the point of a metric event.

    Raises:
        ValidationError: the body is no point.
    """
    point = MetricPoint.model_validate(event.body)
    return store.Point(event.seq, event.t_ms, point.source, _with_step(point))


def _with_step(point: MetricPoint) -> dict[str, float]:
    """Return a point's values, including the job's step if the point has one."""
    return point.values if point.step is None else {**point.values, "step": float(point.step)}


def storable(event: RunEvent) -> RunEvent:
    """Return an event as its row holds it: plain text, and no value that databases reject."""
    body = _finite(event.body)
    if isinstance(body, dict):  # as a host's supervisor writes it; another host may not
        body |= _plain_words(event.kind, body)
    return event.model_copy(update={"body": body})


def _plain_words(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return those fields of an event that a program wrote, as plain text."""
    if kind == "log" and isinstance(body.get("text"), str):
        return {"text": plain(body["text"])}
    if kind == "phase" and isinstance(body.get("name"), str):
        return {"name": " ".join(lines_of(body["name"]))}
    if kind == "exited" and isinstance(lines := body.get("last_lines"), list):
        words = (each if not isinstance(each, str) else " ".join(lines_of(each)) for each in lines)
        return {"last_lines": list(words)}
    return {}


def _finite(value: object) -> object:
    """Return a JSON value without NaN, infinity or NUL characters, which PostgreSQL rejects."""
    if isinstance(value, str):
        return value.replace("\x00", "\ufffd")
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items() if not _is_not_finite(item)}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value if not _is_not_finite(item)]
    return value


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def event_row(attempt: Attempt, event: RunEvent) -> AttemptEvent:
    """Return the database row of an event."""
    return AttemptEvent(
        attempt=attempt,
        seq=event.seq,
        t_ms=event.t_ms,
        received_at=now(),
        kind=event.kind,
        body=event.body,
    )
