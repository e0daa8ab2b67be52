"""Tell open pages what changed: best effort, after the commit, never in the way.

Every message has a topic; ``jobs`` and ``hosts`` exist once per team, so that nobody sees
another team's. Whoever misses a message asks the API: the database is the truth.
"""

import json
from collections.abc import Mapping
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
    """Send one event to whoever follows ``topic``; return whether Redis took it."""
    if _breaker.is_open():
        return False
    entry: dict[FieldT, EncodableT] = {
        "t": topic,
        "e": event,
        "d": json.dumps(data, separators=(",", ":")),
    }
    try:
        connection().xadd(STREAM, entry, maxlen=MAX_ENTRIES, approximate=True)
    except (redis.RedisError, OSError) as error:
        _breaker.trip()
        log.debug("live message dropped", topic=topic, cause=str(error))
        return False
    return True


def jobs_topic(team_id: str) -> str:
    """Return the topic of a team's job list."""
    return f"jobs:{team_id}"


def hosts_topic(team_id: str) -> str:
    """Return the topic of a team's host list."""
    return f"hosts:{team_id}"


def publish_job_state(job: "Job") -> None:
    """Announce a job's new state to its page and to its team's list."""
    data = {
        "job": job.pk,
        "attempt": job.current_attempt_id,
        "state": job.state,
        "label": job.get_state_display(),
        "reason": job.reason,
        "host": job.host_id,
    }
    publish(f"job:{job.pk}", "job.state", data)
    publish(jobs_topic(job.team_id), "job.state", data)


def publish_host_state(host: "Host", contact: str) -> None:
    """Announce a host's state and contact to its page and to its team's list."""
    data = {
        "host": host.pk,
        "state": host.state,
        "label": host.get_state_display(),
        "contact": contact,
    }
    publish(f"host:{host.pk}", "host.state", data)
    publish(hosts_topic(host.team_id), "host.state", data)
