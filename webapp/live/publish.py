"""Publish changes to open pages: best effort, after the commit.

Every message has a topic; ``jobs`` and ``hosts`` exist per team, so that no team gets another
team's messages. Messages can be lost; pages then reload from the API.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import redis
import structlog
from redis.typing import EncodableT, FieldT

from webapp.core.broker import Breaker, connection

if TYPE_CHECKING:
    from webapp.hosts.models import Host
    from webapp.jobs.models import Job

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
