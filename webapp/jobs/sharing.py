"""Devices that jobs share by memory.

A job that asks for bytes of one device may join others that do so, on a device that nobody holds
alone; it takes no free device then. A free one is given to it by the scheduler, as to any job.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from django.db.models import Q, QuerySet

from webapp.hosts.models import RUNS_JOBS, Device, Host, HostState, Pool
from webapp.hosts.services import Contact, contact_of
from webapp.jobs.models import IN_TURN, Allocation, Job, JobState
from webapp.jobs.pool_state import abandoned_but_running, foreign_pids
from webapp.jobs.quotas import Rules

MOST_JOBS = 64  # of a queue, that are tried at once
USABLE_RATIO = 0.97  # of a device's memory: the driver takes the rest
SHAREABLE = ("gpu", "cpu")  # kinds of devices; a scheduler's slot is no hardware


@dataclass
class SharedDevice:
    """A device that jobs share now, and the memory that they asked for."""

    device: Device
    host: Host
    is_only: bool  # of its host
    held_bytes: int

    def has_room(self, num_bytes: int) -> bool:
        """Return whether another job may ask for so much."""
        return self.held_bytes + num_bytes <= USABLE_RATIO * self.device.memory_bytes


class Exclusive(NamedTuple):
    """A queued job that wants devices alone: since when, and on which host; None: on any."""

    queued_at: datetime
    priority: int
    host_id: str | None


def sharing_jobs(pool: Pool) -> list[Job]:
    """Return the first queued jobs of a pool that ask for memory of a device."""
    rows = _queued(pool).filter(shared_bytes__isnull=False).order_by(*IN_TURN)
    return list(rows.select_related("team", "owner", "pool", "requested_host")[:MOST_JOBS])


def exclusive_waits(pool: Pool) -> list[Exclusive]:
    """Return the first queued jobs of a pool that want one device alone and may start.

    Those for several devices or hosts are left out, as are those that a rule holds back: a device
    would stay half empty for something else.
    """
    rows = _queued(pool).filter(shared_bytes__isnull=True, num_hosts=1).order_by(*IN_TURN)
    rows = rows.filter(Q(devices_per_host=1) | Q(devices_per_host=None))
    jobs = list(rows.select_related("team", "owner", "pool")[:MOST_JOBS])
    rules = Rules(jobs)
    return [
        Exclusive(job.queued_at, job.priority, job.requested_host_id)
        for job in jobs
        if job.queued_at is not None and not rules(job)
    ]


def _queued(pool: Pool) -> QuerySet[Job]:
    return Job.objects.filter(pool=pool, state=JobState.QUEUED, deleted_at=None)


def joins(
    jobs: Iterable[Job], devices: Sequence[SharedDevice], exclusive: Sequence[Exclusive]
) -> Iterator[tuple[Job, SharedDevice]]:
    """Yield the jobs that have room, with their devices, in the order of the queue.

    One that has none keeps the devices on which it waits from those behind it. Whoever starts a
    job counts it on its device.
    """
    waiting = list(exclusive)
    for job in jobs:
        shared = place_for(job, devices, waiting)
        if shared is not None:
            yield job, shared
        elif job.queued_at is not None:
            waiting.append(Exclusive(job.queued_at, job.priority, job.requested_host_id))


def would_join(job: Job, gone: Collection[str]) -> bool:
    """Return whether a queued job had room on a shared device without the jobs that go."""
    if job.shared_bytes is None:
        return False
    pool = job.pool
    devices = shared_devices(pool, gone)
    for each, shared in joins(sharing_jobs(pool), devices, exclusive_waits(pool)):
        if each.pk == job.pk:
            return True
        shared.held_bytes += each.shared_bytes or 0
    return False


def shared_devices(pool: Pool, gone: Collection[str] = ()) -> list[SharedDevice]:
    """Return the devices of a pool's ready hosts that jobs share, the fullest first.

    ``gone``: jobs that count as if they had left.
    """
    held: dict[str, list[int | None]] = defaultdict(list)
    rows = Allocation.objects.filter(released_at=None, device__host__pool=pool)
    rows = rows.exclude(attempt__job__in=gone) if gone else rows
    for device_id, num_bytes in rows.values_list("device", "shared_bytes"):
        held[device_id].append(num_bytes)
    shared = {
        key: sum(each or 0 for each in parts) for key, parts in held.items() if None not in parts
    }
    devices = Device.objects.filter(
        pk__in=shared,
        kind__in=SHAREABLE,
        is_present=True,
        cordoned_at=None,
        host__kind__in=RUNS_JOBS,
        host__state=HostState.READY,
    ).select_related("host")
    found, abandoned = [], abandoned_but_running({each.host for each in devices})
    for device in devices:
        host = device.host
        if device.pk in abandoned:
            continue
        if contact_of(host) in {Contact.LIVE, Contact.DEGRADED} and not foreign_pids(host, device):
            count = host.devices.filter(is_present=True, cordoned_at=None).count()
            found.append(SharedDevice(device, host, count == 1, shared[device.pk]))
    return sorted(found, key=lambda each: each.device.memory_bytes - each.held_bytes)


def place_for(
    job: Job, devices: Sequence[SharedDevice], exclusive: Sequence[Exclusive]
) -> SharedDevice | None:
    """Return a shared device with room for a job.

    A device is not kept from a job that wants it alone and was queued before: it would wait for
    ever while others come and go beside it.
    """
    return next((each for each in devices if _may_join(job, each, exclusive)), None)


def _may_join(job: Job, shared: SharedDevice, exclusive: Sequence[Exclusive]) -> bool:
    host_id = shared.host.pk
    wants_one = job.devices_per_host == 1 or (job.devices_per_host is None and shared.is_only)
    is_there = job.requested_host_id in {None, host_id}
    if not (wants_one and is_there and shared.has_room(job.shared_bytes or 0)):
        return False
    return not any(
        each.host_id in {None, host_id}
        and each.priority >= job.priority
        and (job.queued_at is None or each.queued_at < job.queued_at)
        for each in exclusive
    )
