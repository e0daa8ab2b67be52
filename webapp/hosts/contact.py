"""Contact status of hosts: seconds since the last heartbeat, and what follows a change."""

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum

from django.db import transaction

from runners.timing import scaled
from webapp.core.clock import now
from webapp.hosts.models import RUNS_JOBS, EnrolmentToken, Host, HostState
from webapp.jobs.models import Event
from webapp.live.publish import publish_host_states

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


# Detect hosts that lose or regain contact; record an event and notify open pages.


ACTOR = "system:contact"
PAUSE_SECONDS = scaled(60.0, least=2.0)
LONGEST_GAP_SECONDS = scaled(15.0, least=2.0)
KEEP_TOKENS = timedelta(days=30)


class ContactSweep:
    """Announces changes of contact; pauses after a start and after a suspended server.

    A suspended server received no heartbeats, which says nothing about the hosts.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_at = clock()
        self._paused_until = clock() + PAUSE_SECONDS

    def step(self) -> list[Host]:
        """Return the hosts whose contact changed."""
        instant = self._clock()
        if instant - self._last_at > LONGEST_GAP_SECONDS:
            self._paused_until = instant + PAUSE_SECONDS
        self._last_at = instant
        is_paused = instant < self._paused_until
        changes = [(host, contact_of(host)) for host in _enrolled()]
        return _announce(
            [
                (host, contact)
                for host, contact in changes
                if contact != host.contact and (not is_paused or contact is Contact.LIVE)
            ]
        )


def _enrolled() -> list[Host]:
    hosts = Host.objects.filter(kind__in=RUNS_JOBS).exclude(state=HostState.RETIRED)
    return list(hosts.only("team", "state", "contact", "last_seen_at"))


def _announce(changes: Sequence[tuple[Host, Contact]]) -> list[Host]:
    """Store all changes in one transaction; return the hosts not announced by another process."""
    if not changes:
        return []
    with transaction.atomic():
        announced = [(host, contact) for host, contact in changes if _is_first(host, contact)]
        Event.objects.bulk_create(_event(host, contact) for host, contact in announced)
        transaction.on_commit(lambda: publish_host_states(announced))
    return [host for host, _ in announced]


def _is_first(host: Host, contact: Contact) -> bool:
    """Return whether no other process announced the change meanwhile."""
    rows = Host.objects.filter(pk=host.pk, contact=host.contact)
    return bool(rows.update(contact=contact))


def _event(host: Host, contact: Contact) -> Event:
    return Event(
        at=now(),
        team_id=host.team_id,
        kind="host.contact",
        subject=host.pk,
        from_state=host.contact,
        to_state=contact,
        actor=ACTOR,
        detail={"silent_seconds": silent_seconds(host)},
    )


def expire_tokens() -> int:
    """Delete enrolment tokens that expired more than ``KEEP_TOKENS`` ago."""
    rows, _ = EnrolmentToken.objects.filter(expires_at__lt=now() - KEEP_TOKENS).delete()
    return rows
