"""Hosts on one machine: their shared devices, and operators' statements about them."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from django.contrib.auth.models import AnonymousUser, User
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from webapp.core.clock import now
from webapp.hosts.contact import Contact, contact_of
from webapp.hosts.models import Device, Distinction, Host, HostState, Pool
from webapp.hosts.pools import is_own
from webapp.jobs.models import Event

# Devices that are the same hardware seen by several hosts, one agent per team.
#
# GPUs are the same if their uuids are equal. Processors are the same if their hosts report the
# same machine id and their agents run as different Unix users: hosts that one user starts on one
# machine are meant to run in parallel, as in a trial. An operator can mark two hosts as different
# machines.


UNREAD = ("host__facts", "host__microbench", "host__calibration", "host__checks", "host__planned")
Twins = Mapping[str, list[Device]]  # device id -> the same device seen by other hosts


def twins_in(pool: Pool) -> Twins:
    """Return the same devices seen by other hosts for a pool's devices; empty ones left out."""
    elsewhere = Device.objects.filter(hardware=OuterRef("hardware")).exclude(host=OuterRef("host"))
    doubled = Device.objects.filter(Exists(elsewhere), host__pool=pool).exclude(hardware="")
    return _same_devices(set(doubled.values_list("hardware", flat=True)))


def twins_of(devices: Iterable[Device]) -> Twins:
    """Return the same devices seen by other hosts for these devices; empty ones left out."""
    return _same_devices({device.hardware for device in devices} - {""})


def _same_devices(hardware: Collection[str]) -> Twins:
    if not hardware:
        return {}
    by_hardware: dict[str, list[Device]] = defaultdict(list)
    for device in _devices_with(hardware):
        by_hardware[device.hardware].append(device)
    shared = [alike for alike in by_hardware.values() if len(alike) > 1]
    apart = _distinct_pairs({device.host_id for alike in shared for device in alike})
    by_device = {
        own.pk: [
            other for other in alike if is_same(own, other) and _pair(own, other) not in apart
        ]
        for alike in shared
        for own in alike
    }
    return {pk: twins for pk, twins in by_device.items() if twins}


def _devices_with(hardware: Collection[str]) -> QuerySet[Device]:
    rows = Device.objects.filter(hardware__in=hardware).select_related("host__pool")
    return rows.defer(*UNREAD).order_by("pk")


def is_same(one: Device, other: Device) -> bool:
    """Return whether two hosts' devices are one that both must not use at once."""
    if one.host_id == other.host_id or one.hardware != other.hardware or not one.hardware:
        return False
    return one.kind == "gpu" or one.unix_user != other.unix_user


def _pair(device: Device, other: Device) -> frozenset[str]:
    return frozenset({device.host_id, other.host_id})


def _distinct_pairs(hosts: Collection[str]) -> set[frozenset[str]]:
    """Return the pairs of these hosts that an operator marked as different machines."""
    words = Distinction.objects.filter(Q(host__in=hosts), Q(other__in=hosts))
    return {frozenset(pair) for pair in words.values_list("host", "other")}


def is_over(holder: Host, taker: Host) -> bool:
    """Return whether the machine rebooted after the last heartbeat of an unreachable holder.

    The holder's jobs are over then, although it has not reported so: the taker, which is in
    contact, reports another boot id.
    """
    return (
        contact_of(holder) is Contact.UNREACHABLE
        and contact_of(taker) is Contact.LIVE
        and bool(holder.boot_id and taker.boot_id)
        and holder.boot_id != taker.boot_id
    )


# Other hosts on the same machine as a host, and operators' statements about them.


SOMEBODY = "an operator of another team"


@dataclass(frozen=True)
class SharedMachine:
    """Another host that looks like the same machine; named only for users who may see it."""

    host_id: str
    name: str
    slug: str  # empty for a host of a team that the user does not belong to
    words: str
    is_apart: bool
    may_take_back: bool


def hosts_on_same_machine(host: Host, user: User | AnonymousUser) -> list[SharedMachine]:
    """Return the hosts that look like the same machine as this one."""
    hardware = set(host.devices.exclude(hardware="").values_list("hardware", flat=True))
    alike = Q(devices__hardware__in=hardware)
    if machine := host.facts.get("machine_id"):
        alike |= Q(facts__machine_id=machine)
    rows = Host.objects.filter(alike).exclude(pk=host.pk).exclude(state=HostState.RETIRED)
    statements = _statements_about(host)
    return [
        _shared_machine(host, other, user, statements)
        for other in rows.distinct().select_related("team")
    ]


def _statements_about(host: Host) -> dict[tuple[str, str], Distinction]:
    rows = Distinction.objects.filter(Q(host=host) | Q(other=host))
    return {(row.host_id, row.other_id): row for row in rows}


def _shared_machine(
    host: Host,
    other: Host,
    user: User | AnonymousUser,
    statements: dict[tuple[str, str], Distinction],
) -> SharedMachine:
    is_known = is_own(user, other)
    ours, theirs = statements.get((host.pk, other.pk)), statements.get((other.pk, host.pk))
    if statement := ours or theirs:
        by = statement.said_by if statement is ours or is_known else SOMEBODY
        words = f"{by} said on {statement.said_at:%d %b %Y} that they are different machines"
    else:
        words = "; ".join(_reasons(host, other))
    return SharedMachine(
        host_id=other.pk,
        name=other.name if is_known else "a host of another team",
        slug=other.slug if is_known else "",
        words=words,
        is_apart=bool(ours or theirs),
        may_take_back=ours is not None,
    )


def _reasons(host: Host, other: Host) -> Iterator[str]:
    """Yield why two hosts look like one machine, and how that affects their jobs."""
    own = {d.hardware: d for d in host.devices.exclude(hardware="")}
    gpus = [own[d.hardware] for d in other.devices.all() if d.hardware in own and d.kind == "gpu"]
    if gpus:
        named = ", ".join(str(d.index) for d in sorted(gpus, key=lambda d: d.index))
        yield f"it sees the same GPU {named}: one job at a time uses it, of any team"
    if host.facts.get("machine_id") != other.facts.get("machine_id"):
        return
    users = [each.facts.get("user_id") for each in (host, other)]
    if not gpus and host.facts.get("gpus") and other.facts.get("gpus"):
        yield "it names the same machine and has other GPUs, so that neither waits for the other"
    elif not gpus and users[0] == users[1]:
        yield f"both agents run as user {users[0]}, so that jobs of both run side by side"
    elif not gpus:
        yield f"its agent runs as user {users[1]}, this one's as {users[0]}: one job at a time"
    if host.boot_id and other.boot_id and host.boot_id != other.boot_id:
        yield "they name different boots, as copies of one disk image do"


# Operators' statements


def hosts_mark_distinct(*, host: Host, other: Host, by: str, is_apart: bool) -> None:
    """Record that another host is a different machine, or delete that statement.

    Jobs of neither host then wait for the other; both hosts get an event.
    """
    with transaction.atomic():
        if is_apart:
            _, is_new = Distinction.objects.get_or_create(
                host=host, other=other, defaults={"said_by": by[:80], "said_at": now()}
            )
        else:
            is_new = bool(Distinction.objects.filter(host=host, other=other).delete()[0])
        if is_new:
            kind = "host.told_apart" if is_apart else "host.told_together"
            _record(host, kind, by, other if other.team_id == host.team_id else None)
            is_one_team = other.team_id == host.team_id
            _record(other, kind, by if is_one_team else SOMEBODY, host if is_one_team else None)


def _record(host: Host, kind: str, by: str, other: Host | None) -> None:
    Event.objects.create(
        at=now(),
        team_id=host.team_id,
        kind=kind,
        subject=host.pk,
        actor=by,
        detail={"other": other.name if other else "a host of another team"},
    )
