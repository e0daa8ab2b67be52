"""Store the numbered events of attempts, apply their changes of state, and publish them."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import structlog
from django.db import DataError, IntegrityError, transaction
from django.db.models import F
from pydantic import ValidationError

from runners.jobspec.base import excerpt
from runners.shared.log_text import lines_of, plain
from runners.shared.messages import (
    ArtefactBody,
    EndpointBody,
    EventAck,
    EventBatch,
    ExitRecord,
    LogBody,
    MetricPoint,
    PhaseBody,
    ProgressBody,
    ReceivedBatch,
    RefusedEvent,
    ResultBody,
    RunEvent,
    StartedBody,
    first_fault,
)
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem
from webapp.hosts.models import Host
from webapp.hosts.pools import (
    QuotaProblem,
    Refusal,
    keep_events,
    quota_refusal_record,
    refusals_record,
)
from webapp.jobs.allocation import allocate_after
from webapp.jobs.gangs import all_started, devices_release, member_ended
from webapp.jobs.models import (
    LIVE_STATES,
    Artefact,
    Attempt,
    AttemptEvent,
    Command,
    Job,
    JobState,
)
from webapp.jobs.results import job_finished
from webapp.jobs.transitions import final_state, transition
from webapp.live.stream import jobs_topic, publish_all
from webapp.metrics import store

# Publish stored events to open pages.


LIST_SECONDS = 1.0
LONGEST_PHASE = 80
# Of one message's lines: Redis and every web process keep those of the last minutes in memory.
MAX_LIVE_CHARACTERS = 64 * 1024
RESYNC = "resync"  # the page reads the store instead
Message = tuple[str, str, Mapping[str, Any]]  # topic, event, data


class Pace:
    """Rate limit of one message per second and key, enough for lists."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}

    def may_go(self, key: str) -> bool:
        """Return whether a message may be sent: a second has passed since the last one."""
        instant = self._clock()
        if instant - self._last.get(key, -LIST_SECONDS) < LIST_SECONDS:
            return False
        self._last[key] = instant
        return True


list_pace = Pace()


def announce(attempt: Attempt, events: list[RunEvent]) -> None:
    """Publish a committed batch of one attempt."""
    teams = Job.objects.filter(pk=attempt.job_id).values_list("team_id", flat=True)
    publish_all(messages_of(attempt, teams.get(), events))


def messages_of(attempt: Attempt, team_id: str, events: list[RunEvent]) -> Iterator[Message]:
    """Yield the messages of a batch: its log lines, the latest progress, and what else has come.

    Points and results are not in them: pages read them from the store, with what belongs to them.
    """
    topic = f"job:{attempt.job_id}"
    common = {"job": attempt.job_id, "attempt": attempt.pk, "host": attempt.node_rank}
    by_kind: dict[str, list[RunEvent]] = {}
    for event in events:
        by_kind.setdefault(event.kind, []).append(event)
    if "metric" in by_kind:
        yield topic, "job.metric", {"host": attempt.node_rank}
    if lines := by_kind.get("log"):
        data = [{"seq": event.seq, "t_ms": event.t_ms, **_line(event.body)} for event in lines]
        is_short = sum(len(line["text"]) for line in data) <= MAX_LIVE_CHARACTERS
        yield (topic, "job.log", {**common, "lines": data}) if is_short else (topic, RESYNC, {})
    if "result" in by_kind:
        yield topic, "job.result", {"host": attempt.node_rank}
    if not attempt.node_rank:  # rank 0 reports for the whole job
        yield from _publish_progress(topic, team_id, common, by_kind)


def _line(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"stream": body["stream"], "text": body["text"]}


def _publish_progress(
    topic: str, team_id: str, common: dict[str, Any], by_kind: dict[str, list[RunEvent]]
) -> Iterator[Message]:
    progress = by_kind.get("progress", [])
    phases = by_kind.get("phase", [])
    if not progress and not phases:
        return
    data = {**common}
    if progress:
        data |= {name: progress[-1].body[name] for name in ("done", "total")}
    if phases:
        data["phase"] = phases[-1].body["name"][:LONGEST_PHASE]
    yield topic, "job.progress", data
    if list_pace.may_go(team_id):
        yield jobs_topic(team_id), "job.progress", data


# Apply each kind of event to its attempt and, if that is current, to its job.


LONGEST_ETA_SECONDS = 10 * 365 * 86_400.0  # longer values are division artefacts, not estimates


def apply_event(attempt: Attempt, event: RunEvent) -> None:
    """Apply one stored event; metric points are stored elsewhere.

    Raises:
        ValidationError: the body does not match the event's kind.
    """
    _HANDLERS[event.kind](attempt, event.body)


def _started(attempt: Attempt, body: dict[str, Any]) -> None:
    StartedBody.model_validate(body)
    Attempt.objects.filter(pk=attempt.pk, started_at=None).update(started_at=now())
    leader = attempt.head
    if all_started(leader):
        transition(attempt.job, JobState.RUNNING, actor=_actor(attempt), attempt=leader)


def job_figures(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the job's fields that a phase or progress event sets; a log line sets none.

    Raises:
        ValidationError: the body does not match the event's kind.
    """
    if kind == "phase":
        return {"phase": PhaseBody.model_validate(body).name[:LONGEST_PHASE]}
    if kind == "log":
        LogBody.model_validate(body)
        return {}
    progress = ProgressBody.model_validate(body)
    eta = progress.eta_seconds
    return {
        "progress_done": progress.done,
        "progress_total": progress.total,
        "progress_unit": progress.unit[:24],
        "progress_at": now(),
        "eta_seconds": eta if eta is not None and eta < LONGEST_ETA_SECONDS else None,
    }


def _phase(attempt: Attempt, body: dict[str, Any]) -> None:
    _update_job(attempt, **job_figures("phase", body))


def _progress(attempt: Attempt, body: dict[str, Any]) -> None:
    _update_job(attempt, **job_figures("progress", body))


def _log(_attempt: Attempt, body: dict[str, Any]) -> None:
    job_figures("log", body)


def _result(attempt: Attempt, body: dict[str, Any]) -> None:
    if isinstance(measured := body.get("measured"), dict):  # null stands for NaN
        body = {
            **body,
            "measured": {k: value for k, value in measured.items() if value is not None},
        }
    result = ResultBody.model_validate(body)
    _update_job(attempt, result=result.model_dump(mode="json"))


MAX_ARTEFACTS = 200  # of one attempt; pages list them all


class TooManyError(ValueError):
    """An attempt has announced as many things as it may; the text names them."""


def _artefact(attempt: Attempt, body: dict[str, Any]) -> None:
    artefact = ArtefactBody.model_validate(body)
    others = Artefact.objects.filter(attempt=attempt).exclude(name=artefact.name)
    if others.count() >= MAX_ARTEFACTS:
        raise TooManyError(f"name: the attempt has {MAX_ARTEFACTS} artefacts, the limit")
    Artefact.objects.update_or_create(
        attempt=attempt,
        name=artefact.name,
        defaults={
            "kind": artefact.kind,
            "total_bytes": artefact.total_bytes,
            "files": artefact.files,
            "sha256": artefact.sha256,
            "facts": artefact.facts,
        },
    )


def _endpoint(_attempt: Attempt, body: dict[str, Any]) -> None:
    EndpointBody.model_validate(body)


def _exited(attempt: Attempt, body: dict[str, Any]) -> None:
    """Store the exit record; end the job if the attempt is its current one."""
    record = ExitRecord.model_validate(body)
    # A supervisor cannot query GPUs: the loads are those of the host's last heartbeat.
    gpus = attempt.host.last_beat.get("gpus") or []
    Attempt.objects.filter(pk=attempt.pk).update(
        exit_record=record.model_dump(mode="json") | ({"gpus": gpus} if gpus else {}),
        ended_at=now(),
    )
    Command.objects.filter(attempt=attempt).exclude(state="dead").update(state="acked")
    devices_release(attempt)
    job: Job = attempt.job
    if job.is_shared_out:
        member_ended(attempt, record)
    elif transition(
        job,
        final_state(record.reason),
        actor=_actor(attempt),
        attempt=attempt,
        reason=record.reason,
        detail={"exit_code": record.exit_code, "signal": record.signal, "by": record.by},
    ):
        job_finished(job, attempt)
    transaction.on_commit(lambda: allocate_after(attempt))


def _update_job(attempt: Attempt, **changes: object) -> None:
    """Update a job's figures if the attempt is its current one and it has not ended."""
    rows = Job.objects.filter(pk=attempt.job_id, current_attempt=attempt.pk, state__in=LIVE_STATES)
    rows.update(**changes)


def _actor(attempt: Attempt) -> str:
    return f"host:{attempt.host.slug}"


_HANDLERS: Mapping[str, Callable[[Attempt, dict[str, Any]], None]] = {
    "started": _started,
    "phase": _phase,
    "progress": _progress,
    "log": _log,
    "result": _result,
    "artefact": _artefact,
    "endpoint": _endpoint,
    "exited": _exited,
}


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
        quota_refusal_record(host.pk, problem)
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
        transaction.on_commit(lambda: announce(attempt, valid), robust=True)
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
    if isinstance(error, ValidationError):
        return first_fault(error)
    return str(error) if isinstance(error, TooManyError) else type(error).__name__


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
    """Return the event as it is stored: its words as plain text, no value that databases reject.

    Metric points are unchanged.
    """
    if event.kind == "metric":
        return event
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
