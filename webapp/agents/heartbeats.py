"""Store heartbeats, many per transaction, and build their replies."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import structlog
from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import DatabaseError, InterfaceError, OperationalError, connections, transaction

from runners.jobspec.base import excerpt
from runners.shared.messages import AttemptStatus, Beat, BeatReply, StopOrder, WantedAttempt
from runners.shared.reasons import Reason
from runners.shared.timing import scale_duration
from webapp.agents.dispatch import allocate_each, by_itself, end_unknown_attempts, needs_of
from webapp.agents.environments import checks_with_environments, orders_of
from webapp.audit.models import event_record
from webapp.core.clock import now, now_ms
from webapp.core.problems import InvalidProblem, Problem, UnauthorizedProblem
from webapp.core.queries import RowChange, update_each
from webapp.hosts import model_copies
from webapp.hosts.epoch import epoch, epoch_with_proof, epochs_record, is_authentic
from webapp.hosts.models import Host, HostState, Pool
from webapp.hosts.pools import Refusal, devices_sync, kind_of, refusals_record
from webapp.hosts.services import (
    UNKNOWN_CREDENTIAL,
    WANTS_RECHECK,
    contact_of,
    digest,
    publish_host_checks,
    publish_host_states,
)
from webapp.jobs import cached_models, observed_jobs, stored_files
from webapp.jobs.models import LIVE_STATES, Attempt, Job, JobState

SERVE = "serve"
OWN_GATEWAY = ("/tunnel/",)  # this site
NOT_KEPT = {
    "facts",
    "microbench",
    "environments",
    "files",
    "cache",
    "observed",
}  # of a beat: in columns of their own
READ = (
    *("team", "pool", "slug", "state", "microbench", "rotation_asked_at", "checks"),
    *("epoch_seen", "keep_models_bytes"),
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
    pools = {host.pool_id for host in hosts.values()}
    queued = Job.objects.filter(pool__in=pools, state=JobState.QUEUED, deleted_at=None)
    allocate_each(Pool.objects.filter(pk__in=queued.order_by().values("pool")))
    epochs_record([each.beat.epoch for each in spoken if each.beat.epoch])
    site = epoch()
    shown_epoch, is_backup = epoch_with_proof(site.number), site.highest_seen > site.number
    attempts, unclaimed = _named_attempts(spoken), {} if is_backup else _unclaimed_attempts(hosts)
    orders = cached_models.orders_of(hosts.values())
    copies = {} if is_backup else model_copies.orders_of(hosts.keys())
    observed = observed_jobs.orders_of(hosts.keys())
    replies = [_reply(hosts[each.host_id], each.beat, attempts, unclaimed) for each in spoken]
    replies = [
        reply.model_copy(
            update={
                "cache": orders.get(each.host_id),
                "copies": copies.get(each.host_id, ()),
                "observe": observed.get(each.host_id, ()),
            }
        )
        for reply, each in zip(replies, spoken, strict=True)
    ]
    return [reply.model_copy(update={"epoch": shown_epoch}) for reply in replies]


def _reply(
    host: Host,
    beat: Beat,
    attempts: Mapping[str, Attempt],
    wanted: Mapping[str, list[WantedAttempt]],
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
        delete_files=stored_files.orders_of(host),
        tunnels=_tunnels(statuses, own_attempts, wanted.get(host.pk, ())),
    )


def _tunnels(
    statuses: Mapping[str, AttemptStatus],
    attempts: Mapping[str, Attempt],
    wanted: Iterable[WantedAttempt],
) -> tuple[str, ...]:
    """Return the gateways of a host with a serving attempt that starts or runs; none of others."""
    is_serving = any(
        attempt.job.kind == SERVE and statuses[pk].phase != "exited"
        for pk, attempt in attempts.items()
    ) or any(each.needs is not None and each.needs.kind == SERVE for each in wanted)
    return (settings.GATEWAYS or OWN_GATEWAY) if is_serving else ()


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
            if each.beat.observed:
                observed_jobs.reports_store(hosts[each.host_id], each.beat.observed)
    for each in heartbeats:
        host, beat = hosts[each.host_id], each.beat
        news = (
            beat.facts
            or beat.microbench
            or beat.environments
            or beat.files
            or beat.cache
            or beat.observed
        )
        if host.state == HostState.CHECKING or news:
            publish_host_checks(host)
    publish_host_states([(host, contact_of(host)) for host in hosts.values()])
    return hosts


def _apply(host: Host, beat: Beat) -> RowChange:
    """Apply a heartbeat to a host and return the change of its row."""
    before = host.state
    changes = _changes(host, beat)
    for name, value in changes.items():
        setattr(host, name, value)
    if beat.facts is not None:
        devices_sync(host, beat.facts)
    if host.state != before:
        event_record(
            host, "host.state", f"host:{host.slug}", from_state=before, to_state=host.state
        )
    return RowChange(host.pk, changes)


def _changes(host: Host, beat: Beat) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "last_beat": beat.model_dump(mode="json", exclude=NOT_KEPT),
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
        changes["checks"] = checks_with_environments(checks, beat.environments)
    if beat.files is not None:
        orders = stored_files.report_store(host, beat.files)
        if orders != host.checks.get(stored_files.ORDERS, {}):
            checks = changes.get("checks", host.checks)
            changes["checks"] = {**checks, stored_files.ORDERS: orders}
    if beat.cache is not None:
        found = {
            cached_models.ORDERS: cached_models.report_store(host, beat.cache),
            cached_models.LINKS: [each.model_dump() for each in beat.cache.links],
        }
        if any(value != host.checks.get(key, type(value)()) for key, value in found.items()):
            changes["checks"] = changes.get("checks", host.checks) | found
    epoch_seen = beat.epoch
    if epoch_seen is not None and epoch_seen.number > host.epoch_seen and is_authentic(epoch_seen):
        changes["epoch_seen"] = epoch_seen.number
    if beat.microbench is not None:
        changes["microbench"] = beat.microbench.model_dump(mode="json")
    is_measured = bool(host.microbench) or beat.microbench is not None
    if host.state == HostState.CHECKING and is_measured:
        changes["state"] = HostState.READY
    return changes


def _named_attempts(heartbeats: Sequence[HostHeartbeat]) -> dict[str, Attempt]:
    named = {pk for each in heartbeats for pk in _reported_attempts(each.beat)}
    if not named:
        return {}
    return Attempt.objects.select_related("job").in_bulk(named)


def _unclaimed_attempts(hosts: Collection[str]) -> dict[str, list[WantedAttempt]]:
    """Return, per host id, the attempts that the host has yet to claim."""
    unclaimed = Attempt.objects.filter(
        host__in=hosts,
        claimed_at=None,
        job__state__in=[JobState.PREFLIGHT, JobState.STARTING],
        job__current_attempt__isnull=False,
    ).select_related("job")
    by_host: dict[str, list[WantedAttempt]] = defaultdict(list)
    for attempt in unclaimed:
        if _is_current(attempt) and (wanted := by_itself(_wanted, attempt)):
            by_host[attempt.host_id].append(wanted)
    return by_host


def _wanted(attempt: Attempt) -> WantedAttempt:
    return WantedAttempt(attempt_id=attempt.pk, fence=attempt.fence, needs=needs_of(attempt))


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


# Batching of concurrent heartbeats, so that one transaction stores all of them.
#
# The first heartbeat after a pause is stored at once; those within ``WINDOW_SECONDS`` of it form
# the next batch. The database gets one write per window, for any number of hosts.


WINDOW_SECONDS = scale_duration(1.0, least=0.1)
Answer = BeatReply | Problem
log = structlog.get_logger(__name__)


class ReceivedHeartbeat(NamedTuple):
    """One heartbeat and the credential of its request."""

    credential: str
    beat: Beat


def answers_to(received: Sequence[ReceivedHeartbeat]) -> list[Answer]:
    """Store the heartbeats with known credentials and return the reply to each."""
    digests = [digest(each.credential) for each in received]
    rows = Host.objects.filter(credential_hash__in=set(digests) - {digest("")})
    hosts = dict(rows.values_list("credential_hash", "pk"))
    known_flags = [key in hosts for key in digests]
    heartbeats = [
        HostHeartbeat(hosts[key], each.beat)
        for key, each in zip(digests, received, strict=True)
        if key in hosts
    ]
    replies = iter(_store_batch(heartbeats))
    return [
        next(replies) if is_known else UnauthorizedProblem(*UNKNOWN_CREDENTIAL)
        for is_known in known_flags
    ]


ALONE_SECONDS = 60.0  # how long a host's heartbeats are stored alone after a failed one
_alone_until: dict[str, float] = {}  # by host id, monotonic


def _store_batch(heartbeats: Sequence[HostHeartbeat]) -> Sequence[Answer]:
    """Store heartbeats together, and alone those of hosts of which one failed lately.

    A host whose every heartbeat fails would otherwise have all others stored twice, and one by
    one, in every window.
    """
    instant = time.monotonic()
    is_alone = [_alone_until.get(each.host_id, instant) > instant for each in heartbeats]
    others = [each for each, alone in zip(heartbeats, is_alone, strict=True) if not alone]
    replies = iter(_store_together(others) if others else ())
    return [
        _store_one(each) if alone else next(replies)
        for each, alone in zip(heartbeats, is_alone, strict=True)
    ]


def _store_together(heartbeats: Sequence[HostHeartbeat]) -> Sequence[Answer]:
    """Store heartbeats in one transaction; if that fails, each in its own.

    A heartbeat that the server cannot store affects only the host that sent it.
    """
    try:
        return host_beats(heartbeats)
    except (OperationalError, InterfaceError):  # database unavailable: no heartbeat is at fault
        raise
    except Exception:
        log.exception("heartbeats failed together; each is stored by itself", num=len(heartbeats))
    return [_store_one(each) for each in heartbeats]


def _store_one(heartbeat: HostHeartbeat) -> Answer:
    try:
        return host_beats([heartbeat])[0]
    except (OperationalError, InterfaceError):
        raise
    except Exception as error:
        log.exception("heartbeat failed", host=heartbeat.host_id)
        _alone_until[heartbeat.host_id] = time.monotonic() + ALONE_SECONDS
        reason = f"{type(error).__name__} in the server"
        sample = excerpt(heartbeat.beat.model_dump(mode="json"))
        refusals_record(heartbeat.host_id, [Refusal("heartbeat", reason, sample)])
        sentence = (
            "The server cannot store this heartbeat; its operators see it on the host's page."
        )
        return InvalidProblem("not_stored", sentence)


def heartbeat_refused(credential: str, reason: str) -> None:
    """Record a heartbeat that could not be parsed, if a host has this credential.

    If the database rejects the record, the host still gets the reason in its reply.
    """
    hosts = Host.objects.filter(credential_hash=digest(credential)).exclude(credential_hash="")
    try:
        if host_id := hosts.values_list("pk", flat=True).first():
            refusals_record(host_id, [Refusal("heartbeat", reason)])
    except DatabaseError:
        log.warning("refused heartbeat not recorded", reason=reason, exc_info=True)


def _answers_now(heartbeats: Sequence[ReceivedHeartbeat]) -> list[Answer]:
    """Close dead database connections, then answer: no request end does it in this thread."""
    for connection in connections.all(initialized_only=True):
        if connection.errors_occurred and not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()
    return answers_to(heartbeats)


class HeartbeatBatcher:
    """Batches the heartbeats of one event loop."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._waiting: list[tuple[ReceivedHeartbeat, asyncio.Future[Answer]]] = []
        self._turn: asyncio.Task[None] | None = None
        self._last_at = float("-inf")

    async def take(self, credential: str, beat: Beat) -> Answer:
        """Return the reply to a heartbeat once it is stored.

        Raises:
            Exception: the database failed; the agent retries.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((ReceivedHeartbeat(credential, beat), answer))
        if self._turn is None or self._turn.done():
            self._turn = asyncio.create_task(self._serve())
        return await answer

    async def _serve(self) -> None:
        """Store batch after batch until none is waiting."""
        while self._waiting:
            await asyncio.sleep(self._last_at + self._window_seconds - time.monotonic())
            batch, self._waiting = self._waiting, []
            self._last_at = time.monotonic()
            await _resolve(batch)


async def _resolve(batch: Sequence[tuple[ReceivedHeartbeat, asyncio.Future[Answer]]]) -> None:
    """Set the reply, or the exception, of every heartbeat of a batch."""
    futures = [answer for _, answer in batch]
    try:
        answers = await sync_to_async(_answers_now)([heartbeat for heartbeat, _ in batch])
    except Exception as error:  # noqa: BLE001 (the batch's failure is each heartbeat's failure)
        for future in futures:
            if not future.done():
                future.set_exception(error)
        return
    for future, answer in zip(futures, answers, strict=True):
        if not future.done():
            future.set_result(answer)
