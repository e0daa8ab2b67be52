"""The history of events, the models of its hash chain, and the author of a last change."""

from typing import Any, Protocol

from django.db import models

from webapp.core.clock import now
from webapp.core.queries import refuse_stale


class Event(models.Model):
    """An audit record of who did what and why: for pages and the audit log."""

    at = models.DateTimeField(db_index=True)
    team_id = models.CharField(max_length=26, db_index=True)
    kind = models.CharField(max_length=40)  # "job.state", "host.state", "host.enrolled", ...
    subject = models.CharField(max_length=26, db_index=True)  # id of the job or host
    attempt_id = models.CharField(max_length=26, blank=True)
    from_state = models.CharField(max_length=24, blank=True)
    to_state = models.CharField(max_length=24, blank=True)
    reason = models.CharField(max_length=40, blank=True)
    actor = models.CharField(max_length=80)  # a user name, "host:<slug>" or "system:<part>"
    detail = models.JSONField(default=dict, blank=True)

    class Meta:
        db_table = "jobs_event"  # its name before it moved here; the triggers use it
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.kind} {self.subject} {self.to_state}"


class TeamRow(Protocol):
    """A row that belongs to a team: a job, a host, a dataset."""

    @property
    def pk(self) -> Any: ...  # noqa: ANN401 (as in Django)

    @property
    def team_id(self) -> str: ...


def event_record(row: TeamRow, kind: str, actor: str, **fields: Any) -> None:
    """Record what happened to a row now; ``fields`` are further columns of the event."""
    Event.objects.create(
        at=now(), team_id=row.team_id, kind=kind, subject=row.pk, actor=actor, **fields
    )


class Link(models.Model):
    """The seal of one event: SHA-256 over the previous link and the event's content."""

    position = models.PositiveBigIntegerField(primary_key=True)
    event_id = models.BigIntegerField(unique=True)  # no foreign key, so that nothing cascades
    digest = models.CharField(max_length=64)

    class Meta:
        ordering = ["position"]

    def __str__(self) -> str:
        return f"{self.position}:{self.digest}"


class Cut(models.Model):
    """A cut of the chain: earlier events were deleted by retention.

    The event of the cut is sealed in the remaining part, so that a cut is always visible.
    """

    position = models.PositiveBigIntegerField(primary_key=True)  # of the last deleted link
    digest = models.CharField(max_length=64)  # of that link, to which the next one is chained
    event_id = models.BigIntegerField(unique=True)  # the sealed event of the cut
    num_events = models.PositiveBigIntegerField()
    at = models.DateTimeField()

    class Meta:
        ordering = ["position"]

    def __str__(self) -> str:
        return f"{self.position}:{self.digest}"


# Optimistic locking of forms, with the author of the last change from the event history.


def refuse_if_changed(
    *, seen: str, now_there: object, what: str, subject: str, kind: str, reader: str
) -> None:
    """Reject a form whose values changed since; the last event says who changed them.

    Call it under the lock of the write. ``what`` starts the sentence: "The labels of Box were".

    Raises:
        ConflictProblem: the current values differ from those that the form showed.
    """
    last = Event.objects.filter(subject=subject, kind=kind).order_by("-id").first()
    by, at = (last.actor, last.at) if last else ("", None)
    refuse_stale(seen, now_there, what, by, at, reader=reader)
