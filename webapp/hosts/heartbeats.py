"""Store heartbeats and build their replies: the desired state of each host.

Heartbeats are stored in batches: one transaction for all hosts, and one query per question
about their attempts.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from django.db import transaction

from runners.messages import AttemptStatus, Beat, BeatReply, StopOrder, Wanted
from runners.reasons import Reason
from webapp.core.clock import now, now_ms
from webapp.core.rows import RowChange, update_each
from webapp.hosts.contact import contact_of
from webapp.hosts.environments import findings_after, orders_of
from webapp.hosts.epoch import epoch, epochs_record, is_authentic, shown
from webapp.hosts.findings import WANTS_RECHECK
from webapp.hosts.models import Host, HostState, Pool
from webapp.hosts.pools import devices_sync, kind_of
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.host_preflight import needs_of
from webapp.jobs.lost_attempts import end_unknown_attempts
from webapp.jobs.models import LIVE_STATES, Attempt, Event, Job, JobState
from webapp.live.publish import publish_host_checks, publish_host_states

READ = (
    *("team", "pool", "slug", "state", "microbench", "rotation_asked_at", "checks"),
    "epoch_seen",
)


class HostHeartbeat(NamedTuple):
    """One host id and its heartbeat."""

    host_id: str
    beat: Beat


def host_beat(*, host: Host, beat: Beat) -> BeatReply:
    """Store a host's heartbeat and return what it should run, stop and forget."""
    reply = host_beats([HostHeartbeat(host.pk, beat)])[0]
    host.refresh_from_db()
    return reply


def host_beats(spoken: Sequence[HostHeartbeat]) -> list[BeatReply]:
    """Store the heartbeats of several hosts at once and return the reply to each.

    A host may occur twice: its later heartbeat is the one that stays.
    """
    hosts = _store(spoken)
    end_unknown_attempts({each.host_id: _reported_attempts(each.beat) for each in spoken})
    _allocate(hosts)
    epochs_record([each.beat.epoch for each in spoken if each.beat.epoch])
    site = epoch()
    shown_epoch, is_backup = shown(site.number), site.highest_seen > site.number
    attempts, unclaimed = _named_attempts(spoken), {} if is_backup else _unclaimed_attempts(hosts)
    replies = [_reply(hosts[each.host_id], each.beat, attempts, unclaimed) for each in spoken]
    return [reply.model_copy(update={"epoch": shown_epoch}) for reply in replies]


def _reply(
    host: Host, beat: Beat, attempts: Mapping[str, Attempt], wanted: Mapping[str, list[Wanted]]
) -> BeatReply:
    """Return a host's desired state; attempts of other hosts are left out."""
    statuses = _reported_attempts(beat)
    own_attempts = {
        pk: attempts[pk] for pk in statuses if pk in attempts and attempts[pk].host_id == host.pk
    }
    return BeatReply(
        server_time_ms=now_ms(),
        wanted=tuple(wanted.get(host.pk, ())),
        stop=_stop_orders(statuses, own_attempts),
        acked={pk: attempt.acked_seq for pk, attempt in own_attempts.items()},
        forget=tuple(pk for pk, attempt in own_attempts.items() if attempt.exit_record),
        run_microbench=not host.microbench,
        rotate=host.rotation_asked_at is not None,
        recheck=WANTS_RECHECK in host.checks,
        environments=orders_of(host),
    )


def _reported_attempts(beat: Beat) -> dict[str, AttemptStatus]:
    return {status.attempt_id: status for status in beat.attempts}


def _store(heartbeats: Sequence[HostHeartbeat]) -> dict[str, Host]:
    """Write heartbeats into the host rows in one transaction; return the rows by id."""
    with transaction.atomic():
        # Large JSON columns that are only overwritten are not read.
        rows = Host.objects.select_for_update(no_key=True).only(*READ).order_by("pk")
        hosts = rows.in_bulk({each.host_id for each in heartbeats})
        update_each(Host, [_apply(hosts[each.host_id], each.beat) for each in heartbeats])
    for each in heartbeats:
        _publish_checks(hosts[each.host_id], each.beat)
    publish_host_states([(host, contact_of(host)) for host in hosts.values()])
    return hosts


def _publish_checks(host: Host, beat: Beat) -> None:
    """Notify open check-lists if a heartbeat carries what they show."""
    if host.state == HostState.CHECKING or beat.facts or beat.microbench or beat.environments:
        publish_host_checks(host)


def _apply(host: Host, beat: Beat) -> RowChange:
    """Apply a heartbeat to a host and return the change of its row."""
    before = host.state
    changes = _changes(host, beat)
    for name, value in changes.items():
        setattr(host, name, value)
    if beat.facts is not None:
        devices_sync(host, beat.facts)
    if host.state != before:
        _record_state_change(host, before)
    return RowChange(host.pk, changes)


def _changes(host: Host, beat: Beat) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "last_beat": beat.model_dump(mode="json", exclude={"facts", "microbench", "environments"}),
        "last_seen_at": now(),
        "boot_id": beat.boot_id,
        "agent_version": beat.agent_version,
        "clock_offset_ms": beat.sent_at_ms - now_ms(),
    }
    if beat.facts is not None:
        changes["facts"] = beat.facts.model_dump(mode="json")
        changes["checks"] = {k: v for k, v in host.checks.items() if k != WANTS_RECHECK}
        changes["kind"] = kind_of(beat.facts)
    if beat.environments is not None:
        checks = changes.get("checks", host.checks)
        changes["checks"] = findings_after(checks, beat.environments)
    epoch_seen = beat.epoch
    if epoch_seen is not None and epoch_seen.number > host.epoch_seen and is_authentic(epoch_seen):
        changes["epoch_seen"] = epoch_seen.number
    if beat.microbench is not None:
        changes["microbench"] = beat.microbench.model_dump(mode="json")
    is_measured = bool(host.microbench) or beat.microbench is not None
    if host.state == HostState.CHECKING and is_measured:
        changes["state"] = HostState.READY
    return changes


def _record_state_change(host: Host, before: str) -> None:
    Event.objects.create(
        at=now(),
        team_id=host.team_id,
        kind="host.state",
        subject=host.pk,
        from_state=before,
        to_state=host.state,
        actor=f"host:{host.slug}",
    )


def _allocate(hosts: Mapping[str, Host]) -> None:
    """Run the allocation of these hosts' pools that have queued jobs."""
    pools = {host.pool_id for host in hosts.values()}
    queued = Job.objects.filter(pool__in=pools, state=JobState.QUEUED, deleted_at=None)
    for pool in Pool.objects.filter(pk__in=queued.order_by().values("pool")):
        allocate_pool(pool)


def _named_attempts(heartbeats: Sequence[HostHeartbeat]) -> dict[str, Attempt]:
    """Return the attempts that the heartbeats name, by id."""
    named = {pk for each in heartbeats for pk in _reported_attempts(each.beat)}
    if not named:
        return {}
    return Attempt.objects.select_related("job").in_bulk(named)


def _unclaimed_attempts(hosts: Collection[str]) -> dict[str, list[Wanted]]:
    """Return, per host id, the attempts that the host has yet to claim."""
    unclaimed = Attempt.objects.filter(
        host__in=hosts,
        claimed_at=None,
        job__state__in=[JobState.PREFLIGHT, JobState.STARTING],
        job__current_attempt__isnull=False,
    ).select_related("job")
    by_host: dict[str, list[Wanted]] = defaultdict(list)
    for attempt in unclaimed:
        if _is_current(attempt):
            wanted = Wanted(attempt_id=attempt.pk, fence=attempt.fence, needs=needs_of(attempt))
            by_host[attempt.host_id].append(wanted)
    return by_host


def _stop_orders(
    statuses: dict[str, AttemptStatus], attempts: dict[str, Attempt]
) -> tuple[StopOrder, ...]:
    """Return a stop order for every running attempt that should not run."""
    orders = []
    for attempt_id, status in statuses.items():
        if status.phase == "exited":
            continue
        reason = _stop_reason(attempts.get(attempt_id))
        if reason is not None:
            orders.append(StopOrder(attempt_id=attempt_id, reason=reason))
    return tuple(orders)


def _stop_reason(attempt: Attempt | None) -> Reason | None:
    if attempt is None:
        return None  # an attempt of another server: shown on the host's page, never stopped
    if attempt.stop_reason:
        return Reason(attempt.stop_reason)
    if _is_current(attempt) and attempt.job.state in LIVE_STATES:
        return None
    return Reason.SUPERSEDED


def _is_current(attempt: Attempt) -> bool:
    """Return whether an attempt is its job's current one or belongs to its gang."""
    return attempt.job.current_attempt_id in {attempt.pk, attempt.leader_id}
