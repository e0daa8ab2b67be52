"""Ingestion of the numbered events that hosts report.

Accepts only the sequence number after the last one stored. Lower ones are duplicates, a
higher one is a gap: both are counted and change nothing, and the reply states the last number
stored. The metric store may be another database, so its rows are written first, under the
attempt's lock; rows of an interrupted batch beyond the acknowledged number are discarded.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import structlog
from django.db import DataError, IntegrityError, transaction
from django.db.models import F
from pydantic import ValidationError

from runners.messages import (
    EventAck,
    EventBatch,
    MetricPoint,
    ReceivedBatch,
    RefusedEvent,
    RunEvent,
    first_fault,
)
from runners.wire import excerpt
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem
from webapp.hosts.hourly import QuotaProblem, keep_events, quota_refusal_record
from webapp.hosts.models import Host
from webapp.hosts.refused import Refusal, refusals_record
from webapp.jobs.attempt_events import apply_event
from webapp.jobs.live import announce
from webapp.jobs.models import Attempt, AttemptEvent, Job
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
    try:
        return _accept(host, batch, num_bytes)
    except QuotaProblem as problem:
        quota_refusal_record(host.pk, "event", problem)
        raise


def _accept(host: Host, batch: EventBatch | ReceivedBatch, num_bytes: int) -> EventAck:
    with transaction.atomic():
        attempt = _lock_attempt(host, batch)
        keep_events(host.pk, attempt.pk, num_events=len(batch.events), num_bytes=num_bytes)
        sifted = split_batch(batch.events, attempt.acked_seq)
        events = [storable(each) for each in sifted.fresh if isinstance(each, RunEvent)]
        refused = [
            Refusal("event", each.reason, each.excerpt, attempt.pk)
            for each in sifted.fresh
            if isinstance(each, RefusedEvent)
        ]
        valid: list[RunEvent] = []
        if sifted.fresh:
            valid, more = _store(attempt, events, last_seq=sifted.fresh[-1].seq)
            refused += more
        Attempt.objects.filter(pk=attempt.pk).update(
            acked_seq=attempt.acked_seq,
            missed_beats=0,
            dropped_duplicates=F("dropped_duplicates") + sifted.duplicates,
            refused_gaps=F("refused_gaps") + sifted.gaps,
        )
        refusals_record(host.pk, refused)
        transaction.on_commit(lambda: announce(attempt, valid))
    if refused:  # one line per batch: a host must not flood the log
        first = refused[0].reason
        log.warning("events refused", attempt=attempt.pk, num_events=len(refused), first=first)
    return EventAck(attempt_id=attempt.pk, acked_seq=attempt.acked_seq)


def _lock_attempt(host: Host, batch: EventBatch | ReceivedBatch) -> Attempt:
    """Return the attempt, locked after its job: the lock order used everywhere."""
    owned = {"pk": batch.attempt_id, "host": host, "fence": batch.fence}
    job_id = Attempt.objects.filter(**owned).values_list("job", flat=True).first()
    Job.objects.select_for_update().filter(pk=job_id).values_list("pk").first()
    attempt = Attempt.objects.select_for_update().filter(**owned).first()
    if attempt is None:
        raise ConflictProblem("unknown_attempt", "This host has no such attempt with this fence.")
    return attempt


def _store(
    attempt: Attempt, events: list[RunEvent], *, last_seq: int
) -> tuple[list[RunEvent], list[Refusal]]:
    """Store and apply new events; return the valid ones and a refusal for each other."""
    points, refused = metric_points(attempt, events)
    surplus = store.append(attempt.pk, points, acked_seq=attempt.acked_seq)
    refused += [Refusal("event", reason, attempt_id=attempt.pk) for reason in surplus]
    AttemptEvent.objects.bulk_create(
        event_row(attempt, event) for event in events if is_row(event)
    )
    attempt.acked_seq = last_seq
    numbers = {point.seq for point in points}
    valid = []
    for event in events:
        if event.kind == "metric":
            is_valid = event.seq in numbers
        else:
            refusal = _apply(attempt, event)
            refused += [refusal] if refusal else []
            is_valid = refusal is None
        valid += [event] if is_valid else []
    return valid, refused


def _apply(attempt: Attempt, event: RunEvent) -> Refusal | None:
    """Apply an event; return a refusal if its body is invalid (the event stays stored).

    Raises:
        Exception: a valid "exited" event could not be applied. The host sends it again: a job
            whose end is skipped would never end.
    """
    try:
        with transaction.atomic():
            apply_event(attempt, event)
    except FAULTS_OF_A_MESSAGE as error:
        if event.kind == "exited" and not isinstance(error, ValidationError):
            raise
        return Refusal(
            "event", f"{event.kind}: {_error_text(error)}", excerpt(event.body), attempt.pk
        )
    return None


def _error_text(error: Exception) -> str:
    return first_fault(error) if isinstance(error, ValidationError) else type(error).__name__


def metric_points(
    attempt: Attempt, events: list[RunEvent]
) -> tuple[list[store.Point], list[Refusal]]:
    """Return the metric points among the events, and a refusal for each invalid one."""
    points, refused = [], []
    for event in events:
        if event.kind != "metric":
            continue
        try:
            point = MetricPoint.model_validate(event.body)
        except ValidationError as error:
            reason = f"metric: {first_fault(error)}"
            refused.append(Refusal("event", reason, excerpt(event.body), attempt.pk))
            continue
        points.append(store.Point(event.seq, event.t_ms, point.source, _with_step(point)))
    return points, refused


def _with_step(point: MetricPoint) -> dict[str, float]:
    """Return a point's values, including the job's step if the point has one."""
    return point.values if point.step is None else {**point.values, "step": float(point.step)}


def is_row(event: RunEvent) -> bool:
    """Return whether an event is stored as a row; points go to the metric store."""
    return event.kind != "metric"


def storable(event: RunEvent) -> RunEvent:
    """Return the event without values that databases reject; metric points are unchanged."""
    if event.kind == "metric":
        return event
    return event.model_copy(update={"body": _finite(event.body)})


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
