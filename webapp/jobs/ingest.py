"""What hosts report: the one door through which numbered events enter the database.

Accepts only the number after the last one stored. Lower ones are duplicates, a higher one is
a gap: both are counted and change nothing, and the reply says where to go on. The metric
store may be another database, so its rows are written first, under the attempt's lock, and
whatever an interrupted batch left there beyond the acknowledged number is discarded.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import structlog
from django.db import transaction
from django.db.models import F
from pydantic import ValidationError

from runners.messages import EventAck, EventBatch, MetricPoint, RunEvent
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem
from webapp.hosts.models import Host
from webapp.jobs.attempt_events import apply_event
from webapp.jobs.live import announce
from webapp.jobs.models import Attempt, AttemptEvent, Job
from webapp.metrics import store

log = structlog.get_logger(__name__)


class Sifted(NamedTuple):
    """A batch, split by what is to be done with each event."""

    fresh: list[RunEvent]
    duplicates: int
    gaps: int


def sift(events: Sequence[RunEvent], acked_seq: int) -> Sifted:
    """Return the events that follow ``acked_seq`` without a gap, and how many do not."""
    fresh: list[RunEvent] = []
    duplicates = gaps = 0
    for event in events:
        expected = acked_seq + len(fresh) + 1
        if event.seq == expected:
            fresh.append(event)
        elif event.seq < expected:
            duplicates += 1
        else:
            gaps += 1
    return Sifted(fresh, duplicates, gaps)


def events_accept(*, host: Host, batch: EventBatch) -> EventAck:
    """Store a batch of one attempt's events and return the highest number stored.

    Raises:
        ConflictProblem: this host has no such attempt with this fence.
    """
    with transaction.atomic():
        attempt = _lock_attempt(host, batch)
        sifted = sift([_storable(event) for event in batch.events], attempt.acked_seq)
        if sifted.fresh:
            _store(attempt, sifted.fresh)
        Attempt.objects.filter(pk=attempt.pk).update(
            acked_seq=attempt.acked_seq,
            missed_beats=0,
            dropped_duplicates=F("dropped_duplicates") + sifted.duplicates,
            refused_gaps=F("refused_gaps") + sifted.gaps,
        )
        transaction.on_commit(lambda: announce(attempt, sifted.fresh))
    return EventAck(attempt_id=attempt.pk, acked_seq=attempt.acked_seq)


def _lock_attempt(host: Host, batch: EventBatch) -> Attempt:
    """Return the attempt, locked after its job: the order in which everyone locks them."""
    owned = {"pk": batch.attempt_id, "host": host, "fence": batch.fence}
    job_id = Attempt.objects.filter(**owned).values_list("job", flat=True).first()
    Job.objects.select_for_update().filter(pk=job_id).first()
    attempt = Attempt.objects.select_for_update().filter(**owned).first()
    if attempt is None:
        raise ConflictProblem("unknown_attempt", "This host has no such attempt with this fence.")
    return attempt


def _store(attempt: Attempt, fresh: list[RunEvent]) -> None:
    store.append(attempt.pk, _points(fresh), acked_seq=attempt.acked_seq)
    AttemptEvent.objects.bulk_create(_row(attempt, event) for event in fresh if _is_row(event))
    attempt.acked_seq = fresh[-1].seq
    for event in fresh:
        if event.kind != "metric":
            _apply(attempt, event)


def _apply(attempt: Attempt, event: RunEvent) -> None:
    """Carry an event out; one whose body makes no sense stays as evidence and holds none up."""
    try:
        apply_event(attempt, event)
    except ValidationError as error:
        log.warning("event not understood", attempt=attempt.pk, seq=event.seq, why=str(error))


def _points(events: list[RunEvent]) -> list[store.Point]:
    points = []
    for event in events:
        if event.kind != "metric":
            continue
        try:
            point = MetricPoint.model_validate(event.body)
        except ValidationError as error:
            log.warning("point not understood", seq=event.seq, why=str(error))
            continue
        points.append(store.Point(event.seq, event.t_ms, point.source, _with_step(point)))
    return points


def _with_step(point: MetricPoint) -> dict[str, float]:
    """Return a point's values, with the job's step among them where it names one."""
    return point.values if point.step is None else {**point.values, "step": float(point.step)}


def _is_row(event: RunEvent) -> bool:
    return event.kind != "metric"


def _storable(event: RunEvent) -> RunEvent:
    """Return the event without what databases refuse; points keep it, they are stored apart."""
    if event.kind == "metric":
        return event
    return event.model_copy(update={"body": _finite(event.body)})


def _finite(value: object) -> object:
    """Return a JSON value without numbers that are none and without NUL, which PostgreSQL bars."""
    if isinstance(value, str):
        return value.replace("\x00", "\ufffd")
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items() if not _is_lost(one)}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value if not _is_lost(one)]
    return value


def _is_lost(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _row(attempt: Attempt, event: RunEvent) -> AttemptEvent:
    return AttemptEvent(
        attempt=attempt,
        seq=event.seq,
        t_ms=event.t_ms,
        received_at=now(),
        kind=event.kind,
        body=event.body,
    )
