"""Publish changes to open pages, whose stream is opened by a signed ticket."""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import redis
import structlog
from django.contrib.auth.models import AnonymousUser, User
from django.core import signing
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.cache import patch_vary_headers
from django.utils.html import format_html
from redis.typing import EncodableT, FieldT

from webapp.accounts.models import Team
from webapp.core.broker import Breaker, connection
from webapp.hosts.models import Host
from webapp.jobs.models import Job
from webapp.plans.models import Plan

STREAM = "live"
MAX_ENTRIES = 20_000
log = structlog.get_logger(__name__)
_breaker = Breaker()


def publish(topic: str, event: str, data: Mapping[str, Any]) -> bool:
    """Send one event to the viewers of ``topic``; return whether Redis accepted it."""
    return publish_all([(topic, event, data)])


def publish_all(messages: Iterable[tuple[str, str, Mapping[str, Any]]]) -> bool:
    """Send several events in one round trip; return whether Redis accepted them."""
    if _breaker.is_open():
        return False
    try:
        pipe = connection().pipeline(transaction=False)
        for topic, event, data in messages:
            pipe.xadd(STREAM, _entry(topic, event, data), maxlen=MAX_ENTRIES, approximate=True)
        pipe.execute()
    except (redis.RedisError, OSError) as error:
        _breaker.trip()
        log.debug("live messages dropped", cause=str(error))
        return False
    return True


def _entry(topic: str, event: str, data: Mapping[str, Any]) -> dict[FieldT, EncodableT]:
    return {"t": topic, "e": event, "d": json.dumps(data, separators=(",", ":"))}


def jobs_topic(team_id: str) -> str:
    """Return the topic of a team's job list."""
    return f"jobs:{team_id}"


def hosts_topic(team_id: str) -> str:
    """Return the topic of a team's host list."""
    return f"hosts:{team_id}"


def publish_job_state(job: "Job") -> None:
    """Publish a job's new state to its page and its team's list."""
    data = {
        "job": job.pk,
        "attempt": job.current_attempt_id,
        "state": job.state,
        "label": job.get_state_display(),
        "reason": job.reason,
        "host": job.host_id,
    }
    publish_all(
        [(f"job:{job.pk}", "job.state", data), (jobs_topic(job.team_id), "job.state", data)]
    )


def publish_host_states(hosts: Iterable[tuple["Host", str]]) -> None:
    """Publish hosts' states and contacts to their pages and their teams' lists."""
    publish_all(message for host, contact in hosts for message in _host_messages(host, contact))


def publish_host_checks(host: "Host") -> None:
    """Publish that a host's check-list may have changed; pages reload it."""
    data = {"host": host.pk}
    topics = (f"host:{host.pk}", hosts_topic(host.team_id))
    publish_all((topic, "host.check", data) for topic in topics)


def _host_messages(host: "Host", contact: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    data = {
        "host": host.pk,
        "state": host.state,
        "label": host.get_state_display(),
        "contact": contact,
    }
    yield f"host:{host.pk}", "host.state", data
    yield hosts_topic(host.team_id), "host.state", data


# Tickets for the live stream: signed, for given topics, valid for an hour, not stored.


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


# Helpers for pages with live regions: the stream's attributes, and partial responses.


RENDERING_SECONDS = 15.0  # maximum time from rendering a page to opening its stream


def live_context(request: HttpRequest, topics: Sequence[str]) -> dict[str, str]:
    """Return the attributes of the element that opens the page's live stream.

    ``since`` is the event id to resume after, so that changes during the rendering, transfer and
    script start of the page are replayed to it.
    """
    since = f"{int((time.time() - RENDERING_SECONDS) * 1000)}-0"
    attributes = format_html(
        'data-live-topics="{}" data-live-ticket="{}" data-live-since="{}"',
        ",".join(topics), ticket_for(request.user, topics), since,
    )  # fmt: skip
    return {"live_attributes": attributes}


def page_or_regions(
    request: HttpRequest, page: str, regions: str, context: Mapping[str, Any]
) -> HttpResponse:
    """Return the page, or only its live regions for htmx and live.js."""
    is_partial = request.headers.get("HX-Request") == "true"
    response = render(request, regions if is_partial else page, dict(context))
    patch_vary_headers(response, ["HX-Request"])
    response["Cache-Control"] = "no-store"
    return response
