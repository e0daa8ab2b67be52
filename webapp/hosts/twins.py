"""Devices that are one piece of hardware, seen through several hosts: each team's own agent on it.

GPUs are the same where their uuids are. Processors are where their hosts say the same machine and
their agents run as different Unix users: hosts that one user made on one machine are meant to
run side by side, as they are when somebody tries things out. An operator's word that two hosts
are different machines ends it for both.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from django.db.models import Exists, OuterRef, Q, QuerySet

from webapp.hosts.contact import Contact, contact_of
from webapp.hosts.models import Device, Distinction, Host, Pool

UNREAD = ("host__facts", "host__microbench", "host__calibration", "host__checks", "host__planned")
Twins = Mapping[str, list[Device]]  # by a device, those of other hosts that are the same


def twins_in(pool: Pool) -> Twins:
    """Return the twins of a pool's devices; those that have none are left out."""
    elsewhere = Device.objects.filter(hardware=OuterRef("hardware")).exclude(host=OuterRef("host"))
    doubled = Device.objects.filter(Exists(elsewhere), host__pool=pool).exclude(hardware="")
    return _twins(set(doubled.values_list("hardware", flat=True)))


def twins_of(devices: Iterable[Device]) -> Twins:
    """Return the twins of these devices; those that have none are left out."""
    return _twins({device.hardware for device in devices} - {""})


def _twins(hardware: Collection[str]) -> Twins:
    if not hardware:
        return {}
    by_hardware: dict[str, list[Device]] = defaultdict(list)
    for device in _seen(hardware):
        by_hardware[device.hardware].append(device)
    several = [alike for alike in by_hardware.values() if len(alike) > 1]
    apart = _told_apart({device.host_id for alike in several for device in alike})
    found = {
        one.pk: [
            other for other in alike if is_same(one, other) and _pair(one, other) not in apart
        ]
        for alike in several
        for one in alike
    }
    return {pk: twins for pk, twins in found.items() if twins}


def _seen(hardware: Collection[str]) -> QuerySet[Device]:
    rows = Device.objects.filter(hardware__in=hardware).select_related("host__pool")
    return rows.defer(*UNREAD).order_by("pk")


def is_same(one: Device, other: Device) -> bool:
    """Return whether two hosts' devices are one, and not meant to be used by both at once."""
    if one.host_id == other.host_id or one.hardware != other.hardware or not one.hardware:
        return False
    return one.kind == "gpu" or one.unix_user != other.unix_user


def _pair(one: Device, other: Device) -> frozenset[str]:
    return frozenset({one.host_id, other.host_id})


def _told_apart(hosts: Collection[str]) -> set[frozenset[str]]:
    """Return the pairs of these hosts of which an operator said that they are two machines."""
    words = Distinction.objects.filter(Q(host__in=hosts), Q(other__in=hosts))
    return {frozenset(pair) for pair in words.values_list("host", "other")}


def is_over(holder: Host, taker: Host) -> bool:
    """Return whether the machine was started anew since a host that is silent was last heard.

    What that host ran is over then, though it has not come back to say so: the other one, which
    is heard, names a later boot.
    """
    return (
        contact_of(holder) is Contact.UNREACHABLE
        and contact_of(taker) is Contact.LIVE
        and bool(holder.boot_id and taker.boot_id)
        and holder.boot_id != taker.boot_id
    )
