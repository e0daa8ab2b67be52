"""Jobs that follow one another: what a workflow and a tuning have in common.

A series is advanced by the ticker: it reads what its last jobs have become and starts the next
ones. Each job has a row of its own, a part, that waits, runs and ends.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Self, TypeVar, cast

import structlog
from django.conf import settings
from django.contrib.auth.models import User
from django.db import models, transaction

from runners.jobspec.base import NAME_LENGTH
from runners.shared.reasons import Reason
from webapp.accounts.models import AccessToken, Team, TeamOwned, TeamQuerySet
from webapp.audit.models import event_record
from webapp.core.clock import now
from webapp.core.ids import UlidModel
from webapp.core.problems import (
    BusyProblem,
    ConflictProblem,
    NotFoundProblem,
    UnavailableProblem,
)
from webapp.jobs.models import FINAL_STATES, Job, JobState
from webapp.jobs.services import job_stop
from webapp.plans.repositories import UnreachableError

log = structlog.get_logger(__name__)
RUNNING = "running"  # state of a part whose job has not ended
# Refusals that a moment mends: the part waits with their words, and is tried again.
PASSING = (BusyProblem, UnavailableProblem, UnreachableError)


class SeriesState(models.TextChoices):
    """The states of a series."""

    RUNNING = "running", "Running"
    SUCCEEDED = "succeeded", "Succeeded"
    FAILED = "failed", "Failed"
    STOPPED = "stopped", "Stopped"


class JobSeries(TeamOwned):
    """Jobs that follow one another; ``token`` is the one that started it, whose budget counts."""

    PARTS: ClassVar[str]  # related name of its jobs' rows
    ACTOR: ClassVar[str]  # in the history, of what it does by itself

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    token = models.ForeignKey(
        AccessToken, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    name = models.CharField(max_length=NAME_LENGTH)
    state = models.CharField(max_length=16, choices=SeriesState, default=SeriesState.RUNNING)
    idempotency_key = models.CharField(max_length=64, null=True, blank=True, unique=True)
    created_at = models.DateTimeField(auto_now_add=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        abstract = True
        ordering = ["-created_at", "-id"]

    def __str__(self) -> str:
        return self.name

    @property
    def title(self) -> str:
        """Return what a sentence calls it."""
        return self.name

    @property
    def is_running(self) -> bool:
        """Whether it ran when it was read."""
        return self.state == SeriesState.RUNNING

    @classmethod
    def running(cls) -> "models.QuerySet[Self]":
        """Return the rows that run."""
        return cast("TeamQuerySet[Self]", cls.objects).filter(state=SeriesState.RUNNING)

    @classmethod
    def of_key(cls, team: Team, key: str | None) -> Self | None:
        """Return the row that a call with this idempotency key has started."""
        rows = cast("TeamQuerySet[Self]", cls.objects).filter(team=team, idempotency_key=key)
        return rows.first() if key else None

    def still_runs(self) -> bool:
        """Whether it runs now, by the database."""
        return self.running().filter(pk=self.pk).exists()

    def event(self, what: str, by: str, **detail: Any) -> None:
        """Write an event of it to the history."""
        event_record(self, f"{self._meta.model_name}.{what}", by, detail=detail)


S = TypeVar("S", bound=JobSeries)


class SeriesPart(UlidModel):
    """The row of one job of a series."""

    objects: ClassVar[models.Manager[Self]]

    state = models.CharField(max_length=16)

    class Meta:
        abstract = True

    def change(self, source: str, **fields: Any) -> bool:
        """Change a part that is still in a state; return whether it was."""
        if not self.unchanged().filter(state=source).update(**fields):
            return False
        for name, value in fields.items():
            setattr(self, name, value)
        return True

    def unchanged(self) -> "models.QuerySet[Self]":
        """Return the rows that a change may touch: its own."""
        return type(self).objects.filter(pk=self.pk)

    @property
    def live_job(self) -> Job | None:
        """Return its job, if that has not ended."""
        job: Job | None = getattr(self, "job", None)
        return None if job is None or job.state in FINAL_STATES else job


P = TypeVar("P", bound=SeriesPart)


def advance_each(model: type[S], advance: Callable[[S], None]) -> int:
    """Advance every series that runs, and return their number; each failure is its own."""
    rows = list(model.running().order_by("id"))
    for series in rows:
        try:
            advance(series)
        except Exception:  # the next round tries again; the others go on
            name = str(model._meta.verbose_name)
            log.warning("not advanced", series=name, id=series.pk, exc_info=True)
    return len(rows)


def part_stop(part: SeriesPart, by: str) -> None:
    """Stop the job of a part of a stopped series, unless it ends already."""
    job = part.live_job
    if job is None or job.state == JobState.STOPPING:
        return
    with suppress(ConflictProblem):  # it has ended meanwhile
        job_stop(job=job, by=by, reason=Reason.STOPPED_BY_USER)


def late_parts_stop(model: type[S], part: type[P], settle: Callable[[P], None]) -> None:
    """Settle the parts that outlive their series, and stop those launched at its very end.

    ``settle``: stores how a part's job has ended, if it has.
    """
    name = model._meta.get_field(model.PARTS).remote_field.name  # type: ignore[union-attr]
    late = part.objects.filter(state=RUNNING).exclude(**{f"{name}__state": SeriesState.RUNNING})
    for each in late.select_related("job"):
        settle(each)
        if each.state == RUNNING:
            part_stop(each, model.ACTOR)


def series_stop(series: S, by: User, *, way_out: str = "") -> S:
    """Stop what runs of a series, and start nothing else of it; what was measured stays.

    Raises:
        ConflictProblem: it has ended; ``way_out`` says what else can be done.
    """
    with transaction.atomic():
        rows = type(series).running().filter(pk=series.pk)
        if not rows.update(state=SeriesState.STOPPED, ended_at=now()):
            sentence = f"{series.title} has ended, so it cannot be stopped. {way_out}"
            raise ConflictProblem("not_running", sentence.strip())
        series.event("stopped", by.get_username())
    for part in getattr(series, series.PARTS).filter(state=RUNNING).select_related("job"):
        part_stop(part, by.get_username())
    series.refresh_from_db()
    return series


def series_delete(series: JobSeries, by: User) -> None:
    """Take an ended series out of the lists; its jobs, models and plans stay.

    Raises:
        ConflictProblem: it has not ended, or a job of it has not.
        NotFoundProblem: another call has deleted it.
    """
    with transaction.atomic():
        row = type(series).objects.select_for_update().filter(pk=series.pk).first()
        if row is None:
            raise NotFoundProblem("gone", f"{series.title} is deleted already.")
        live = getattr(row, row.PARTS).filter(state=RUNNING, job__isnull=False)
        if row.is_running or live.exclude(job__state__in=FINAL_STATES).exists():
            raise ConflictProblem(
                "still_live", f"{row.title} has not ended. Stop it, then delete it."
            )
        row.event("deleted", by.get_username(), name=row.name)
        row.delete()
