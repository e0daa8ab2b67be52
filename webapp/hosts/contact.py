"""Contact status of a host: seconds since its last heartbeat, by the server's clock."""

from datetime import datetime
from enum import StrEnum

from runners.timing import scaled
from webapp.core.clock import now
from webapp.hosts.models import Host

BEAT_SECONDS = scaled(10.0, least=0.2)
DEGRADED_AFTER_SECONDS = scaled(30.0)
UNREACHABLE_AFTER_SECONDS = scaled(90.0)


class Contact(StrEnum):
    """Contact status; it never ends a job, it only limits which new jobs a host gets."""

    UNKNOWN = "unknown"  # no heartbeat yet
    LIVE = "live"
    DEGRADED = "degraded"
    UNREACHABLE = "unreachable"


def silent_seconds(host: Host, at: datetime | None = None) -> float | None:
    """Return the seconds since the host's last heartbeat, or None before the first."""
    if host.last_seen_at is None:
        return None
    return max(0.0, ((at or now()) - host.last_seen_at).total_seconds())


def contact_of(host: Host, at: datetime | None = None) -> Contact:
    """Return the contact status of a host at an instant (default: now)."""
    silent = silent_seconds(host, at)
    if silent is None:
        return Contact.UNKNOWN
    if silent < DEGRADED_AFTER_SECONDS:
        return Contact.LIVE
    return Contact.DEGRADED if silent < UNREACHABLE_AFTER_SECONDS else Contact.UNREACHABLE
