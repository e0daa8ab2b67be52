"""What a pool's devices are used for through other hosts of the same machine."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from django.db.models import Max

from webapp.hosts.models import Device, Host, Pool
from webapp.hosts.twins import Twins, is_over, twins_in, twins_of
from webapp.jobs.models import Allocation, Attempt, JobState

RUNS_THERE = ("claimed", "running")


@dataclass(frozen=True)
class Elsewhere:
    """Who holds a device, and through which other host."""

    attempt: Attempt
    host: Host


@dataclass(frozen=True)
class Shared:
    """The devices of a pool that other hosts see too, by their ids."""

    held: Mapping[str, Elsewhere] = field(default_factory=dict)
    freed_at: Mapping[str, datetime] = field(default_factory=dict)  # last, through another host

    def is_stale(self, device: Device, host: Host) -> bool:
        """Return whether a host's last beat is older than what it says of the device's users.

        To a host, the processes of another user's job are foreign; they are gone once that job
        has let go of the device, whatever the host saw before.
        """
        freed, heard = self.freed_at.get(device.pk), host.last_seen_at
        return freed is not None and heard is not None and heard < freed


def shared_in(pool: Pool, hosts: Mapping[str, Host]) -> Shared:
    """Return what a pool shares; ``hosts`` are the pool's, by their ids."""
    twins = twins_in(pool)
    owned = {pk: host for pk, host in _owners(twins).items() if host.pk in hosts}
    return Shared(_held(twins, owned), _freed(twins)) if twins else Shared()


def held_elsewhere(devices: Collection[Device], hosts: Mapping[str, Host]) -> dict[str, Elsewhere]:
    """Return who holds these devices now through other hosts; ``hosts`` are their own, by id."""
    twins = twins_of(devices)
    return _held(twins, {device.pk: hosts[device.host_id] for device in devices}) if twins else {}


def pools_beside(attempt: Attempt) -> list[Pool]:
    """Return other pools in which somebody waits and a host sees a device that an attempt held.

    The one whose hosts have had it least lately comes first, so that each has its turn.
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
    own = [device.pk for device in twins if device.host.pool_id == pool.pk]
    last = Allocation.objects.filter(device__in=own).aggregate(at=Max("taken_at"))["at"]
    return last.timestamp() if last else 0.0


def _owners(twins: Twins) -> dict[str, Host]:
    """Return the host of each device that is a twin of another."""
    return {other.pk: other.host for others in twins.values() for other in others}


def _held(twins: Twins, owners: Mapping[str, Host]) -> dict[str, Elsewhere]:
    others = _owners(twins)
    holders = {**still_there(others.values()), **_holders(others)}
    found = {}
    for pk, taker in owners.items():
        for other in twins.get(pk, ()):
            holder = holders.get(other.pk)
            if holder is not None and not is_over(other.host, taker):
                found[pk] = Elsewhere(holder, other.host)
    return found


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


def still_there(hosts: Collection[Host]) -> dict[str, Attempt]:
    """Return the devices of attempts that were given up and that their host still runs."""
    seen = {
        status["attempt_id"]
        for host in hosts
        for status in host.last_beat.get("attempts") or ()
        if status.get("phase") in RUNS_THERE
    }
    if not seen:
        return {}
    rows = Allocation.objects.filter(
        attempt__in=seen, released_at__isnull=False, attempt__exit_record={}
    )
    return {row.device_id: row.attempt for row in rows.select_related("attempt__job")}
