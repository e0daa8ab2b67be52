"""A pool's current state: queued jobs, shared devices, the policy's snapshot."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db.models import (
    Count,
    Exists,
    Max,
    Min,
    OuterRef,
    Prefetch,
    QuerySet,
)

from webapp.core.clock import now
from webapp.hosts.machines import Twins, holders_among, is_over, twins_in, twins_of
from webapp.hosts.models import RUNS_JOBS, Device, Host, HostState, Pool
from webapp.hosts.services import Contact, contact_of
from webapp.jobs import queue_decisions as values
from webapp.jobs.cached_models import hosts_with, largest_use
from webapp.jobs.gangs import gpu_load
from webapp.jobs.models import IN_TURN, Allocation, Attempt, Job, JobState
from webapp.jobs.quotas import (
    Earlier,
    Rules,
    cached_earlier_seconds,
    device_seconds,
    left_seconds,
    length_seconds,
)

# The queued jobs of a pool: all of them, or candidates for the first turns.
#
# Each turn is the first job of some team, so the first turns are among the first jobs of each
# team, however long the queue is. An index keeps each team's jobs in order.


READ_OF_HOSTS = (  # fields for decisions and messages; a host that receives a job is read by key
    "name", "slug", "kind", "state", "pool", "team", "address", "last_seen_at", "last_beat",
)  # fmt: skip
SPARE_TURNS = 16  # turns of jobs that wait, before those that take the free devices
LARGE_OF_JOBS = ("plan_request", "estimate", "result")


class Waiting(NamedTuple):
    """Candidate jobs for the first turns, and the total number of queued jobs."""

    jobs: list[Job]
    num_waiting: int


def waiting_jobs(pool: Pool) -> list[Job]:
    """Return every queued job of a pool."""
    return _with_relations(_queued(pool), pool)


def first_waiting(pool: Pool, turns: int) -> Waiting:
    """Return the candidates for the first ``turns`` of a pool's queue."""
    numbers = num_by_team(pool)
    num_waiting = sum(numbers.values())
    if num_waiting <= turns:
        return Waiting(waiting_jobs(pool), num_waiting)
    keys = [key for team in numbers for key in _first_of(pool, team, turns)]
    return Waiting(_with_relations(_queued(pool).filter(pk__in=keys), pool), num_waiting)


def first_candidates(pool: Pool, num_free: int) -> tuple[list[Job], int | None]:
    """Return jobs that may take this many devices, and how many turns they decide.

    These are candidates of the first turns alone where the queue is much longer, else all jobs,
    with None turns.
    """
    numbers = num_by_team(pool)
    turns = 2 * num_free + SPARE_TURNS
    if 2 * turns * len(numbers) >= sum(numbers.values()):
        return waiting_jobs(pool), None
    return first_waiting(pool, turns).jobs, turns


def num_open_devices(pool: Pool, least_bytes: int | None) -> int:
    """Return the number of usable devices of ready hosts that no attempt holds.

    With ``least_bytes``, what the queue's smallest sharing job asks for, those count too that
    nobody holds alone.
    """
    held = Allocation.objects.filter(device=OuterRef("pk"), released_at=None)
    if least_bytes is not None:
        held = held.filter(shared_bytes=None)
    ready = Device.objects.filter(
        ~Exists(held),
        host__pool=pool,
        host__kind__in=RUNS_JOBS,
        host__state=HostState.READY,
        is_present=True,
        cordoned_at=None,
    )
    return ready.count()


def least_shared_bytes(pool: Pool) -> int | None:
    """Return the least memory of a device that a queued job wants to share; None: none does."""
    wants = _queued(pool).filter(shared_bytes__isnull=False)
    least: int | None = wants.aggregate(least=Min("shared_bytes"))["least"]
    return least


def num_by_team(pool: Pool) -> dict[str, int]:
    """Return the number of queued jobs per team in a pool."""
    teams = _queued(pool).order_by().values_list("team")
    return dict(teams.annotate(number=Count("*")))


def num_before(job: Job) -> int:
    """Return the number of jobs of the same team before a queued job.

    The keys come from the index in order: counting by conditions would read the rows.
    """
    queued = _queued(job.pool).filter(team=job.team_id).order_by(*IN_TURN)
    keys = list(queued.values_list("pk", flat=True))
    return keys.index(job.pk) if job.pk in keys else len(keys)


def _queued(pool: Pool) -> QuerySet[Job]:
    return Job.objects.filter(pool=pool, state=JobState.QUEUED, deleted_at=None)


def _first_of(pool: Pool, team: str, number: int) -> Sequence[str]:
    queued = _queued(pool).filter(team=team).order_by(*IN_TURN)
    return list(queued.values_list("pk", flat=True)[:number])


def _with_relations(jobs: QuerySet[Job], pool: Pool) -> list[Job]:
    hosts = Host.objects.only(*READ_OF_HOSTS)
    # Pools, teams, owners and hosts repeat across jobs: prefetching reads each once.
    rows = jobs.defer(*LARGE_OF_JOBS).prefetch_related("team", "owner")
    loaded = list(rows.prefetch_related(Prefetch("requested_host", queryset=hosts)))
    for job in loaded:
        job.pool = pool
    return loaded


# Use of a pool's devices through other hosts of the same machine.


RUNS_THERE = ("claimed", "running")


@dataclass(frozen=True)
class RemoteHolder:
    """The attempt that holds a device, and the other host through which it does."""

    attempt: Attempt
    host: Host


@dataclass(frozen=True)
class SharedDevices:
    """The devices of a pool that other hosts also see, by id."""

    held: Mapping[str, RemoteHolder] = field(default_factory=dict)
    freed_at: Mapping[str, datetime] = field(default_factory=dict)  # through another host

    def is_stale(self, device: Device, host: Host) -> bool:
        """Return whether a host's last heartbeat predates the device's last release.

        A host reports processes of another host's job as foreign; they are gone once that job has
        released the device, whatever the last heartbeat reported.
        """
        freed, last_seen = self.freed_at.get(device.pk), host.last_seen_at
        return freed is not None and last_seen is not None and last_seen < freed


def shared_in(pool: Pool, hosts: Mapping[str, Host]) -> SharedDevices:
    """Return the shared devices of a pool; ``hosts`` are the pool's, by id."""
    twins = holders_among(twins_in(pool))
    owned = {pk: host for pk, host in _owners(twins).items() if host.pk in hosts}
    return SharedDevices(_held(twins, owned), _freed(twins)) if twins else SharedDevices()


def held_elsewhere(
    devices: Collection[Device], hosts: Mapping[str, Host]
) -> dict[str, RemoteHolder]:
    """Return the holders of devices through other hosts; ``hosts`` are the devices' own, by id."""
    twins = holders_among(twins_of(devices))
    return _held(twins, {device.pk: hosts[device.host_id] for device in devices}) if twins else {}


def pools_sharing_devices(attempt: Attempt) -> list[Pool]:
    """Return other pools with queued jobs whose hosts see a device that an attempt held.

    Pools are sorted by their last use of these devices, oldest first, so that they take turns.
    """
    devices = Device.objects.filter(allocations__attempt=attempt)
    twins = [other for each in twins_of(devices).values() for other in each]
    waiting = Pool.objects.filter(
        pk__in={other.host.pool_id for other in twins},
        jobs__state=JobState.QUEUED,
        jobs__deleted_at=None,
    )
    pools = waiting.exclude(pk=attempt.job.pool_id).distinct()
    return sorted(pools, key=lambda pool: _last_taken(pool, twins))


def _last_taken(pool: Pool, twins: Collection[Device]) -> float:
    device_ids = [device.pk for device in twins if device.host.pool_id == pool.pk]
    last = Allocation.objects.filter(device__in=device_ids).aggregate(at=Max("taken_at"))["at"]
    return last.timestamp() if last else 0.0


def _owners(twins: Twins) -> dict[str, Host]:
    """Return the host of each device that another host also sees."""
    return {other.pk: other.host for others in twins.values() for other in others}


def _held(twins: Twins, owners: Mapping[str, Host]) -> dict[str, RemoteHolder]:
    others = _owners(twins)
    rows = Allocation.objects.filter(released_at=None, device__in=others)
    holders = {
        **abandoned_but_running(others.values()),
        **{row.device_id: row.attempt for row in rows.select_related("attempt__job")},
    }
    elsewhere = {}
    for pk, owner in owners.items():
        for other in twins.get(pk, ()):
            holder = holders.get(other.pk)
            if holder is not None and not is_over(other.host, owner):
                elsewhere[pk] = RemoteHolder(holder, other.host)
    return elsewhere


def _freed(twins: Twins) -> dict[str, datetime]:
    others = {other.pk for each in twins.values() for other in each}
    rows = Allocation.objects.filter(device__in=others, released_at__isnull=False)
    freed = dict(rows.order_by().values_list("device").annotate(at=Max("released_at")))
    return {
        pk: max(freed[other.pk] for other in each if other.pk in freed)
        for pk, each in twins.items()
        if any(other.pk in freed for other in each)
    }


def abandoned_but_running(hosts: Collection[Host]) -> dict[str, Attempt]:
    """Return devices of abandoned attempts that their host still runs."""
    running = {
        status["attempt_id"]
        for host in hosts
        for status in host.last_beat.get("attempts") or ()
        if status.get("phase") in RUNS_THERE
    }
    if not running:
        return {}
    rows = Allocation.objects.filter(
        attempt__in=running, released_at__isnull=False, attempt__exit_record={}
    )
    return {row.device_id: row.attempt for row in rows.select_related("attempt__job")}


FAIR_DAYS = 7


@dataclass(frozen=True)
class PoolState:
    """The state of one pool at one instant."""

    pool: Pool
    snapshot: values.Snapshot
    hosts: Mapping[str, Host]
    devices: Mapping[str, Device]
    jobs: Mapping[str, Job]  # queued jobs and jobs that hold devices
    holders: Mapping[str, Sequence["Holder"]]  # by device; several where they share it
    elsewhere: Mapping[str, RemoteHolder] = field(default_factory=dict)  # through other hosts

    def bytes_left(self, device_id: str) -> int:
        """Return the memory of a device that jobs may still share; 0 if one holds it alone."""
        device = self.devices[device_id]
        held = [each.num_bytes for each in self.holders.get(device_id, ())]
        if None in held or foreign_pids(self.hosts[device.host_id], device):
            return 0
        return max(0, shareable_bytes(device) - sum(each or 0 for each in held))


def pool_state_of(
    pool: Pool, jobs: Sequence[Job], rules: Rules, least_bytes: int | None = None
) -> PoolState:
    """Return the state of a pool with its queued jobs; ``rules`` name the jobs held back.

    ``least_bytes``: the least that a job of the whole queue wants to share, if that is longer.
    """
    rows = Host.objects.filter(pool=pool, kind__in=RUNS_JOBS).only(*READ_OF_HOSTS)
    hosts = {host.pk: host for host in rows}
    devices = {d.pk: d for d in Device.objects.filter(host__in=hosts).order_by("index", "pk")}
    shared = shared_in(pool, hosts)
    earlier = cached_earlier_seconds()
    holders = _holders(pool)
    for pk, attempt in abandoned_but_running(hosts.values()).items():
        holders.setdefault(pk, []).append(Holder(attempt))
    for pk, remote in shared.held.items():
        holders.setdefault(pk, []).append(Holder(remote.attempt))
    of_host: dict[str, list[values.Device]] = {pk: [] for pk in hosts}
    for device in devices.values():
        host, held = hosts[device.host_id], holders.get(device.pk, [])
        holds = [each.hold(earlier) for each in held]
        is_alone = any(each.num_bytes is None for each in held)
        if not is_alone and foreign_pids(host, device) and not shared.is_stale(device, host):
            holds.append(values.Hold(None))
        of_host[device.host_id].append(_device(device, holds))
    wanted = {job.pk: use for job in jobs if (use := largest_use(job.spec))}
    stored = hosts_with(set(wanted.values()), hosts) if len(hosts) > 1 else {}
    preferred = {pk: stored[use] for pk, use in wanted.items() if use in stored}
    preferred |= _keeping_checkpoints(jobs)
    snapshot = values.Snapshot(
        hosts=tuple(_host(host, of_host[host.pk]) for host in hosts.values()),
        demands=tuple(
            replace(
                _demand(job, rules, earlier),
                preferred=preferred.get(job.pk, frozenset()),
                device_ratio=_device_ratio(job, devices.values()),
            )
            for job in jobs
        ),
        used=used_by_team(pool, rules.shares()) if len(rules.shares()) > 1 else {},
        shares=rules.shares(),
        least_bytes=least_bytes,
    )
    jobs_by_id = {
        each.attempt.job_id: each.attempt.job for held in holders.values() for each in held
    }
    jobs_by_id |= {job.pk: job for job in jobs}
    return PoolState(pool, snapshot, hosts, devices, jobs_by_id, holders, shared.held)


class Holder(NamedTuple):
    """An attempt that holds a device, or ``num_bytes`` of its memory."""

    attempt: Attempt
    num_bytes: int | None = None

    def hold(self, earlier: Earlier) -> values.Hold:
        """Return the hold with the forecast of its end."""
        seconds = left_seconds(self.attempt, earlier)
        ends = values.FOREVER if seconds is None else seconds
        return values.Hold(self.attempt.job_id, ends, self.num_bytes)


def _holders(pool: Pool) -> dict[str, list[Holder]]:
    found: dict[str, list[Holder]] = {}
    rows = Allocation.objects.filter(released_at=None, device__host__pool=pool)
    for row in rows.select_related("attempt__job").order_by("taken_at", "pk"):
        found.setdefault(row.device_id, []).append(Holder(row.attempt, row.shared_bytes))
    return found


def _host(host: Host, devices: Sequence[values.Device]) -> values.Host:
    contact = contact_of(host)
    is_ready = host.state == HostState.READY
    return values.Host(
        id=host.pk,
        devices=tuple(devices),
        takes_singles=is_ready and contact in {Contact.LIVE, Contact.DEGRADED},
        takes_gangs=is_ready and contact is Contact.LIVE,
    )


USABLE_RATIO = 0.97  # of a device's memory, for jobs that share it: the driver takes the rest
SHAREABLE = ("gpu", "cpu")  # kinds of devices; a scheduler's slot is no hardware


def _device(device: Device, holds: Sequence[values.Hold]) -> values.Device:
    return values.Device(
        id=device.pk,
        index=device.index,
        kind=device.kind,
        model=device.name,
        # Any memory fits a CPU here: its preflight checks the available memory.
        memory_bytes=device.memory_bytes if device.kind == "gpu" else 2**63,
        holds=tuple(holds),
        shareable_bytes=shareable_bytes(device),
        is_usable=device.is_present and device.cordoned_at is None,
    )


def shareable_bytes(device: Device) -> int:
    """Return how much of a device's memory jobs may share in all."""
    return int(USABLE_RATIO * device.memory_bytes) if device.kind in SHAREABLE else 0


def foreign_pids(host: Host, device: Device) -> list[int]:
    """Return foreign processes on a device, from its host's last heartbeat.

    They are not ended; the device is not allocated while they run.
    """
    return list(gpu_load(host, device).get("foreign_pids") or ())


def _keeping_checkpoints(jobs: Sequence[Job]) -> dict[str, frozenset[str]]:
    """Return, for jobs that go on on several hosts, the hosts that keep what they go on from."""
    sources = {
        job.pk: source
        for job in jobs
        if job.num_hosts > 1 and (source := job.spec.get("resume_from"))
    }
    if not sources:
        return {}
    rows = Attempt.objects.filter(job__in=set(sources.values()), checkpoint_bytes__gt=0)
    hosts: dict[str, set[str]] = {}
    for job, host in rows.values_list("job", "host"):
        hosts.setdefault(job, set()).add(host)
    return {pk: frozenset(hosts[each]) for pk, each in sources.items() if each in hosts}


def _demand(job: Job, rules: Rules, earlier: Earlier) -> values.Demand:
    return values.Demand(
        job=job.pk,
        team=job.team_id,
        queued_at=job.queued_at.timestamp() if job.queued_at else 0.0,
        priority=job.priority,
        rank=job.queue_rank,
        num_hosts=job.num_hosts,
        devices_per_host=job.devices_per_host,
        min_memory_bytes=least_memory_bytes(job),
        host=job.requested_host_id,
        seconds=length_seconds(job, earlier),
        held_back=rules(job),
        own_devices=rules.own_devices(job),
        num_bytes=job.shared_bytes,
    )


def _device_ratio(job: Job, devices: Collection[Device]) -> float:
    """Return the part of a device that a job asks for, of the largest one."""
    largest = max((device.memory_bytes for device in devices), default=0)
    if job.shared_bytes is None or not largest:
        return 1.0
    return min(1.0, job.shared_bytes / largest)


def least_memory_bytes(job: Job) -> int:
    """Return the job's minimum predicted memory per device, in bytes."""
    peak = job.prediction.get("peak_memory_bytes") or {}
    return int(peak.get("low") or peak.get("value") or 0)


def used_by_team(pool: Pool, shares: Mapping[str, float]) -> dict[str, float]:
    """Return each team's recent device-seconds in the pool, divided by its share."""
    since = now() - timedelta(days=FAIR_DAYS)
    recent = Allocation.objects.filter(device__host__pool=pool)
    return {
        team: seconds / shares.get(team, 1.0)
        for team, seconds in device_seconds(recent, since).items()
    }
