"""Tickets for the live stream: signed, for given topics, valid for an hour, not stored."""

import re
from collections.abc import Iterable

from django.contrib.auth.models import AnonymousUser, User
from django.core import signing

from webapp.accounts.models import Team
from webapp.hosts.models import Host
from webapp.jobs.models import Job
from webapp.live.publish import hosts_topic, jobs_topic
from webapp.plans.models import Plan

SALT = "slipway.live"
LIFETIME_SECONDS = 3600
KEY = re.compile(r"[0-9A-Za-z]{1,64}")
_OWNED = {"job": Job, "host": Host, "plan": Plan}
_PER_TEAM = {"jobs": jobs_topic, "hosts": hosts_topic}


def ticket_for(user: User | AnonymousUser, topics: Iterable[str]) -> str:
    """Return a ticket for those of ``topics`` that the user may see.

    Topics: ``job:<id>``, ``host:<id>``, ``plan:<id>``, and ``jobs`` and ``hosts`` for the
    lists of the user's teams.
    """
    allowed = sorted({name for topic in topics for name in _allowed(user, topic.strip())})
    return signing.TimestampSigner(salt=SALT).sign_object({"u": user.pk, "t": allowed})


def _allowed(user: User | AnonymousUser, topic: str) -> list[str]:
    if topic in _PER_TEAM and user.is_authenticated:
        teams = Team.objects.filter(memberships__user=user).values_list("pk", flat=True)
        return [_PER_TEAM[topic](team) for team in teams]
    kind, _, key = topic.partition(":")
    model = _OWNED.get(kind)
    if model is None or not KEY.fullmatch(key):
        return []
    if not model.objects.visible_to(user).filter(pk=key).exists():
        return []
    return [topic]


def read_ticket(ticket: str) -> tuple[int, tuple[str, ...]]:
    """Return the user id and topics of a ticket.

    Raises:
        BadSignature: it was not signed here, was changed, or is older than an hour.
    """
    signer = signing.TimestampSigner(salt=SALT)
    body = signer.unsign_object(ticket, max_age=LIFETIME_SECONDS)
    return body["u"], tuple(body["t"])
