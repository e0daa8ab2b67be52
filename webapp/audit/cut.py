"""Cuts what is too old off the history, so that the rest is still proved by its chain.

A cut is anchored first: an event that names the last link to go, its digest and how many go is
sealed at the chain's end. Only what lies before an anchored cut does the database let go.
"""

from datetime import datetime
from typing import NamedTuple

from django.db import transaction
from django.db.models import QuerySet

from webapp.audit.chain import events_seal, findings
from webapp.audit.models import Cut, Link
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem
from webapp.jobs.models import Event

KIND = "audit.cut"
SLICE = 2000


class Old(NamedTuple):
    """The part of the history that may go: up to which link, and how many events."""

    link: Link
    num_events: int


def old_history(before: datetime) -> Old | None:
    """Return the run of sealed events from the chain's start that all happened before then."""
    kept = Event.objects.filter(at__gte=before).values("pk")
    first_kept = Link.objects.filter(event_id__in=kept).order_by("position").first()
    going = Link.objects.order_by("position")
    if first_kept is not None:
        going = going.filter(position__lt=first_kept.position)
    last = going.last()
    return Old(last, going.count()) if last else None


def history_cut(*, before: datetime, by: str) -> int:
    """Delete the sealed events that happened before then, with their links; return how many.

    Raises:
        ConflictProblem: the chain does not hold; a cut would hide what was changed.
    """
    while events_seal():
        pass
    if found := next(findings(), ""):
        raise ConflictProblem("chain_broken", f"Nothing was cut: {found}")
    with transaction.atomic():
        old = old_history(before)
        if old is None:
            return 0
        cut_anchor(old, by)
        while keys := list(_going(old).values_list("event_id", flat=True)[:SLICE]):
            Event.objects.filter(pk__in=keys).delete()
            Link.objects.filter(event_id__in=keys).delete()
    return old.num_events


def _going(old: Old) -> QuerySet[Link]:
    return Link.objects.filter(position__lte=old.link.position).order_by("position")


def cut_anchor(old: Old, by: str) -> None:
    """Write and seal the event that tells of a cut, then the cut itself."""
    instant = now()
    position, digest = old.link.position, old.link.digest
    detail = {"position": position, "digest": digest, "num_events": old.num_events}
    told = Event.objects.create(at=instant, team_id="", kind=KIND, actor=by[:80], detail=detail)
    while events_seal():
        pass
    cut = Cut(position=position, digest=digest, event_id=told.pk, at=instant)
    cut.num_events = old.num_events
    cut.save(force_insert=True)
