"""Pools of hosts with their devices, and hosts that another team shares."""

from collections.abc import Mapping
from typing import Any

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import Q

from runners.facts import HostFacts, SchedulerFacts
from webapp.accounts.models import Team
from webapp.accounts.roles import membership_of
from webapp.hosts.models import Device, Host, Pool

DEFAULT = "default"
CPU_UUID = "cpu"


def pool_ensure(*, team: Team, slug: str = DEFAULT) -> Pool:
    """Return the team's pool of that name, created if missing."""
    return Pool.objects.get_or_create(team=team, slug=slug, defaults={"name": slug})[0]


def teams_of(pool: Pool) -> set[str]:
    """Return the ids of the teams whose jobs a pool takes: its own and those it is shared with."""
    return {pool.team_id, *pool.shared_with.values_list("pk", flat=True)}


def devices_sync(host: Host, facts: HostFacts) -> None:
    """Update a host's devices from its facts; missing devices stay, marked as not present.

    A host without a GPU has its processor as its only device. A host that submits to a scheduler
    has one slot per job that may be in the scheduler at once.
    """
    reported = _slots(facts.scheduler) if facts.scheduler else _hardware(facts)
    for device in reported:
        Device.objects.update_or_create(
            host=host, uuid=device.uuid, defaults=_facts_of(device) | {"is_present": True}
        )
    missing = Device.objects.filter(~Q(uuid__in=[device.uuid for device in reported]), host=host)
    missing.update(is_present=False)


def kind_of(facts: HostFacts) -> str:
    """Return the kind of a host with these facts."""
    return facts.scheduler.kind if facts.scheduler else "agent"


def _slots(scheduler: SchedulerFacts) -> list[Device]:
    options = [f"{name} {value}" for name, value in sorted(scheduler.options.items())]
    name = ", ".join(["One job in Slurm", *options])
    return [
        Device(kind="slot", index=index, uuid=f"slot-{index}", name=name[:120], memory_bytes=0)
        for index in range(scheduler.max_jobs)
    ]


def _hardware(facts: HostFacts) -> list[Device]:
    gpus = [
        Device(
            kind="gpu",
            index=gpu.index,
            uuid=gpu.uuid[:80],
            name=gpu.name[:120],
            memory_bytes=gpu.memory_bytes,
            hardware=gpu.uuid[:80],
            unix_user=facts.user_id,
        )
        for gpu in facts.gpus
    ]
    cpu = Device(
        kind="cpu",
        index=0,
        uuid=CPU_UUID,
        name=facts.cpu_model[:120],
        memory_bytes=facts.memory_bytes,
        hardware=facts.machine_id or "",
        unix_user=facts.user_id,
    )
    return gpus or [cpu]


def _facts_of(device: Device) -> dict[str, str | int | None]:
    names = ("kind", "index", "name", "memory_bytes", "hardware", "unix_user")
    return {name: getattr(device, name) for name in names}


# Visibility of hosts that another team shares: enough to run jobs there.
#
# The name is shown wherever a job ran; the host's page, addresses and disks are visible to its own
# team only.


SHARED_FACTS = frozenset(
    {
        "agent_version",
        "architecture",
        "cpu_count",
        "cpu_model",
        "cuda_version",
        "driver_version",
        "gpus",
        "job_memory_bytes",
        "kernel",
        "memory_bytes",
        "os",
        "packages",
        "python_version",
        "torch_cuda_version",
    }
)


def is_own(user: User | AnonymousUser, host: Host) -> bool:
    """Return whether a host belongs to one of the user's teams."""
    return membership_of(user, host.team) is not None


def facts_for(
    user: User | AnonymousUser, host: Host | None, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the facts a user may see: of a shared host, those that affect results."""
    if host is None or is_own(user, host):
        return dict(facts)
    return {name: value for name, value in facts.items() if name in SHARED_FACTS}
