"""A pool as it is now, read once: the policy's snapshot, and the rows that its words name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from django.db.models import DurationField, ExpressionWrapper, F, Sum
from django.db.models.functions import Coalesce, Greatest

from webapp.core.clock import now
from webapp.hosts.contact import Contact, contact_of
from webapp.hosts.models import RUNS_JOBS, Device, Host, HostState, Pool
from webapp.jobs.models import Allocation, Attempt, Job, JobState
from webapp.jobs.preflight import gpu_load
from webapp.queue import snapshot as values
from webapp.queue.forecast import left_seconds, length_seconds
from webapp.queue.policy import decide
from webapp.queue.rules import Rules
from webapp.queue.sharing import Elsewhere, shared_in, still_there

FAIR_DAYS = 7
LARGE = ("facts", "microbench", "calibration")  # what no decision reads


@dataclass(frozen=True)
class Picture:
    """One pool at one instant."""

    pool: Pool
    snapshot: values.Snapshot
    hosts: Mapping[str, Host]
    devices: Mapping[str, Device]
    jobs: Mapping[str, Job]  # those that wait and those that hold devices
    holders: Mapping[str, Attempt]  # by device
    elsewhere: Mapping[str, Elsewhere] = field(default_factory=dict)  # those through other hosts

    def decide(self) -> values.Decision:
        """Return everybody's turn."""
        return decide(self.snapshot)


def waiting_jobs(pool: Pool) -> list[Job]:
    """Return the jobs that wait in a pool."""
    queued = Job.objects.filter(pool=pool, state=JobState.QUEUED, deleted_at=None)
    return list(queued.select_related("pool", "requested_host", "team", "owner"))


def picture_of(pool: Pool, jobs: Sequence[Job], rules: Rules) -> Picture:
    """Return the pool with the jobs that wait in it; ``rules`` say who may not be tried."""
    rows = Host.objects.filter(pool=pool, kind__in=RUNS_JOBS).defer(*LARGE)
    hosts = {host.pk: host for host in rows}
    devices = {d.pk: d for d in Device.objects.filter(host__in=hosts).order_by("index", "pk")}
    shared = shared_in(pool, hosts)
    through = {pk: each.attempt for pk, each in shared.held.items()}
    holders = {**through, **still_there(hosts.values()), **_holders(pool)}
    left = {attempt.pk: left_seconds(attempt) for attempt in holders.values()}
    of_host: dict[str, list[values.Device]] = {pk: [] for pk in hosts}
    for device in devices.values():
        holder = holders.get(device.pk)
        found = _device(device, holder, left)
        host = hosts[device.host_id]
        if holder is None and foreign_pids(host, device) and not shared.is_stale(device, host):
            found = replace(found, is_held=True, free_seconds=values.FOREVER)
        of_host[device.host_id].append(found)
    snapshot = values.Snapshot(
        hosts=tuple(_host(host, of_host[host.pk]) for host in hosts.values()),
        demands=tuple(_demand(job, rules(job)) for job in jobs),
        used=used_by_team(pool, rules.shares()) if len(rules.shares()) > 1 else {},
        shares=rules.shares(),
    )
    known = {attempt.job_id: attempt.job for attempt in holders.values()}
    known |= {job.pk: job for job in jobs}
    return Picture(pool, snapshot, hosts, devices, known, holders, shared.held)


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
    device: Device, holder: Attempt | None, left: Mapping[str, float | None]
) -> values.Device:
    seconds = left[holder.pk] if holder else 0.0
    return values.Device(
        id=device.pk,
        index=device.index,
        kind=device.kind,
        model=device.name,
        # What a processor may use is what is available: its preflight looks.
        memory_bytes=device.memory_bytes if device.kind == "gpu" else 2**63,
        is_held=holder is not None,
        free_seconds=values.FOREVER if seconds is None else seconds,
        held_by=holder.job_id if holder else None,
        is_usable=device.is_present and device.cordoned_at is None,
    )


def foreign_pids(host: Host, device: Device) -> list[int]:
    """Return the processes on a device that are no job of ours, as its host's last beat says.

    Nobody ends them; the device is simply not given to a job while they are there.
    """
    return list(gpu_load(host, device).get("foreign_pids") or ())


def _demand(job: Job, held_back: str) -> values.Demand:
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
        seconds=length_seconds(job),
        held_back=held_back,
    )


def least_memory_bytes(job: Job) -> int:
    """Return what the job is predicted to need of each device at the least."""
    peak = job.prediction.get("peak_memory_bytes") or {}
    return int(peak.get("low") or peak.get("value") or 0)


def used_by_team(pool: Pool, shares: Mapping[str, float]) -> dict[str, float]:
    """Return the device-seconds that each team held here in the last days, over its share."""
    since = now() - timedelta(days=FAIR_DAYS)
    recent = Allocation.objects.filter(device__host__pool=pool).exclude(released_at__lt=since)
    held = ExpressionWrapper(
        Coalesce("released_at", now()) - Greatest("taken_at", since),
        output_field=DurationField(),
    )
    rows = recent.values(team=F("attempt__job__team")).annotate(used=Sum(held)).order_by()
    return {
        row["team"]: row["used"].total_seconds() / shares.get(row["team"], 1.0) for row in rows
    }
