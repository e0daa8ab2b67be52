"""Planner specs of a host: its devices with published or measured figures.

A GPU in the catalog is planned with its published figures, and any other device with those that
the micro-benchmark or a proof measured on its host.
"""

from datetime import UTC, datetime

from planner.catalog.devices import get_device
from planner.catalog.host_device import DriverDevice, MeasuredRates, host_device
from planner.catalog.mig import profile_of_driver
from planner.specs.cluster import ClusterSpec, DeviceSpec
from runners.facts import GpuFacts, HostFacts
from webapp.core.problems import ConflictProblem
from webapp.hosts.models import Host
from webapp.hosts.prices import PER_KWH, price_of, priced
from webapp.hosts.stored_rates import stored_rates
from webapp.hosts.virtual import planned_cluster


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
