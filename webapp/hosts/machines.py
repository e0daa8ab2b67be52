"""Machines behind hosts, and a host as the planner sees it."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog
from django.contrib.auth.models import AnonymousUser, User
from django.db import transaction
from django.db.models import Exists, OuterRef, Q
from pydantic import Field, ValidationError

from planner.catalog.devices import (
    DriverDevice,
    MeasuredRates,
    get_device,
    host_device,
    profile_of_driver,
)
from planner.specs.cluster import ClusterSpec, DeviceSpec
from runners.jobspec.base import Identifier, TimestampMs
from runners.prove.report import ValidationRates
from runners.shared.facts import DeviceMeasurement, GpuFacts, HostFacts, Microbench
from runners.shared.messages import first_fault
from webapp.accounts.models import Team
from webapp.audit.models import event_record
from webapp.core import display
from webapp.core.clock import now, now_ms
from webapp.core.problems import ConflictProblem
from webapp.hosts.models import Device, Distinction, Host, HostState, Pool
from webapp.hosts.pools import is_team_host, pool_ensure
from webapp.hosts.services import Contact, contact_of, free_slug

# ---------------------------------------------------------------------------
# Hosts on one machine: their shared devices, and operators' statements about them.
# ---------------------------------------------------------------------------


# Devices that are the same hardware seen by several hosts, one agent per team.
#
# GPUs are the same if their uuids are equal. Processors are the same if their hosts report the
# same machine id and their agents run as different Unix users: hosts that one user starts on one
# machine are meant to run in parallel, as in a trial. An operator can mark two hosts as different
# machines. Device ids are ULIDs: the lower one was reported first.


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
    rows = Device.objects.filter(hardware__in=hardware).select_related("host__pool")
    for device in rows.defer(*UNREAD).order_by("pk"):
        by_hardware[device.hardware].append(device)
    shared = [alike for alike in by_hardware.values() if len(alike) > 1]
    # Pairs that an operator marked as different machines.
    hosts = {device.host_id for alike in shared for device in alike}
    words = Distinction.objects.filter(Q(host__in=hosts), Q(other__in=hosts))
    apart = {frozenset(pair) for pair in words.values_list("host", "other")}
    by_device = {
        own.pk: [
            other for other in alike if is_same(own, other) and _pair(own, other) not in apart
        ]
        for alike in shared
        for own in alike
    }
    return {pk: twins for pk, twins in by_device.items() if twins}


def holders_among(twins: Twins) -> Twins:
    """Return the twins whose jobs keep a device from its own host's jobs.

    A host of another team could claim the uuid of a GPU that it does not have. Unless both report
    the same machine id, the host that reported the GPU first never waits for the later one.
    """
    devices = {device.pk: device for others in twins.values() for device in others}
    hosts = {device.host_id for device in devices.values()}
    # Without KT(), which is the text "null" for a host on SQLite that reports no machine id.
    machines = dict(Host.objects.filter(pk__in=hosts).values_list("pk", "facts__machine_id"))
    return {
        pk: [other for other in others if not _is_later_claim(other, devices[pk], machines)]
        for pk, others in twins.items()
    }


def _is_later_claim(other: Device, own: Device, machines: Mapping[str, str | None]) -> bool:
    """Return whether another team's device claims a GPU that this one had reported before."""
    if other.kind != "gpu" or other.host.team_id == own.host.team_id or other.pk < own.pk:
        return False
    machine = machines.get(own.host_id)
    return not machine or machine != machines.get(other.host_id)


def is_same(one: Device, other: Device) -> bool:
    """Return whether two hosts' devices are one that both must not use at once."""
    if one.host_id == other.host_id or one.hardware != other.hardware or not one.hardware:
        return False
    return one.kind == "gpu" or one.unix_user != other.unix_user


def _pair(device: Device, other: Device) -> frozenset[str]:
    return frozenset({device.host_id, other.host_id})


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
    distinctions = Distinction.objects.filter(Q(host=host) | Q(other=host))
    statements = {(row.host_id, row.other_id): row for row in distinctions}
    return [
        _shared_machine(host, other, user, statements)
        for other in rows.distinct().select_related("team")
    ]


def _shared_machine(
    host: Host,
    other: Host,
    user: User | AnonymousUser,
    statements: dict[tuple[str, str], Distinction],
) -> SharedMachine:
    is_known = is_team_host(user, other)
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
        twin = next(d for d in other.devices.all() if d.hardware == gpus[0].hardware)
        yield f"it has the same GPU {named}: {_order_of_use(gpus[0], twin)}"
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


def _order_of_use(own: Device, other: Device) -> str:
    """Return which jobs wait for which, of two hosts that report the same GPU."""
    machines = {each.host_id: each.host.facts.get("machine_id") for each in (own, other)}
    if _is_later_claim(other, own, machines):
        return (
            "this host reported it first, and the other one names another machine or none, so "
            "that jobs here do not wait for jobs there"
        )
    if _is_later_claim(own, other, machines):
        return (
            "the other host reported it first, and both do not name the same machine, so that "
            "jobs here wait for jobs there, but not the other way round"
        )
    return "one job at a time uses the GPU, over all teams"


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
    event_record(
        host, kind, by, detail={"other": other.name if other else "a host of another team"}
    )


# ---------------------------------------------------------------------------
# Planner specs of a host or a virtual host, from published or measured figures.
# ---------------------------------------------------------------------------


# The stored rates of a host: its micro-benchmark's, replaced device by device by a validation's.


log = structlog.get_logger(__name__)


class StoredMeasurement(DeviceMeasurement):
    """The rates of one device.

    ``proof`` is the job whose validation measured them at ``measured_at_ms``; None: they are the
    micro-benchmark's.
    """

    proof: Identifier | None = None
    measured_at_ms: TimestampMs | None = None


class StoredRates(Microbench):
    """A host's rates as stored; ``disk_proof`` is the job whose validation measured the disk."""

    devices: tuple[StoredMeasurement, ...] = Field(max_length=256, fail_fast=True)
    disk_proof: Identifier | None = None


def stored_rates(host: Host) -> StoredRates | None:
    """Return the rates of a host, or None if it has not been measured."""
    return StoredRates.model_validate(host.microbench) if host.microbench else None


def store_validation_rates(host: Host, job_id: str, facts: dict[str, object]) -> None:
    """Replace the rates of the device that a validation measured, and those of the disk.

    A job process's own memory, which a validation does not measure, stays. Without a
    micro-benchmark, or with rates that are none, nothing changes.
    """
    try:
        proven = ValidationRates.model_validate(facts.get("rates"))
    except ValidationError as error:
        if facts.get("rates") is not None:
            log.warning("a validation has no valid rates", job=job_id, why=str(error))
        return
    with transaction.atomic():
        locked = Host.objects.select_for_update(no_key=True).only("microbench").get(pk=host.pk)
        stored = stored_rates(locked)
        if stored is None:
            return
        after = _with_validation(stored, proven, job_id).model_dump(mode="json")
        Host.objects.filter(pk=host.pk).update(microbench=after)
    host.microbench = after


def _with_validation(stored: StoredRates, proven: ValidationRates, job_id: str) -> StoredRates:
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
                f"{name}={labels[name]} is not a valid price. Write dollars from 0 to "
                f"{MOST_USD:,.0f} as a number, such as {name}=0.30."
            )
    return ""


def with_price(
    device: DeviceSpec, labels: Mapping[str, object], host: str, count: int
) -> DeviceSpec:
    """Return a device with its share of its host's hourly price, if a label states one."""
    price = price_of(labels, HOURLY)
    if price is None:
        return device
    source = f"label {HOURLY} of {host}, over its {count} device{'s' if count > 1 else ''}"
    return device.model_copy(update={"price_usd_per_hour": price / count, "price_source": source})


# Virtual hosts: catalog hardware under a team's own name, for planning only.


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
        event_record(host, "host.planned", by, to_state=host.state)
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
    count, memory = host.planned["num_devices"], display.memory(device.memory_bytes)
    return f"{count} × {device.name or device.id}, {memory} each"  # noqa: RUF001 -- a multiplication sign


def cluster_for_host(host: Host) -> ClusterSpec:
    """Return a host as a cluster of one node.

    Raises:
        ConflictProblem: the host has not reported or been measured yet, or reported nonsense.
    """
    if host.kind == "virtual":
        return planned_cluster(host)
    try:
        return _reported_cluster(host)
    except ValidationError as error:
        raise _unusable(host, error) from error


def _unusable(host: Host, error: ValidationError) -> ConflictProblem:
    """Return the problem of a host whose figures no machine can have, or another version wrote."""
    return ConflictProblem(
        "host_unknown",
        f"{host.name} reported figures that plans cannot use ({first_fault(error)}). Correct "
        "them on the host, start its agent again, then choose Check again on the host's page.",
    )


def _reported_cluster(host: Host) -> ClusterSpec:
    facts = _facts(host)
    rates = stored_rates(host)
    gpus = _same_gpus(facts)
    is_divided = bool(gpus and gpus[0].parent_uuid)  # a process gets one MIG instance
    return ClusterSpec(
        device=_reported_device(host),
        devices_per_node=1 if is_divided else len(gpus) or 1,
        host_memory_bytes=facts.memory_bytes,
        disk_bandwidth_bytes_per_second=rates.disk_write_bytes_per_second if rates else None,
        electricity_usd_per_kwh=price_of(host.labels, PER_KWH),
    )


def device_for_host(host: Host) -> DeviceSpec:
    """Return the device that jobs on this host use: its GPU if it has one, else its CPU.

    Raises:
        ConflictProblem: the host has not reported or been measured yet, or reported nonsense.
    """
    if host.kind == "virtual":
        return get_device(host.planned["device"])
    try:
        return _reported_device(host)
    except ValidationError as error:
        raise _unusable(host, error) from error


def _reported_device(host: Host) -> DeviceSpec:
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
            f"The speed of {host.name} has not been measured yet; its agent measures it at the "
            "first start, in about 15 seconds.",
        )
    return with_price(device, host.labels, host.name, len(gpus) or 1)


def _facts(host: Host) -> HostFacts:
    if not host.facts:
        raise ConflictProblem(
            "host_unknown",
            f"{host.name} has not reported its hardware yet. Wait for its first heartbeat.",
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
        source=f"measured on {host.name}" + (" by a validation run" if measured.proof else ""),
        as_of=datetime.fromtimestamp(measured_at_ms / 1000, UTC).date().isoformat(),
        host_to_device_bytes_per_second=measured.host_to_device_bytes_per_second,
        op_overhead_seconds=measured.op_overhead_seconds,
        runtime_memory_bytes=measured.runtime_memory_bytes,
        training_memory_bytes=measured.training_memory_bytes,
    )
