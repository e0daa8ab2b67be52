"""Alarms of clients' keys: 80 and 100 % of the tokens of a day or a month are used."""

from collections.abc import Iterable, Iterator

from django.contrib.auth.models import AnonymousUser, User
from django.db import transaction
from django.db.models import Q, QuerySet

from webapp.accounts.models import Membership, Role
from webapp.accounts.services import is_at_least
from webapp.audit.models import event_record
from webapp.core.clock import now
from webapp.deployments.models import KeyAlarm, ServingKey
from webapp.deployments.usage import periods_of, tokens_used

PERCENTS = (80, 100)
ACTOR = "system:deployments"


def alarms_raise() -> int:
    """Store the alarms that are due and not stored yet, with an event each; return how many."""
    used = tokens_used()
    due = {
        (each.key_id, each.period, each.percent): each
        for key in ServingKey.objects.filter(pk__in=used)
        for each in _due(key, used[key.pk])
    }
    if not due:
        return 0
    told = KeyAlarm.objects.filter(period__in=_periods(), key__in=used)
    for each in set(told.values_list("key", "period", "percent")):
        due.pop(each, None)
    return sum(_store(each) for each in due.values())


def _periods() -> tuple[str, str]:
    return periods_of(now().date().isoformat())


def _due(key: ServingKey, used: dict[str, int]) -> Iterator[KeyAlarm]:
    day, month = _periods()
    for period, limit in ((day, key.tokens_per_day), (month, key.tokens_per_month)):
        for percent in PERCENTS:
            tokens = used.get(period, 0)
            if limit is not None and tokens * 100 >= percent * limit:
                yield KeyAlarm(
                    key=key, period=period, percent=percent, used_tokens=tokens,
                    limit_tokens=limit, at=now(),
                )  # fmt: skip


def _store(alarm: KeyAlarm) -> bool:
    """Store an alarm; return whether no other process did."""
    fields = {"used_tokens": alarm.used_tokens, "limit_tokens": alarm.limit_tokens, "at": alarm.at}
    with transaction.atomic():
        _, is_new = KeyAlarm.objects.get_or_create(
            key=alarm.key, period=alarm.period, percent=alarm.percent, defaults=fields
        )
        if is_new:
            detail = {"name": alarm.key.name, "percent": alarm.percent, "period": alarm.period}
            event_record(alarm.key, "serving_key.alarm", ACTOR, detail=detail)
    return is_new


def current_alarms(keys: Iterable[ServingKey]) -> dict[str, list[KeyAlarm]]:
    """Return the alarms of today and this month by key, the latest first."""
    found: dict[str, list[KeyAlarm]] = {}
    for each in KeyAlarm.objects.filter(key__in=list(keys), period__in=_periods()):
        found.setdefault(each.key_id, []).append(each)
    return found


def alarms_for(user: User | AnonymousUser) -> list[KeyAlarm]:
    """Return the highest alarm of each key and period that a person is to know of now.

    Those are of the own keys, and an operator's teams'; of keys that are still valid.
    """
    operators = [role for role in Role if is_at_least(role, Role.OPERATOR)]
    teams: QuerySet[Membership] = Membership.objects.filter(user=user.pk)
    whose = Q(key__owner=user.pk, key__team__in=teams.values("team"))
    whose |= Q(key__team__in=teams.filter(role__in=operators).values("team"))
    rows = KeyAlarm.objects.filter(whose, period__in=_periods(), key__revoked_at=None)
    rows = rows.exclude(key__expires_at__lte=now()).select_related("key")
    highest = {(each.key_id, each.period): each for each in rows.order_by("percent", "at", "pk")}
    return sorted(highest.values(), key=lambda each: (-each.percent, each.at))
