"""What has outlived its use, how much room it takes, and how it goes.

Nothing of a job that has not ended is ever old, nor a model that a team lists. Every heap says
what it is before anything is deleted; the history goes by a cut that its chain tells of.
"""

import shutil
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from django.contrib.sessions.models import Session
from django.db import models, transaction
from django.db.models.functions import Cast, Length

from webapp.accounts.guesses import WINDOW
from webapp.accounts.models import LoginTry, OpenSession
from webapp.audit.cut import history_cut, old_history
from webapp.audit.models import Link
from webapp.core.clock import now, now_ms
from webapp.hosts.models import EnrolmentToken
from webapp.jobs.models import Artefact, Attempt, AttemptEvent, Command, Event
from webapp.jobs.uploads import folder_of
from webapp.metrics.models import MetricChunk
from webapp.metrics.store import RAW_STEP_MS
from webapp.metrics.upkeep import RAW_LIFETIME
from webapp.modelhub.models import TeamModel

SLICE = 2000
ROW_BYTES = 100  # keys, instants and indexes of a row, beside its texts; a rough figure


class Lifetimes(NamedTuple):
    """After how many days each kind is old."""

    history: int = 730
    logs: int = 180
    metrics: int = 365  # the roll-ups; raw points go after a month
    artefacts: int = 30  # of jobs that somebody deleted
    tokens: int = 30  # of enrolment, and doorbells that were heard


class Heap(NamedTuple):
    """Things of one kind that may go."""

    name: str
    num_things: int
    num_bytes: int
    remove: Callable[[], int]


def heaps(lifetimes: Lifetimes) -> list[Heap]:
    """Return every heap, also those with nothing in them."""
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
        _rows("browsers without a session", _closed_browsers(), "browser"),
        _rows("tried passwords", LoginTry.objects.filter(at__lt=instant - WINDOW), "account"),
        _rows("tokens", _tokens(before(lifetimes.tokens)), "name"),
        _rows("doorbells", _doorbells(before(lifetimes.tokens)), "kind"),
    ]


def before(days: int) -> datetime:
    """Return the instant before which things are so many days old."""
    return now() - timedelta(days=days)


def _rows(name: str, rows: models.QuerySet[Any], text: str) -> Heap:
    """Return a heap of rows, weighed by its longest column."""
    weight = Length(text) if text == "body" and _is_binary(rows) else Length(_as_text(text))
    found = rows.aggregate(count=models.Count("*"), bytes=models.Sum(weight))
    num_bytes = (found["bytes"] or 0) + ROW_BYTES * found["count"]
    return Heap(name, found["count"], num_bytes, lambda: _delete(rows))


def _is_binary(rows: models.QuerySet[Any]) -> bool:
    return isinstance(rows.model._meta.get_field("body"), models.BinaryField)


def _as_text(column: str) -> Cast:
    return Cast(column, models.TextField())


def _delete(rows: models.QuerySet[Any]) -> int:
    """Delete rows slice by slice, so that whoever else writes waits for one at most."""
    total = 0
    while keys := list(rows.order_by().values_list("pk", flat=True)[:SLICE]):
        total += rows.model._default_manager.filter(pk__in=keys).delete()[0]  # noqa: SLF001 (documented)
    return total


def _ended(instant: datetime) -> models.QuerySet[Attempt]:
    """Return attempts that ended before then, of jobs that ended."""
    return Attempt.objects.filter(ended_at__lt=instant, job__ended_at__lt=instant)


def _chunks(age: timedelta) -> models.QuerySet[MetricChunk]:
    return MetricChunk.objects.filter(t1_ms__lt=now_ms() - int(age.total_seconds() * 1000))


def _closed_browsers() -> models.QuerySet[OpenSession]:
    return OpenSession.objects.exclude(session_key__in=Session.objects.values("session_key"))


def _tokens(instant: datetime) -> models.QuerySet[EnrolmentToken]:
    return EnrolmentToken.objects.filter(expires_at__lt=instant)


def _doorbells(instant: datetime) -> models.QuerySet[Command]:
    return Command.objects.filter(created_at__lt=instant, state__in=("acked", "dead"))


def _history(instant: datetime) -> Heap:
    old = old_history(instant)
    if old is None:
        return Heap("events of the history", 0, 0, lambda: 0)
    links = Link.objects.filter(position__lte=old.link.position).values("event_id")
    found = Event.objects.filter(pk__in=links).aggregate(n=models.Sum(Length(_as_text("detail"))))
    num_bytes = (found["n"] or 0) + 3 * ROW_BYTES * old.num_events
    return Heap(
        "events of the history",
        old.num_events,
        num_bytes,
        lambda: history_cut(before=instant, by="system:prune"),
    )


def _artefacts(instant: datetime) -> Heap:
    """Return the files of jobs that were deleted, without those that a team lists as a model."""
    listed = TeamModel.objects.exclude(attempt_id="").values("attempt_id")
    rows = Artefact.objects.filter(attempt__job__deleted_at__lt=instant)
    rows = rows.exclude(attempt_id__in=listed).select_related("attempt")
    folders = [(row, folder_of(row)) for row in rows]
    num_bytes = sum(bytes_below(folder) for _, folder in folders)
    return Heap("artefacts of deleted jobs", len(folders), num_bytes, lambda: _sweep(folders))


def bytes_below(folder: Path) -> int:
    """Return what the files below a folder take."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _sweep(folders: list[tuple[Artefact, Path]]) -> int:
    """Delete the rows, then their files, which nobody can ask for any more."""
    with transaction.atomic():
        Artefact.objects.filter(pk__in=[row.pk for row, _ in folders]).delete()
    for _, folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return len(folders)
