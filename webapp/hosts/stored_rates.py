"""The stored rates of a host: its micro-benchmark's, replaced device by device by a proof's."""

import structlog
from django.db import transaction
from pydantic import Field, ValidationError

from runners.facts import DeviceMeasurement, Microbench
from runners.prove.report import ProofRates
from runners.wire import Identifier, TimestampMs
from webapp.core.clock import now_ms
from webapp.hosts.models import Host

log = structlog.get_logger(__name__)


class StoredMeasurement(DeviceMeasurement):
    """The rates of one device.

    ``proof`` is the job whose proof measured them at ``measured_at_ms``; None: they are the
    micro-benchmark's.
    """

    proof: Identifier | None = None
    measured_at_ms: TimestampMs | None = None


class StoredRates(Microbench):
    """The document of a host's rates; ``disk_proof`` is the job whose proof measured the disk."""

    devices: tuple[StoredMeasurement, ...] = Field(max_length=256, fail_fast=True)
    disk_proof: Identifier | None = None


def stored_rates(host: Host) -> StoredRates | None:
    """Return the rates of a host, or None if it has not been measured."""
    return StoredRates.model_validate(host.microbench) if host.microbench else None


def store_proof_rates(host: Host, job_id: str, facts: dict[str, object]) -> None:
    """Replace the rates of the device that a proof measured, and those of the disk.

    A job process's own memory, which a proof does not measure, stays. Without a micro-benchmark,
    or with rates that are none, nothing changes.
    """
    try:
        proven = ProofRates.model_validate(facts.get("rates"))
    except ValidationError as error:
        if facts.get("rates") is not None:
            log.warning("a proof has no valid rates", job=job_id, why=str(error))
        return
    with transaction.atomic():
        locked = Host.objects.select_for_update(no_key=True).only("microbench").get(pk=host.pk)
        stored = stored_rates(locked)
        if stored is None:
            return
        after = _with_proof(stored, proven, job_id).model_dump(mode="json")
        Host.objects.filter(pk=host.pk).update(microbench=after)
    host.microbench = after


def _with_proof(stored: StoredRates, proven: ProofRates, job_id: str) -> StoredRates:
    changes = proven.device.model_dump(exclude_none=True)
    changes |= {"proof": job_id, "measured_at_ms": now_ms()}
    devices = [
        each.model_copy(update=changes) if each.device == proven.device.device else each
        for each in stored.devices
    ]
    disk = proven.disk_write_bytes_per_second
    if disk is None:
        return stored.model_copy(update={"devices": tuple(devices)})
    return stored.model_copy(
        update={
            "devices": tuple(devices),
            "disk_write_bytes_per_second": disk,
            "disk_proof": job_id,
        }
    )
