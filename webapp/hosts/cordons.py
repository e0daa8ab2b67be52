"""Cordon devices, each with a reason; put hosts into maintenance or retire them."""

from dataclasses import dataclass

from django.contrib.auth.models import AnonymousUser, User
from django.db import transaction

from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.core.stale import refuse_stale
from webapp.hosts.models import Device, Host, HostState
from webapp.hosts.services import host_set_state
from webapp.jobs.models import Allocation, Event, Job

LONGEST_REASON = 200


@dataclass(frozen=True)
class DeviceRow:
    """A device on its host's page; ``job`` is set only for users who may see the job."""

    device: Device
    is_held: bool
    job: Job | None


def device_words(device: Device) -> str:
    """Return the display name of a device: "GPU 0", "Slot 2", "The processor"."""
    numbered = {"gpu": "GPU", "slot": "Slot"}.get(device.kind)
    return f"{numbered} {device.index}" if numbered else "The processor"


def devices_of(host: Host, user: User | AnonymousUser) -> list[DeviceRow]:
    """Return a host's devices with the jobs that hold them; absent devices last."""
    active = Allocation.objects.filter(device__host=host, released_at=None)
    job_ids = dict(active.values_list("device", "attempt__job"))
    jobs = Job.objects.visible_to(user).in_bulk(set(job_ids.values()))
    # The processor row of a host that has GPUs by now is not listed as missing.
    devices = host.devices.exclude(kind="cpu", is_present=False)
    return [
        DeviceRow(device, device.pk in job_ids, jobs.get(job_ids.get(device.pk, "")))
        for device in devices.order_by("-is_present", "index", "pk")
    ]


def device_cordon(*, device: Device, by: str, reason: str) -> None:
    """Cordon a device: it takes no new jobs; jobs that run on it continue.

    Raises:
        InvalidProblem: the reason is empty or too long.
        ConflictProblem: the device is cordoned already; the earlier reason stays.
    """
    reason = " ".join(reason.split())
    if not reason:
        raise InvalidProblem("reason", "reason is empty; give one, such as “ECC errors”.")
    if len(reason) > LONGEST_REASON:
        raise InvalidProblem(
            "reason", f"reason has {len(reason)} characters; at most {LONGEST_REASON} are kept."
        )
    with transaction.atomic():
        free = Device.objects.filter(pk=device.pk, cordoned_at=None)
        if not free.update(cordoned_at=now(), cordoned_by=by[:80], cordon_reason=reason):
            device.refresh_from_db()
            raise ConflictProblem(
                "cordoned",
                f"{device_words(device)} is cordoned already, by {device.cordoned_by}: "
                f"{device.cordon_reason}. That stays; let it take jobs first to say another.",
            )
        _record(device, "device.cordoned", by, reason)
    device.refresh_from_db()


def device_uncordon(*, device: Device, by: str, seen: str = "") -> None:
    """Uncordon a device; ``seen`` is the version mark of the cordon that the page showed.

    Raises:
        ConflictProblem: the cordon was replaced meanwhile.
    """
    with transaction.atomic():
        current = Device.objects.select_for_update(no_key=True).get(pk=device.pk)
        refuse_stale(
            seen,
            current.cordoned_at,
            f"The cordon of {device_words(device)} was",
            current.cordoned_by,
            current.cordoned_at,
            reader=by,
        )
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
    """Put a host into maintenance or retire it, if no job holds one of its devices.

    Raises:
        ConflictProblem: jobs still hold devices of the host.
    """
    active = Allocation.objects.filter(device__host=host, released_at=None)
    num_jobs = active.values("attempt__job").distinct().count()
    if num_jobs:
        raise ConflictProblem(
            "host_in_use",
            f"{host.name} still runs {num_jobs} job{'' if num_jobs == 1 else 's'}. Drain it and "
            "wait until they have ended, or stop them.",
        )
    host_set_state(host=host, to=to, by=by)
