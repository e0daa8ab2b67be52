"""Deletion of old history, such that the rest can still be verified by its chain.

A cut is anchored first: an event with the last link to be deleted, its digest and the number of
events is sealed at the chain's end. The triggers allow deletion only before an anchored cut.
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
    """The part of the history to delete: its last link and its number of events."""

    link: Link
    num_events: int


def old_history(before: datetime) -> Old | None:
    """Return the longest prefix of the chain whose events all happened before ``before``."""
    recent = Event.objects.filter(at__gte=before).values("pk")
    first_recent = Link.objects.filter(event_id__in=recent).order_by("position").first()
    deletable = Link.objects.order_by("position")
    if first_recent is not None:
        deletable = deletable.filter(position__lt=first_recent.position)
    last = deletable.last()
    return Old(last, deletable.count()) if last else None


def history_cut(*, before: datetime, by: str) -> int:
    """Delete sealed events before an instant with their links; return their number.

    Raises:
        ConflictProblem: the chain is inconsistent; a cut would hide that.
    """
    while events_seal():
        pass
    if finding := next(findings(), ""):
        raise ConflictProblem("chain_broken", f"Nothing was cut: {finding}")
    with transaction.atomic():
        old = old_history(before)
        if old is None:
            return 0
        cut_anchor(old, by)
        while keys := list(_deletable_links(old).values_list("event_id", flat=True)[:SLICE]):
            Event.objects.filter(pk__in=keys).delete()
            Link.objects.filter(event_id__in=keys).delete()
    return old.num_events


def _deletable_links(old: Old) -> QuerySet[Link]:
    return Link.objects.filter(position__lte=old.link.position).order_by("position")


def cut_anchor(old: Old, by: str) -> None:
    """Store and seal the event of a cut, then the cut itself."""
    instant = now()
    position, digest = old.link.position, old.link.digest
    detail = {"position": position, "digest": digest, "num_events": old.num_events}
    event = Event.objects.create(at=instant, team_id="", kind=KIND, actor=by[:80], detail=detail)
    while events_seal():
        pass
    cut = Cut(position=position, digest=digest, event_id=event.pk, at=instant)
    cut.num_events = old.num_events
    cut.save(force_insert=True)
