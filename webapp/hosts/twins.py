"""Devices that are the same hardware seen by several hosts, one agent per team.

GPUs are the same if their uuids are equal. Processors are the same if their hosts report the same
machine id and their agents run as different Unix users: hosts that one user starts on one machine
are meant to run in parallel, as in a trial. An operator can mark two hosts as different machines.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from django.db.models import Exists, OuterRef, Q, QuerySet

from webapp.hosts.contact import Contact, contact_of
from webapp.hosts.models import Device, Distinction, Host, Pool

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
