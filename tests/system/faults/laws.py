"""What must hold in the database after every fault, each law as the rows that break it.

A law returns what breaks it: an empty list is the proof. They run inside Django, on the database
of the installation under test (``tests/system/faults/desk.py``) or on a test's own.
"""

import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db import connection

from runners.shared.timing import scale_duration
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.hosts.services import Contact, contact_of
from webapp.jobs.models import (
    FINAL_STATES,
    LIVE_STATES,
    Allocation,
    Attempt,
    AttemptEvent,
    Command,
    Job,
)
from webapp.metrics.models import MetricBatch, MetricChunk
from webapp.metrics.store import RAW_STEP_MS, decode, unpack

Rows = list[Any]
SETTLE_SECONDS = 0.3
# What the server may end an attempt for by itself; the host's silence is not among it.
SERVERS_REASONS = frozenset(
    {
        "start_timeout", "never_started", "supervisor_lost", "preflight_failed", "queue_timeout",
        "superseded", "stopped_by_user", "stopped_by_operator", "site_stopped", "lost_and_abandoned_by_user", "quota",
    }
)  # fmt: skip
RING_WITHIN = timedelta(seconds=scale_duration(120, least=10))


def contiguous_events() -> Rows:
    """I1: the numbers of an attempt's events and points run from 1 to the acknowledged one."""
    broken = []
    for attempt in Attempt.objects.all():
        counted = Counter(_numbers(attempt.pk))
        wanted = range(1, attempt.acked_seq + 1)
        lost = [seq for seq in wanted if not counted[seq]]
        doubled = [seq for seq, times in counted.items() if times > 1]
        beyond = [seq for seq in counted if seq > attempt.acked_seq]
        if lost or doubled or beyond:
            broken.append([attempt.pk, {"lost": lost, "doubled": doubled, "beyond": beyond}])
    return broken


def _numbers(attempt_id: str) -> list[int]:
    """Return the number of every stored event and point, as often as it is stored."""
    rows = list(AttemptEvent.objects.filter(attempt=attempt_id).values_list("seq", flat=True))
    journal = MetricBatch.objects.filter(attempt_id=attempt_id)
    points = [point.seq for batch in journal for point in unpack(batch)]
    chunks = MetricChunk.objects.filter(attempt_id=attempt_id, step_ms=RAW_STEP_MS)
    sealed: dict[str, list[int]] = {}  # a point has a row in the chunk of each of its metrics
    for chunk in chunks:
        sealed.setdefault(chunk.metric, []).extend(map(int, decode(bytes(chunk.body))[0]))
    most = Counter[int]()
    for numbers in sealed.values():
        most |= Counter(numbers)
    return [*rows, *points, *most.elements()]


def one_live_attempt() -> Rows:
    """I2: no job has two claimed attempts that have not ended, unless a person forced it."""
    return _query(
        "SELECT job_id FROM jobs_attempt WHERE claimed_at IS NOT NULL AND ended_at IS NULL"
        " AND stop_reason <> 'lost_and_abandoned_by_user' GROUP BY job_id HAVING COUNT(*) > 1"
    )


def one_holder() -> Rows:
    """I3: no device is held twice, but for parts of its memory."""
    held = list(Allocation.objects.filter(released_at=None).values_list("device", "shared_bytes"))
    times, alone = (
        Counter(device for device, _ in held),
        {key for key, part in held if part is None},
    )
    return [device for device in alone if times[device] > 1]


def nothing_held_by_the_dead() -> Rows:
    """I4: an attempt that has ended holds no device of a host that answers, nor its job alive."""
    held = Allocation.objects.filter(released_at=None, attempt__ended_at__isnull=False)
    devices = [
        one.pk
        for one in held.select_related("attempt__host")
        if contact_of(one.attempt.host) is Contact.LIVE
    ]
    jobs = Job.objects.filter(state__in=LIVE_STATES, current_attempt__ended_at__isnull=False)
    return [*devices, *jobs.values_list("pk", flat=True)]


def terminal_is_final() -> Rows:
    """I5: nothing leaves a final state."""
    events = Event.objects.filter(kind="job.state", from_state__in=FINAL_STATES)
    return list(events.values_list("subject", flat=True))


def row_is_last_transition() -> Rows:
    """I6: a job's row says what its last transition said, and each began where one ended."""
    chained = _query(
        "SELECT subject, from_state, before FROM (SELECT subject, from_state, LAG(to_state) OVER"
        " (PARTITION BY subject ORDER BY id) AS before FROM jobs_event WHERE kind = 'job.state') AS e"
        " WHERE before IS NOT NULL AND before <> from_state"
    )
    return chained + _query(
        "SELECT j.id FROM jobs_job j JOIN jobs_event e ON e.id = (SELECT MAX(id) FROM jobs_event"
        " WHERE subject = j.id AND kind = 'job.state') WHERE e.to_state <> j.state"
    )


def every_end_has_a_reason() -> Rows:
    """I7: whatever did not go well says why."""
    return _query(
        "SELECT id, state FROM jobs_job WHERE state IN ('failed', 'error', 'stopped', 'expired')"
        " AND reason = ''"
    )


def outbox_drains() -> Rows:
    """I8: no doorbell waits for long at a host that answers."""
    waiting = Command.objects.filter(
        state__in=["new", "sent"], created_at__lt=now() - RING_WITHIN
    ).select_related("host")
    return [[each.pk, each.kind] for each in waiting if contact_of(each.host) is Contact.LIVE]


def silence_ends_nothing() -> Rows:
    """I9: the server ends an attempt by itself only for a reason that is no silence."""
    ended = Job.objects.filter(state__in=FINAL_STATES, current_attempt__exit_record={})
    told = ended.exclude(current_attempt=None).exclude(reason__in=SERVERS_REASONS)
    return list(told.values_list("pk", "reason"))


def _query(sql: str) -> Rows:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return [list(row) for row in cursor.fetchall()]


LAWS: dict[str, Callable[[], Rows]] = {
    "I1 events are contiguous": contiguous_events,
    "I2 one live attempt per job": one_live_attempt,
    "I3 one holder per device": one_holder,
    "I4 nothing is held by the dead": nothing_held_by_the_dead,
    "I5 terminal is final": terminal_is_final,
    "I6 row is last transition": row_is_last_transition,
    "I7 every end has a reason": every_end_has_a_reason,
    "I8 the outbox drains": outbox_drains,
    "I9 silence ends nothing": silence_ends_nothing,
}


def broken_laws() -> dict[str, Rows]:
    """Return every law that does not hold, with what breaks it.

    A law that is broken is looked at once more: points move from the journal into chunks while
    it reads them.
    """
    found = {name: law() for name, law in LAWS.items()}
    if not any(found.values()):
        return {}
    time.sleep(SETTLE_SECONDS)
    again = {name: LAWS[name]() for name, rows in found.items() if rows}
    return {name: rows for name, rows in again.items() if rows}
