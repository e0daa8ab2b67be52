"""Queries of a team's history of events."""

from collections.abc import Mapping
from datetime import date

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import Q, QuerySet

from webapp.audit.models import Event

EXACT = ("kind", "actor", "subject")


def visible_events(team_id: str, user: User | AnonymousUser) -> QuerySet[Event]:
    """Return a team's events, newest first; for a superuser also those of the administration."""
    mine = Q(team_id=team_id)
    if user.is_superuser:
        mine |= Q(team_id="")
    return Event.objects.filter(mine).order_by("-pk")


def filter_events(
    events: QuerySet[Event], exact: Mapping[str, str], *, first: date | None, last: date | None
) -> QuerySet[Event]:
    """Return the events whose ``EXACT`` columns are as given, from ``first`` to ``last``.

    An empty text and a missing day match every event; both days are included.
    """
    given = {name: text for name in EXACT if (text := exact.get(name, ""))}
    events = events.filter(**given)
    if first is not None:
        events = events.filter(at__date__gte=first)
    if last is not None:
        events = events.filter(at__date__lte=last)
    return events
