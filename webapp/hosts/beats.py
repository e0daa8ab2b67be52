"""What beats change here, and the desired state that each takes home.

Beats are stored in batches: however many hosts spoke, one transaction takes what they said, and
every question about their attempts is asked once for all of them.
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
from webapp.hosts.epoch import epoch, epochs_hear, is_authentic, shown
from webapp.hosts.findings import WANTS_RECHECK
from webapp.hosts.models import Host, HostState, Pool
from webapp.hosts.pools import devices_sync, kind_of
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.host_preflight import needs_of
from webapp.jobs.lost import end_unknown_attempts
from webapp.jobs.models import LIVE_STATES, Attempt, Event, Job, JobState
from webapp.live.publish import publish_host_checks, publish_host_states

READ = (
    *("team", "pool", "slug", "state", "microbench", "rotation_asked_at", "checks"),
    "epoch_seen",
)


class Spoken(NamedTuple):
    """One host, by its id, and what it said."""

    host_id: str
    beat: Beat


def host_beat(*, host: Host, beat: Beat) -> BeatReply:
    """Store a host's beat and return what it should run, stop and forget."""
    reply = host_beats([Spoken(host.pk, beat)])[0]
    host.refresh_from_db()
    return reply


def host_beats(spoken: Sequence[Spoken]) -> list[BeatReply]:
    """Store the beats of several hosts at once and return the reply to each.

    A host that spoke twice is given twice: the later beat is the one that stays.
    """
    hosts = _stored(spoken)
    end_unknown_attempts({each.host_id: _seen(each.beat) for each in spoken})
    _allocate(hosts)
    epochs_hear([each.beat.epoch for each in spoken if each.beat.epoch])
    site = epoch()
    said, is_backup = shown(site.number), site.highest_seen > site.number
    known, wanted = _known(spoken), {} if is_backup else _wanted(hosts)
    replies = [_reply(hosts[each.host_id], each.beat, known, wanted) for each in spoken]
    return [reply.model_copy(update={"epoch": said}) for reply in replies]


def _reply(
    host: Host, beat: Beat, known: Mapping[str, Attempt], wanted: Mapping[str, list[Wanted]]
) -> BeatReply:
    """Return a host's desired state; what another host runs is not among what is known of it."""
    seen = _seen(beat)
    own = {pk: known[pk] for pk in seen if pk in known and known[pk].host_id == host.pk}
    return BeatReply(
        server_time_ms=now_ms(),
        wanted=tuple(wanted.get(host.pk, ())),
        stop=_stop_orders(seen, own),
        acked={pk: attempt.acked_seq for pk, attempt in own.items()},
        forget=tuple(pk for pk, attempt in own.items() if attempt.exit_record),
        run_microbench=not host.microbench,
        rotate=host.rotation_asked_at is not None,
        recheck=WANTS_RECHECK in host.checks,
        environments=orders_of(host),
    )


def _seen(beat: Beat) -> dict[str, AttemptStatus]:
    return {status.attempt_id: status for status in beat.attempts}


def _stored(spoken: Sequence[Spoken]) -> dict[str, Host]:
    """Take what hosts said into their rows, in one transaction, and return the rows by id."""
    with transaction.atomic():
        # What is large and only ever replaced is not read.
        rows = Host.objects.select_for_update(no_key=True).only(*READ).order_by("pk")
        hosts = rows.in_bulk({each.host_id for each in spoken})
        update_each(Host, [_apply(hosts[each.host_id], each.beat) for each in spoken])
    for each in spoken:
        _tell_checks(hosts[each.host_id], each.beat)
    publish_host_states([(host, contact_of(host)) for host in hosts.values()])
    return hosts


def _tell_checks(host: Host, beat: Beat) -> None:
    """Have an open check-list look again when a beat brought what it shows."""
    if host.state == HostState.CHECKING or beat.facts or beat.microbench or beat.environments:
        publish_host_checks(host)


def _apply(host: Host, beat: Beat) -> RowChange:
    """Change a host as its beat says and return what its row takes of it."""
    before = host.state
    changes = _changes(host, beat)
    for name, value in changes.items():
        setattr(host, name, value)
    if beat.facts is not None:
        devices_sync(host, beat.facts)
    if host.state != before:
        _announce(host, before)
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
        found = changes.get("checks", host.checks)
        changes["checks"] = findings_after(found, beat.environments)
    seen = beat.epoch
    if seen is not None and seen.number > host.epoch_seen and is_authentic(seen):
        changes["epoch_seen"] = seen.number
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


def _allocate(hosts: Mapping[str, Host]) -> None:
    """Serve the pools of these hosts in which somebody waits."""
    pools = {host.pool_id for host in hosts.values()}
    waited_for = Job.objects.filter(pool__in=pools, state=JobState.QUEUED, deleted_at=None)
    for pool in Pool.objects.filter(pk__in=waited_for.order_by().values("pool")):
        allocate_pool(pool)


def _known(spoken: Sequence[Spoken]) -> dict[str, Attempt]:
    """Return the attempts that the hosts name, by their ids."""
    named = {pk for each in spoken for pk in _seen(each.beat)}
    if not named:
        return {}
    return Attempt.objects.select_related("job").in_bulk(named)


def _wanted(hosts: Collection[str]) -> dict[str, list[Wanted]]:
    """Return the attempts that each host should have claimed and has not."""
    unclaimed = Attempt.objects.filter(
        host__in=hosts,
        claimed_at=None,
        job__state__in=[JobState.PREFLIGHT, JobState.STARTING],
        job__current_attempt__isnull=False,
    ).select_related("job")
    found: dict[str, list[Wanted]] = defaultdict(list)
    for attempt in unclaimed:
        if _is_current(attempt):
            wanted = Wanted(attempt_id=attempt.pk, fence=attempt.fence, needs=needs_of(attempt))
            found[attempt.host_id].append(wanted)
    return found


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
    if _is_current(attempt) and attempt.job.state in LIVE_STATES:
        return None
    return Reason.SUPERSEDED


def _is_current(attempt: Attempt) -> bool:
    """Return whether it is its job's current attempt, or one of its gang."""
    return attempt.job.current_attempt_id in {attempt.pk, attempt.leader_id}
