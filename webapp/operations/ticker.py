"""Periodic duties of the site, and pruning of old rows and files."""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from django.contrib.sessions.models import Session
from django.db import DataError, IntegrityError, close_old_connections, models, transaction
from django.db.models import Min
from django.db.models.functions import Cast, Length

from runners.shared.timing import scale_duration
from webapp.accounts.models import LoginTry, OpenSession
from webapp.accounts.sign_in import WINDOW, sessions_forget_ended, tries_forget_old
from webapp.agents.dispatch import StartDeadline, allocate_all, expire_stuck_commands
from webapp.api.requests import replies_forget_old
from webapp.audit.chain import events_seal, history_cut, old_history
from webapp.audit.models import Event, Link
from webapp.core.clock import now, now_ms
from webapp.deployments import services as deployments
from webapp.deployments.alarms import alarms_raise
from webapp.deployments.replica_costs import costs_add
from webapp.hosts import epoch
from webapp.hosts.model_copies import copies_expire
from webapp.hosts.models import EnrolmentToken
from webapp.hosts.services import ContactSweep, expire_tokens
from webapp.jobs.artefacts import folder_of
from webapp.jobs.gangs import settle_all
from webapp.jobs.models import Artefact, Attempt, AttemptEvent, Command
from webapp.jobs.services import queue_expire
from webapp.metrics.models import MetricBatch, MetricChunk, MetricSource
from webapp.metrics.store import (
    FOREVER_MS,
    RAW_LIFETIME,
    RAW_STEP_MS,
    needs_seal,
    prune_old,
    roll_up,
    seal,
)
from webapp.modelhub.models import TeamModel
from webapp.servers import looking
from webapp.servers.models import ObservedServer
from webapp.tunings import services as tunings
from webapp.workflows.services import advance_all

# ---------------------------------------------------------------------------
# Periodic tasks, in groups that run in parallel until a signal arrives.
# ---------------------------------------------------------------------------


# Run a function periodically until a signal arrives, whatever it raises.


log = structlog.get_logger(__name__)
FAILURE_REST_SECONDS = 1.0
CONNECTION_SECONDS = 60.0  # a new connection per round costs more than most rounds


class Stopper:
    """Stop event set by SIGTERM and SIGINT; loops check it between rounds and sleep on it."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def listen(self, *others: "Stopper") -> None:
        """Install signal handlers that stop this and others; main thread only."""

        def stop(*_: object) -> None:
            for each in (self, *others):
                each.event.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)


def run_loop(name: str, step: Callable[[], object], every_seconds: float, stop: Stopper) -> None:
    """Call ``step`` periodically; a repeated exception is logged once."""
    last_failure = ""
    renewed_at = time.monotonic()
    while not stop.event.is_set():
        if last_failure or time.monotonic() - renewed_at > CONNECTION_SECONDS:
            close_old_connections()
            renewed_at = time.monotonic()
        rest = every_seconds
        try:
            step()
            if last_failure:
                log.info("works again", loop=name)
            last_failure = ""
        except Exception as error:  # the loop survives any failure of a round
            rest = max(FAILURE_REST_SECONDS, every_seconds)
            if repr(error) != last_failure:
                log.warning("round failed", loop=name, exc_info=True)
            last_failure = repr(error)
        stop.event.wait(rest)
    close_old_connections()


QUEUE_LIFETIME = timedelta(days=7)


PROMPT, METRICS, UPKEEP = "prompt", "metrics", "upkeep"
WORKFLOWS, DEPLOYMENTS, SERVERS = "workflows", "deployments", "servers"
# One thread each: what takes long keeps no other group waiting.
GROUPS = (PROMPT, METRICS, UPKEEP, WORKFLOWS, DEPLOYMENTS, SERVERS)


@dataclass
class Duty:
    """One task to run every ``period_seconds``."""

    name: str
    period_seconds: float
    work: Callable[[], object]
    group: str = PROMPT
    due_at: float = field(default=0.0)


def all_duties() -> list[Duty]:
    """Return all periodic tasks."""
    return [
        Duty("contact", 5.0, ContactSweep().step),
        Duty("allocation", 2.0, allocate_all),
        Duty("start time-out", 5.0, StartDeadline().step),
        Duty("unreachable hosts of ending jobs", 5.0, settle_all),
        Duty("queue time-out", 60.0, lambda: queue_expire(older_than=QUEUE_LIFETIME)),
        Duty("stuck commands", 30.0, expire_stuck_commands),
        Duty("metric chunks", 10.0, seal_due, METRICS),
        Duty("workflows", 2.0, advance_all, WORKFLOWS),
        Duty("tunings", 2.0, tunings.advance_all, WORKFLOWS),
        Duty("deployments", 1.0, deployments.Advance().step, DEPLOYMENTS),
        Duty("observed servers", looking.EVERY_SECONDS, looking.Observer().step, SERVERS),
        Duty("points of removed servers", 3600.0, looking.forget_removed, METRICS),
        Duty("alarms of keys", 10.0, alarms_raise, UPKEEP),
        Duty("costs of deployments", 60.0, costs_add, UPKEEP),
        Duty("metric retention", 3600.0, prune_old, METRICS),
        Duty("redis users", 30.0, epoch.keep, UPKEEP),
        Duty("redis scripts", 5.0, epoch.load_scripts),
        Duty("tokens", 600.0, expire_tokens),
        Duty("copies of models", 60.0, copies_expire, UPKEEP),
        Duty("audit chain", 5.0, events_seal, UPKEEP),
        Duty("login tries", 600.0, tries_forget_old, UPKEEP),
        Duty("ended sessions", 3600.0, sessions_forget_ended, UPKEEP),
        Duty("replies kept for repetitions", 3600.0, replies_forget_old, UPKEEP),
    ]


class Ticker:
    """Runs tasks that are due; a failed task is logged and retried in its next period."""

    def __init__(
        self, duties: Sequence[Duty] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._duties = list(duties) if duties is not None else all_duties()
        self._clock = clock

    def step(self) -> int:
        """Run every due task and return the number that succeeded."""
        due = [duty for duty in self._duties if duty.due_at <= self._clock()]
        return sum(self._do(duty) for duty in due)

    def _do(self, duty: Duty) -> bool:
        duty.due_at = self._clock() + scale_duration(duty.period_seconds, least=0.2)
        try:
            duty.work()
        except Exception:  # a failed task must not stop the others
            log.warning("duty failed", duty=duty.name, exc_info=True)
            return False
        return True


# ---------------------------------------------------------------------------
# Pruning of old data: what can be deleted, how much space it takes, and how to delete it.
#
# Data of a job that has not ended and models that a team lists are never pruned. Every heap
# reports its size before anything is deleted; the history is cut with a record in the audit
# chain.
# ---------------------------------------------------------------------------


SLICE = 2000
ROW_BYTES = 100  # rough size of a row's keys, timestamps and indexes, without its texts


class Lifetimes(NamedTuple):
    """Retention of each kind of data, in days."""

    history: int = 730
    logs: int = 180
    metrics: int = 365  # rolled-up points; raw points are kept for a month
    artefacts: int = 30  # of deleted jobs
    tokens: int = 30  # enrolment tokens, and acknowledged wake signals


class Prunable(NamedTuple):
    """Data of one kind that can be deleted."""

    name: str
    num_things: int
    num_bytes: int
    remove: Callable[[], int]


def heaps(lifetimes: Lifetimes) -> list[Prunable]:
    """Return every heap, including empty ones."""
    logs = AttemptEvent.objects.filter(
        attempt__in=_ended(before(lifetimes.logs)).values("pk"), kind="log"
    )
    instant = now()
    return [
        _history(before(lifetimes.history)),
        _rows("lines of logs", logs, "body"),
        _rows("raw points", _chunks(RAW_LIFETIME).filter(step_ms=RAW_STEP_MS), "body"),
        _rows("rolled-up points", _chunks(timedelta(days=lifetimes.metrics)), "body"),
        _artefacts(before(lifetimes.artefacts)),
        _rows("ended sessions", Session.objects.filter(expire_date__lt=instant), "session_data"),
        _rows(
            "browsers without a session",
            OpenSession.objects.exclude(session_key__in=Session.objects.values("session_key")),
            "browser",
        ),
        _rows("tried passwords", LoginTry.objects.filter(at__lt=instant - WINDOW), "account"),
        _rows("tokens", _tokens(before(lifetimes.tokens)), "name"),
        _rows(
            "doorbells",
            Command.objects.filter(
                created_at__lt=before(lifetimes.tokens), state__in=("acked", "dead")
            ),
            "kind",
        ),
    ]


def before(days: int) -> datetime:
    """Return the instant that is ``days`` days ago."""
    return now() - timedelta(days=days)


def _rows(name: str, rows: models.QuerySet[Any], text: str) -> Prunable:
    """Return a heap of rows, with its size estimated from its longest column."""
    weight = (
        Length(text)
        if text == "body" and isinstance(rows.model._meta.get_field("body"), models.BinaryField)
        else Length(_as_text(text))
    )
    totals = rows.aggregate(count=models.Count("*"), bytes=models.Sum(weight))
    num_bytes = (totals["bytes"] or 0) + ROW_BYTES * totals["count"]
    return Prunable(name, totals["count"], num_bytes, lambda: _delete(rows))


def _as_text(column: str) -> Cast:
    return Cast(column, models.TextField())


def _delete(rows: models.QuerySet[Any]) -> int:
    """Delete rows in slices, so that other writers wait for one slice at most."""
    total = 0
    while keys := list(rows.order_by().values_list("pk", flat=True)[:SLICE]):
        total += rows.model._default_manager.filter(pk__in=keys).delete()[0]  # noqa: SLF001 (documented)
    return total


def _ended(instant: datetime) -> models.QuerySet[Attempt]:
    """Return attempts that ended before ``instant``, as did their jobs."""
    return Attempt.objects.filter(ended_at__lt=instant, job__ended_at__lt=instant)


def _chunks(age: timedelta) -> models.QuerySet[MetricChunk]:
    return MetricChunk.objects.filter(t1_ms__lt=now_ms() - int(age.total_seconds() * 1000))


def _tokens(instant: datetime) -> models.QuerySet[EnrolmentToken]:
    return EnrolmentToken.objects.filter(expires_at__lt=instant)


def _history(instant: datetime) -> Prunable:
    old = old_history(instant)
    if old is None:
        return Prunable("events of the history", 0, 0, lambda: 0)
    links = Link.objects.filter(position__lte=old.link.position).values("event_id")
    totals = Event.objects.filter(pk__in=links).aggregate(n=models.Sum(Length(_as_text("detail"))))
    num_bytes = (totals["n"] or 0) + 3 * ROW_BYTES * old.num_events
    return Prunable(
        "events of the history",
        old.num_events,
        num_bytes,
        lambda: history_cut(before=instant, by="system:prune"),
    )


def _artefacts(instant: datetime) -> Prunable:
    """Return the artefacts of deleted jobs, without those that a team lists as a model."""
    listed = TeamModel.objects.exclude(attempt_id="").values("attempt_id")
    rows = Artefact.objects.filter(attempt__job__deleted_at__lt=instant)
    rows = rows.exclude(attempt_id__in=listed).select_related("attempt")
    folders = [(row, folder_of(row)) for row in rows]
    num_bytes = sum(bytes_below(folder) for _, folder in folders)
    return Prunable(
        "artefacts of deleted jobs", len(folders), num_bytes, lambda: _delete_artefacts(folders)
    )


def bytes_below(folder: Path) -> int:
    """Return the total size of the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _delete_artefacts(folders: list[tuple[Artefact, Path]]) -> int:
    """Delete the rows, then their files."""
    with transaction.atomic():
        Artefact.objects.filter(pk__in=[row.pk for row, _ in folders]).delete()
    for _, folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return len(folders)


TURN_SECONDS = 5.0  # per turn; the remainder follows in the next turn


def seal_due(clock: Callable[[], float] = time.monotonic) -> int:
    """Seal sources whose journal is due, roll them up, and return the points sealed.

    The oldest journal comes first, and a turn ends after ``TURN_SECONDS``, so that an attempt
    with many points does not block others. A source that cannot be sealed is logged and skipped.
    """
    journals = MetricBatch.objects.values("attempt_id", "source").annotate(at=Min("received_at"))
    started, sealed = clock(), 0
    for attempt_id, source in list(journals.order_by("at").values_list("attempt_id", "source")):
        if clock() - started > TURN_SECONDS:
            break
        try:
            sealed += _seal(attempt_id, source)
        except (ArithmeticError, DataError, IntegrityError, LookupError, TypeError, ValueError):
            log.warning("journal not sealed", attempt=attempt_id, source=source, exc_info=True)
    return sealed


def _seal(attempt_id: str, source: str) -> int:
    attempt = Attempt.objects.filter(pk=attempt_id).first()
    is_ended = attempt is not None and attempt.ended_at is not None
    if attempt is not None:
        through_seq = attempt.acked_seq
    elif ObservedServer.objects.filter(pk=attempt_id).exists():
        through_seq = FOREVER_MS  # its points are numbered by their time, and final at once
    else:
        return 0
    if not needs_seal(attempt_id, source, is_ended=is_ended):
        return 0
    sealed = seal(attempt_id, source, through_seq=through_seq)
    stored = MetricSource.objects.get(attempt_id=attempt_id, source=source)
    roll_up(stored, is_ended=is_ended)
    return sealed
