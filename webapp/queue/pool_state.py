"""A pool's current state, read once: the policy's snapshot, and the rows for its messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from django.db.models import DurationField, ExpressionWrapper, F, Sum
from django.db.models.functions import Coalesce, Greatest

from webapp.core.clock import now
from webapp.hosts.contact import Contact, contact_of
from webapp.hosts.models import RUNS_JOBS, Device, Host, HostState, Pool
from webapp.jobs.models import Allocation, Attempt, Job
from webapp.jobs.preflight import gpu_load
from webapp.queue import snapshot as values
from webapp.queue.forecast import Earlier, left_seconds, length_seconds, remembered
from webapp.queue.policy import Until, decide, nobody
from webapp.queue.rules import Rules
from webapp.queue.sharing import RemoteHolder, abandoned_but_running, shared_in
from webapp.queue.waiting import READ_OF_HOSTS

FAIR_DAYS = 7


@dataclass(frozen=True)
class PoolState:
    """The state of one pool at one instant."""

    pool: Pool
    snapshot: values.Snapshot
    hosts: Mapping[str, Host]
    devices: Mapping[str, Device]
    jobs: Mapping[str, Job]  # queued jobs and jobs that hold devices
    holders: Mapping[str, Attempt]  # by device
    elsewhere: Mapping[str, RemoteHolder] = field(default_factory=dict)  # through other hosts

    def decide(self, until: Until = nobody) -> values.Decision:
        """Return the decision of the queue; after ``until`` returns True, only the order."""
        return decide(self.snapshot, until)


def pool_state_of(pool: Pool, jobs: Sequence[Job], rules: Rules) -> PoolState:
    """Return the state of a pool with its queued jobs; ``rules`` name the jobs held back."""
    rows = Host.objects.filter(pool=pool, kind__in=RUNS_JOBS).only(*READ_OF_HOSTS)
    hosts = {host.pk: host for host in rows}
    devices = {d.pk: d for d in Device.objects.filter(host__in=hosts).order_by("index", "pk")}
    shared = shared_in(pool, hosts)
    shared_holders = {pk: each.attempt for pk, each in shared.held.items()}
    holders = {**shared_holders, **abandoned_but_running(hosts.values()), **_holders(pool)}
    earlier = remembered()
    remaining = {attempt.pk: left_seconds(attempt, earlier) for attempt in holders.values()}
    of_host: dict[str, list[values.Device]] = {pk: [] for pk in hosts}
    for device in devices.values():
        holder = holders.get(device.pk)
        state = _device(device, holder, remaining)
        host = hosts[device.host_id]
        if holder is None and foreign_pids(host, device) and not shared.is_stale(device, host):
            state = replace(state, is_held=True, free_seconds=values.FOREVER)
        of_host[device.host_id].append(state)
    snapshot = values.Snapshot(
        hosts=tuple(_host(host, of_host[host.pk]) for host in hosts.values()),
        demands=tuple(_demand(job, rules(job), earlier) for job in jobs),
        used=used_by_team(pool, rules.shares()) if len(rules.shares()) > 1 else {},
        shares=rules.shares(),
    )
    jobs_by_id = {attempt.job_id: attempt.job for attempt in holders.values()}
    jobs_by_id |= {job.pk: job for job in jobs}
    return PoolState(pool, snapshot, hosts, devices, jobs_by_id, holders, shared.held)


def _holders(pool: Pool) -> dict[str, Attempt]:
    rows = Allocation.objects.filter(released_at=None, device__host__pool=pool)
    return {row.device_id: row.attempt for row in rows.select_related("attempt__job")}


def _host(host: Host, devices: Sequence[values.Device]) -> values.Host:
    contact = contact_of(host)
    is_ready = host.state == HostState.READY
    return values.Host(
        id=host.pk,
        devices=tuple(devices),
        takes_singles=is_ready and contact in {Contact.LIVE, Contact.DEGRADED},
        takes_gangs=is_ready and contact is Contact.LIVE,
    )


def _device(
    device: Device, holder: Attempt | None, remaining: Mapping[str, float | None]
) -> values.Device:
    seconds = remaining[holder.pk] if holder else 0.0
    return values.Device(
        id=device.pk,
        index=device.index,
        kind=device.kind,
        model=device.name,
        # Any memory fits a CPU here: its preflight checks the available memory.
        memory_bytes=device.memory_bytes if device.kind == "gpu" else 2**63,
        is_held=holder is not None,
        free_seconds=values.FOREVER if seconds is None else seconds,
        held_by=holder.job_id if holder else None,
        is_usable=device.is_present and device.cordoned_at is None,
    )


def foreign_pids(host: Host, device: Device) -> list[int]:
    """Return foreign processes on a device, from its host's last heartbeat.

    They are not ended; the device is not allocated while they run.
    """
    return list(gpu_load(host, device).get("foreign_pids") or ())


def _demand(job: Job, held_back: str, earlier: Earlier) -> values.Demand:
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
        held_back=held_back,
    )


def least_memory_bytes(job: Job) -> int:
    """Return the job's minimum predicted memory per device, in bytes."""
    peak = job.prediction.get("peak_memory_bytes") or {}
    return int(peak.get("low") or peak.get("value") or 0)


def used_by_team(pool: Pool, shares: Mapping[str, float]) -> dict[str, float]:
    """Return each team's recent device-seconds in the pool, divided by its share."""
    since = now() - timedelta(days=FAIR_DAYS)
    recent = Allocation.objects.filter(device__host__pool=pool).exclude(released_at__lt=since)
    held_time = ExpressionWrapper(
        Coalesce("released_at", now()) - Greatest("taken_at", since),
        output_field=DurationField(),
    )
    rows = recent.values(team=F("attempt__job__team")).annotate(used=Sum(held_time)).order_by()
    return {
        row["team"]: row["used"].total_seconds() / shares.get(row["team"], 1.0) for row in rows
    }
