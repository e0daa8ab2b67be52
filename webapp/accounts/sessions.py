"""Open sessions of users: list, end and expire them."""

from datetime import timedelta

from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.db import transaction
from django.db.models import QuerySet

from webapp.accounts.models import OpenSession
from webapp.core.clock import now

SEEN_EVERY = timedelta(minutes=10)


def sessions_of(user: User) -> QuerySet[OpenSession]:
    """Return a user's open sessions, latest used first."""
    alive = Session.objects.filter(expire_date__gt=now()).values("session_key")
    return OpenSession.objects.filter(user=user, session_key__in=alive)


def sessions_end(chosen: QuerySet[OpenSession]) -> int:
    """End sessions at once; return their number."""
    with transaction.atomic():
        keys = list(chosen.values_list("session_key", flat=True))
        Session.objects.filter(session_key__in=keys).delete()
        OpenSession.objects.filter(session_key__in=keys).delete()
    return len(keys)


def session_touch(session_key: str) -> bool:
    """Record use of a session at most every ten minutes; return whether it was recorded."""
    instant = now()
    rows = OpenSession.objects.filter(session_key=session_key, seen_at__lte=instant - SEEN_EVERY)
    return bool(rows.update(seen_at=instant))


def sessions_forget_ended() -> int:
    """Delete expired and logged-out sessions; return the number of ``OpenSession`` rows."""
    Session.objects.filter(expire_date__lte=now()).delete()
    alive = Session.objects.values("session_key")
    return OpenSession.objects.exclude(session_key__in=alive).delete()[0]
