"""Devices that an operator takes out of use, each with a reason, and the hosts around them."""

from dataclasses import dataclass

from django.contrib.auth.models import AnonymousUser, User
from django.db import transaction

from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.hosts.models import Device, Host, HostState
from webapp.hosts.services import host_set_state
from webapp.jobs.models import Allocation, Event, Job

LONGEST_REASON = 200


@dataclass(frozen=True)
class DeviceRow:
    """A device as its host's page shows it; ``job`` only to those who may see it."""

    device: Device
    is_held: bool
    job: Job | None


def device_words(device: Device) -> str:
    """Return what people call a device of a host."""
    numbered = {"gpu": "GPU", "slot": "Slot"}.get(device.kind)
    return f"{numbered} {device.index}" if numbered else "The processor"


def devices_of(host: Host, user: User | AnonymousUser) -> list[DeviceRow]:
    """Return a host's devices with who holds them, those that are gone last."""
    held = Allocation.objects.filter(device__host=host, released_at=None)
    holders = dict(held.values_list("device", "attempt__job"))
    jobs = Job.objects.visible_to(user).in_bulk(set(holders.values()))
    # A processor that gave way to GPUs is no loss to tell of.
    devices = host.devices.exclude(kind="cpu", is_present=False)
    return [
        DeviceRow(device, device.pk in holders, jobs.get(holders.get(device.pk, "")))
        for device in devices.order_by("-is_present", "index", "pk")
    ]


def device_cordon(*, device: Device, by: str, reason: str) -> None:
    """Keep a device from new jobs; what runs on it goes on.

    Raises:
        InvalidProblem: there is no reason, or it is too long.
    """
    reason = " ".join(reason.split())
    if not reason:
        raise InvalidProblem(
            "reason", "reason is empty; say why, for whoever wonders later: “ECC errors”."
        )
    if len(reason) > LONGEST_REASON:
        raise InvalidProblem(
            "reason", f"reason has {len(reason)} characters; at most {LONGEST_REASON} are kept."
        )
    with transaction.atomic():
        Device.objects.filter(pk=device.pk).update(
            cordoned_at=now(), cordoned_by=by[:80], cordon_reason=reason
        )
        _record(device, "device.cordoned", by, reason)
    device.refresh_from_db()


def device_uncordon(*, device: Device, by: str) -> None:
    """Let a device take jobs again."""
    with transaction.atomic():
        rows = Device.objects.filter(pk=device.pk, cordoned_at__isnull=False)
        if rows.update(cordoned_at=None, cordoned_by="", cordon_reason=""):
            _record(device, "device.uncordoned", by, "")
    device.refresh_from_db()


def _record(device: Device, kind: str, by: str, reason: str) -> None:
    host: Host = device.host
    Event.objects.create(
        at=now(),
        team_id=host.team_id,
        kind=kind,
        subject=host.pk,
        actor=by,
        detail={"device": device_words(device), "uuid": device.uuid, "reason": reason},
    )


def host_take_out(*, host: Host, to: HostState, by: str) -> None:
    """Put a host into maintenance, or retire it, once no job holds a device of it.

    Raises:
        ConflictProblem: jobs still hold devices of it.
    """
    held = Allocation.objects.filter(device__host=host, released_at=None)
    num_jobs = held.values("attempt__job").distinct().count()
    if num_jobs:
        raise ConflictProblem(
            "host_in_use",
            f"{host.name} still runs {num_jobs} job{'' if num_jobs == 1 else 's'}. Drain it and "
            "wait until they have ended, or stop them.",
        )
    host_set_state(host=host, to=to, by=by)
