"""What a beat changes here, and the desired state that it takes home."""

from typing import Any

from django.db import transaction

from runners.messages import AttemptStatus, Beat, BeatReply, StopOrder, Wanted
from runners.reasons import Reason
from webapp.core.clock import now, now_ms
from webapp.hosts.contact import contact_of
from webapp.hosts.models import Host, HostState
from webapp.jobs.allocation import allocate_host
from webapp.jobs.lost import end_unknown_attempts
from webapp.jobs.models import LIVE_STATES, Attempt, Event, JobState
from webapp.live.publish import publish_host_state


def host_beat(*, host: Host, beat: Beat) -> BeatReply:
    """Store a host's beat and return what it should run, stop and forget."""
    _store(host, beat)
    seen = {status.attempt_id: status for status in beat.attempts}
    end_unknown_attempts(host, seen.keys())
    allocate_host(host)
    known = {
        attempt.pk: attempt
        for attempt in Attempt.objects.filter(host=host, pk__in=seen).select_related("job")
    }
    return BeatReply(
        server_time_ms=now_ms(),
        wanted=_wanted(host),
        stop=_stop_orders(seen, known),
        acked={pk: attempt.acked_seq for pk, attempt in known.items()},
        forget=tuple(pk for pk, attempt in known.items() if attempt.exit_record),
        run_microbench=not host.microbench,
    )


def _store(host: Host, beat: Beat) -> None:
    with transaction.atomic():
        host.refresh_from_db()
        before = host.state
        for name, value in _changes(host, beat).items():
            setattr(host, name, value)
        host.save()
        if host.state != before:
            _announce(host, before)
    publish_host_state(host, contact_of(host))


def _changes(host: Host, beat: Beat) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "last_beat": beat.model_dump(mode="json", exclude={"facts", "microbench"}),
        "last_seen_at": now(),
        "boot_id": beat.boot_id,
        "agent_version": beat.agent_version,
        "clock_offset_ms": beat.sent_at_ms - now_ms(),
    }
    if beat.facts is not None:
        changes["facts"] = beat.facts.model_dump(mode="json")
    if beat.microbench is not None:
        changes["microbench"] = beat.microbench.model_dump(mode="json")
    is_measured = bool(host.microbench) or beat.microbench is not None
    if host.state == HostState.CHECKING and is_measured:
        changes["state"] = HostState.READY
    return changes


def _announce(host: Host, before: str) -> None:
    Event.objects.create(
        at=now(),
        team_id=host.team_id,
        kind="host.state",
        subject=host.pk,
        from_state=before,
        to_state=host.state,
        actor=f"host:{host.slug}",
    )


def _wanted(host: Host) -> tuple[Wanted, ...]:
    """Return the attempts that the host should have claimed and has not."""
    unclaimed = Attempt.objects.filter(
        host=host,
        claimed_at=None,
        job__state__in=[JobState.PREFLIGHT, JobState.STARTING],
        job__current_attempt__in=Attempt.objects.filter(host=host),
    ).select_related("job")
    return tuple(
        Wanted(attempt_id=attempt.pk, fence=attempt.fence)
        for attempt in unclaimed
        if attempt.job.current_attempt_id == attempt.pk
    )


def _stop_orders(
    seen: dict[str, AttemptStatus], known: dict[str, Attempt]
) -> tuple[StopOrder, ...]:
    """Return an order for every running attempt that should not run."""
    orders = []
    for attempt_id, status in seen.items():
        if status.phase == "exited":
            continue
        reason = _stop_reason(known.get(attempt_id))
        if reason is not None:
            orders.append(StopOrder(attempt_id=attempt_id, reason=reason))
    return tuple(orders)


def _stop_reason(attempt: Attempt | None) -> Reason | None:
    if attempt is None:
        return None  # another server's: reported on the host's page, never stopped
    if attempt.stop_reason:
        return Reason(attempt.stop_reason)
    is_current = attempt.job.current_attempt_id == attempt.pk
    if is_current and attempt.job.state in LIVE_STATES:
        return None
    return Reason.SUPERSEDED
