"""The browsers in which a person is logged in: kept, shown, ended."""

from datetime import timedelta

from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.db import transaction
from django.db.models import QuerySet

from webapp.accounts.models import OpenSession
from webapp.core.clock import now

SEEN_EVERY = timedelta(minutes=10)


def sessions_of(user: User) -> QuerySet[OpenSession]:
    """Return the sessions of a person that are still open, the latest seen first."""
    alive = Session.objects.filter(expire_date__gt=now()).values("session_key")
    return OpenSession.objects.filter(user=user, session_key__in=alive)


def sessions_end(chosen: QuerySet[OpenSession]) -> int:
    """Log those browsers out at once; return how many."""
    with transaction.atomic():
        keys = list(chosen.values_list("session_key", flat=True))
        Session.objects.filter(session_key__in=keys).delete()
        OpenSession.objects.filter(session_key__in=keys).delete()
    return len(keys)


def session_seen(session_key: str) -> bool:
    """Note that a session is in use, not more than every ten minutes; return whether it was."""
    instant = now()
    rows = OpenSession.objects.filter(session_key=session_key, seen_at__lte=instant - SEEN_EVERY)
    return bool(rows.update(seen_at=instant))


def sessions_forget_ended() -> int:
    """Forget sessions that have run out or were logged out; return how many rows went."""
    Session.objects.filter(expire_date__lte=now()).delete()
    alive = Session.objects.values("session_key")
    return OpenSession.objects.exclude(session_key__in=alive).delete()[0]
