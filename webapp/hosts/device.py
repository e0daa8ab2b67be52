"""Planner specs of a host or a virtual host, from published or measured figures."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import structlog
from django import forms
from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods
from pydantic import Field, ValidationError

from planner.catalog.devices import (
    DriverDevice,
    MeasuredRates,
    get_device,
    host_device,
    list_devices,
    profile_of_driver,
)
from planner.specs.cluster import ClusterSpec, DeviceSpec
from runners.facts import DeviceMeasurement, GpuFacts, HostFacts, Microbench
from runners.prove.report import ProofRates
from runners.wire import Identifier, TimestampMs
from webapp.accounts.models import Role, Team
from webapp.accounts.roles import current_team, require_role
from webapp.core import units
from webapp.core.clock import now, now_ms
from webapp.core.problems import ConflictProblem
from webapp.hosts.models import Host, HostState
from webapp.hosts.pools import pool_ensure
from webapp.hosts.services import free_slug
from webapp.jobs.models import Event

# The stored rates of a host: its micro-benchmark's, replaced device by device by a proof's.


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


# Prices from a host's labels: dollars per hour, and dollars per kWh of electricity.


HOURLY, PER_KWH = "usd_per_hour", "usd_per_kwh"
MOST_USD = 10_000.0


def price_of(labels: Mapping[str, object], name: str) -> float | None:
    """Return the price in dollars of a label, or None if it is missing or invalid."""
    try:
        price = float(str(labels[name]))
    except (KeyError, ValueError):
        return None
    return price if math.isfinite(price) and 0 <= price <= MOST_USD else None


def wrong_price(labels: Mapping[str, str]) -> str:
    """Return the error message of the first invalid price label, or an empty string."""
    for name in (HOURLY, PER_KWH):
        if name in labels and price_of(labels, name) is None:
            return (
                f"{name}={labels[name]} is no price; write dollars from 0 to {MOST_USD:,.0f} "
                f"as a number, such as {name}=0.30."
            )
    return ""


def priced(device: DeviceSpec, labels: Mapping[str, object], host: str, count: int) -> DeviceSpec:
    """Return a device with its share of its host's hourly price, if a label states one."""
    price = price_of(labels, HOURLY)
    if price is None:
        return device
    source = f"label {HOURLY} of {host}, over its {count} device{'s' if count > 1 else ''}"
    return device.model_copy(update={"price_usd_per_hour": price / count, "price_source": source})


# Virtual hosts: catalog hardware under a team's own name, for planning only.


GIB = 1024**3


def virtual_host_create(
    *, team: Team, name: str, device: str, num_devices: int, memory_bytes: int | None, by: str
) -> Host:
    """Return a new host that can be planned for and runs no jobs."""
    planned = {"device": device, "num_devices": num_devices, "memory_bytes": memory_bytes}
    with transaction.atomic():
        host = Host.objects.create(
            team=team,
            name=name,
            slug=free_slug(name),
            kind="virtual",
            state=HostState.READY,
            pool=pool_ensure(team=team),
            planned=planned,
        )
        Event.objects.create(
            at=now(),
            team_id=team.pk,
            kind="host.planned",
            subject=host.pk,
            to_state=host.state,
            actor=by,
        )
    return host


def planned_cluster(host: Host) -> ClusterSpec:
    """Return the cluster of one node that a virtual host stands for."""
    planned: dict[str, Any] = host.planned
    return ClusterSpec(
        device=planned["device"],
        devices_per_node=planned["num_devices"],
        host_memory_bytes=planned["memory_bytes"],
    )


def planned_words(host: Host) -> str:
    """Return a virtual host in one line: “8 × H100, 80 GiB each”."""  # noqa: RUF002 -- a multiplication sign
    device = get_device(host.planned["device"])
    count, memory = host.planned["num_devices"], units.memory(device.memory_bytes)
    return f"{count} × {device.name or device.id}, {memory} each"  # noqa: RUF001 -- a multiplication sign


def _devices() -> list[tuple[str, str]]:
    return sorted(
        ((device.id, f"{device.name or device.id} · {units.gib(device.memory_bytes)} GiB"))
        for device in list_devices()
    )


class VirtualHostForm(forms.Form):
    """A machine that the team considers buying or renting."""

    name = forms.CharField(max_length=80, help_text="What your team calls it, such as next-rack.")
    device = forms.ChoiceField(choices=_devices)
    num_devices = forms.IntegerField(
        min_value=1, max_value=1024, initial=8, label="Devices in the machine"
    )
    memory_gib = forms.FloatField(
        required=False,
        min_value=1,
        max_value=1_000_000,
        label="Memory of the machine, in GiB",
        help_text="Empty: not known, so plans that need it say so.",
    )


@require_http_methods(["GET", "POST"])
@require_role(Role.OPERATOR)
def virtual_host_new(request: HttpRequest) -> HttpResponse:
    """Show a form for the machine, and create a virtual host from it."""
    form = VirtualHostForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        values = form.cleaned_data
        host = virtual_host_create(
            team=current_team(request),
            name=values["name"],
            device=values["device"],
            num_devices=values["num_devices"],
            memory_bytes=int(values["memory_gib"] * GIB) if values["memory_gib"] else None,
            by=request.user.get_username(),
        )
        messages.success(request, f"{host.name} can be planned for now. Nothing runs on it.")
        return redirect("host-detail", host.slug)
    status = 422 if form.errors else 200
    return render(request, "hosts/virtual.html", {"form": form}, status=status)


def cluster_for_host(host: Host) -> ClusterSpec:
    """Return a host as a cluster of one node.

    Raises:
        ConflictProblem: the host has not reported or has not been measured yet.
    """
    if host.kind == "virtual":
        return planned_cluster(host)
    facts = _facts(host)
    rates = stored_rates(host)
    gpus = _same_gpus(facts)
    is_divided = bool(gpus and gpus[0].parent_uuid)  # a process gets one MIG instance
    return ClusterSpec(
        device=device_for_host(host),
        devices_per_node=1 if is_divided else len(gpus) or 1,
        host_memory_bytes=facts.memory_bytes,
        disk_bandwidth_bytes_per_second=rates.disk_write_bytes_per_second if rates else None,
        electricity_usd_per_kwh=price_of(host.labels, PER_KWH),
    )


def device_for_host(host: Host) -> DeviceSpec:
    """Return the device that jobs on this host use: its GPU if it has one, else its CPU.

    Raises:
        ConflictProblem: the host has not reported or has not been measured yet.
    """
    if host.kind == "virtual":
        return get_device(host.planned["device"])
    facts = _facts(host)
    gpus = _same_gpus(facts)
    described = host_device(
        _driver_device(facts, gpus),
        _rates(host, "cuda:0" if gpus else "cpu"),
        device_id=f"host-{host.slug}",
    )
    device = described.datasheet or described.measured
    if device is None:
        raise ConflictProblem(
            "not_measured",
            f"The speed of {host.name} has not been measured yet; its agent does so at its first "
            "start, in about 15 seconds.",
        )
    return priced(device, host.labels, host.name, len(gpus) or 1)


def _facts(host: Host) -> HostFacts:
    if not host.facts:
        raise ConflictProblem(
            "host_unknown", f"{host.name} has not reported yet; wait for its first heartbeat."
        )
    return HostFacts.model_validate(host.facts)


def _same_gpus(facts: HostFacts) -> list[GpuFacts]:
    """Return the GPUs of the same model as the first: a job uses one device model."""
    return [gpu for gpu in facts.gpus if gpu.name == facts.gpus[0].name]


def _driver_device(facts: HostFacts, gpus: list[GpuFacts]) -> DriverDevice:
    """Return the first GPU, which is the first that torch counts, or the CPU without one.

    A CPU has the memory that a job may use of it. An instance whose name is that of the whole GPU
    is a partition of unknown share.
    """
    if not gpus:
        memory = min(facts.memory_bytes, facts.job_memory_bytes or facts.memory_bytes)
        return DriverDevice(facts.cpu_model, "cpu", memory)
    gpu = gpus[0]
    is_unnamed_instance = bool(gpu.parent_uuid) and profile_of_driver(gpu.name) is None
    return DriverDevice(
        gpu.name,
        "gpu",
        gpu.memory_bytes,
        is_partition=bool(gpu.partition) or is_unnamed_instance,
        shares_host_memory=gpu.shares_host_memory,
    )


def _rates(host: Host, device: str) -> MeasuredRates | None:
    """Return the measured rates of a device as torch names it, or None if there are none."""
    stored = stored_rates(host)
    found = [each for each in stored.devices if each.device == device] if stored else []
    if stored is None or not found:
        return None
    measured = found[0]
    measured_at_ms = measured.measured_at_ms or stored.measured_at_ms
    return MeasuredRates(
        memory_bandwidth_bytes_per_second=measured.memory_bandwidth_bytes_per_second,
        flops_per_second=measured.flops_per_second,
        source=f"measured on {host.name}" + (" by a proof" if measured.proof else ""),
        as_of=datetime.fromtimestamp(measured_at_ms / 1000, UTC).date().isoformat(),
        host_to_device_bytes_per_second=measured.host_to_device_bytes_per_second,
        op_overhead_seconds=measured.op_overhead_seconds,
        runtime_memory_bytes=measured.runtime_memory_bytes,
        training_memory_bytes=measured.training_memory_bytes,
    )
