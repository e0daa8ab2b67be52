"""What clients' keys used, by day, key and deployment; and by the periods of their limits."""

from collections.abc import Iterable, Iterator
from datetime import date, timedelta
from typing import NamedTuple

from django.db.models import F, Q, QuerySet, Sum

from webapp.accounts.models import Membership, Role
from webapp.accounts.services import is_at_least
from webapp.core.clock import now
from webapp.deployments.models import ServingKey, Usage

DAYS, MOST_DAYS = 30, 400
MONTH = r"20\d\d-(0[1-9]|1[0-2])"  # as a filter
CHUNK_ROWS = 2000  # read at once, so that a slow client holds no query open

NUM_TOKENS = F("prompt_tokens") + F("completion_tokens")  # that count against a limit


def periods_of(day: str) -> tuple[str, str]:
    """Return the periods of limits that a day (ISO, UTC) is in: itself, and its month."""
    return day, day[:7]


def tokens_used() -> dict[str, dict[str, int]]:
    """Return the tokens of keys with a limit of them, by key and period: today and this month."""
    today = now().date()
    of_day = Q(day=today, key__tokens_per_day__isnull=False)
    of_month = Q(
        day__gte=today.replace(day=1), day__lte=today, key__tokens_per_month__isnull=False
    )
    rows = Usage.objects.filter(of_day | of_month, key__revoked_at=None).order_by()
    return _by_period(rows, today)


def tokens_of(keys: Iterable[ServingKey]) -> dict[str, tuple[int, int]]:
    """Return the tokens of today and of this month by key, with a limit or without."""
    today = now().date()
    rows = Usage.objects.filter(key__in=list(keys), day__gte=today.replace(day=1), day__lte=today)
    periods = periods_of(today.isoformat())
    return {
        key: (used[periods[0]], used[periods[1]])
        for key, used in _by_period(rows.order_by(), today).items()
    }


def _by_period(rows: QuerySet[Usage], today: date) -> dict[str, dict[str, int]]:
    """Return the tokens of rows of this month by key: today's, and all."""
    sums = rows.values("key").annotate(
        today=Sum(NUM_TOKENS, filter=Q(day=today)), month=Sum(NUM_TOKENS)
    )
    day, month = periods_of(today.isoformat())
    return {each["key"]: {day: each["today"] or 0, month: each["month"]} for each in sums}


class Span(NamedTuple):
    """Days (UTC) from the first to the last."""

    first: date
    last: date


def last_days(number: int) -> Span:
    """Return the last days, up to today."""
    return Span(now().date() - timedelta(days=number - 1), now().date())


def month_span(month: str) -> Span:
    """Return the days of a month such as 2026-11 (``MONTH``)."""
    first = date.fromisoformat(f"{month}-01")
    return Span(first, (first + timedelta(days=31)).replace(day=1) - timedelta(days=1))


def usage_of(membership: Membership, span: Span) -> QuerySet[Usage]:
    """Return the usage of some days, newest first: of a member's keys, an operator's team."""
    return usage_of_teams([membership], span)


def usage_of_teams(memberships: Iterable[Membership], span: Span) -> QuerySet[Usage]:
    """Return the usage of some days in several teams, in each as ``usage_of`` has it."""
    whose = Q(pk__in=())
    for each in memberships:
        own = {} if is_at_least(Role(each.role), Role.OPERATOR) else {"key__owner": each.user_id}
        whose |= Q(key__team=each.team_id, **own)
    rows = Usage.objects.filter(whose, day__gte=span.first, day__lte=span.last)
    return rows.select_related("key__owner", "key__team", "deployment").order_by("-day", "pk")


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
