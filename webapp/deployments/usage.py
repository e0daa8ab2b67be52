"""What clients' keys used, by day, key and deployment."""

from collections.abc import Iterator
from datetime import date, timedelta

from django.db.models import Q, QuerySet

from webapp.accounts.models import Membership, Role
from webapp.accounts.services import is_at_least
from webapp.core.clock import now
from webapp.deployments.models import Usage

DAYS, MOST_DAYS = 30, 400
CHUNK_ROWS = 2000  # read at once, so that a slow client holds no query open


def usage_of(membership: Membership, days: int) -> QuerySet[Usage]:
    """Return the usage of the last days, newest first: of a member's keys, an operator's team."""
    first = now().date() - timedelta(days=days - 1)
    rows = Usage.objects.filter(key__team=membership.team_id, day__gte=first)
    if not is_at_least(Role(membership.role), Role.OPERATOR):
        rows = rows.filter(key__owner=membership.user_id)
    return rows.select_related("key__owner", "deployment").order_by("-day", "pk")


def usage_after(rows: QuerySet[Usage], day: date, pk: int) -> QuerySet[Usage]:
    """Return the rows of ``usage_of`` behind the one of this day and key."""
    return rows.filter(Q(day__lt=day) | Q(day=day, pk__gt=pk))


def usage_chunks(rows: QuerySet[Usage]) -> Iterator[list[Usage]]:
    """Yield all rows of ``usage_of``, each ``CHUNK_ROWS`` of them by a query of their own."""
    chunk = list(rows[:CHUNK_ROWS])
    while chunk:
        yield chunk
        last = chunk[-1]
        chunk = list(usage_after(rows, last.day, last.pk)[:CHUNK_ROWS])
