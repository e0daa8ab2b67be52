"""Use of a pool's devices through other hosts of the same machine."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from django.db.models import Max

from webapp.hosts.models import Device, Host, Pool
from webapp.hosts.twins import Twins, is_over, twins_in, twins_of
from webapp.jobs.models import Allocation, Attempt, JobState

RUNS_THERE = ("claimed", "running")


@dataclass(frozen=True)
class RemoteHolder:
    """The attempt that holds a device, and the other host through which it does."""

    attempt: Attempt
    host: Host


@dataclass(frozen=True)
class Shared:
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


def shared_in(pool: Pool, hosts: Mapping[str, Host]) -> Shared:
    """Return the shared devices of a pool; ``hosts`` are the pool's, by id."""
    twins = twins_in(pool)
    owned = {pk: host for pk, host in _owners(twins).items() if host.pk in hosts}
    return Shared(_held(twins, owned), _freed(twins)) if twins else Shared()


def held_elsewhere(
    devices: Collection[Device], hosts: Mapping[str, Host]
) -> dict[str, RemoteHolder]:
    """Return the holders of devices through other hosts; ``hosts`` are the devices' own, by id."""
    twins = twins_of(devices)
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
    holders = {**abandoned_but_running(others.values()), **_holders(others)}
    elsewhere = {}
    for pk, owner in owners.items():
        for other in twins.get(pk, ()):
            holder = holders.get(other.pk)
            if holder is not None and not is_over(other.host, owner):
                elsewhere[pk] = RemoteHolder(holder, other.host)
    return elsewhere


def _holders(devices: Collection[str]) -> dict[str, Attempt]:
    rows = Allocation.objects.filter(released_at=None, device__in=devices)
    return {row.device_id: row.attempt for row in rows.select_related("attempt__job")}


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
