"""Planner specs of a host: its devices with published or measured figures.

A CPU uses its host's micro-benchmark. A GPU in the catalog uses the published figures with the
memory that the driver reports; any other GPU needs a measurement.
"""

from datetime import UTC, datetime

from planner.catalog.devices import device_of_driver, get_device
from planner.specs.cluster import ClusterSpec, DeviceSpec
from runners.facts import DeviceMeasurement, GpuFacts, HostFacts, Microbench
from webapp.core.problems import ConflictProblem
from webapp.hosts.models import Host
from webapp.hosts.prices import PER_KWH, price_of, priced
from webapp.hosts.virtual import planned_cluster


def cluster_for_host(host: Host) -> ClusterSpec:
    """Return a host as a cluster of one node.

    Raises:
        ConflictProblem: the host has not reported or has not been measured yet.
    """
    if host.kind == "virtual":
        return planned_cluster(host)
    facts = _facts(host)
    bench = _bench(host)
    gpus = _same_gpus(facts)
    is_divided = bool(gpus and gpus[0].parent_uuid)  # a process gets one MIG instance
    return ClusterSpec(
        device=device_for_host(host),
        devices_per_node=1 if is_divided else len(gpus) or 1,
        host_memory_bytes=facts.memory_bytes,
        disk_bandwidth_bytes_per_second=bench.disk_write_bytes_per_second if bench else None,
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
    device = _gpu_device(host, gpus[0]) if gpus else _cpu_device(host, facts)
    return priced(device, host.labels, host.name, len(gpus) or 1)


def _facts(host: Host) -> HostFacts:
    if not host.facts:
        raise ConflictProblem(
            "host_unknown", f"{host.name} has not reported yet; wait for its first heartbeat."
        )
    return HostFacts.model_validate(host.facts)


def _bench(host: Host) -> Microbench | None:
    return Microbench.model_validate(host.microbench) if host.microbench else None


def _same_gpus(facts: HostFacts) -> list[GpuFacts]:
    """Return the GPUs of the same model as the first: a job uses one device model."""
    return [gpu for gpu in facts.gpus if gpu.name == facts.gpus[0].name]


def _measured(host: Host, device: str) -> DeviceMeasurement:
    bench = _bench(host)
    measurements = [item for item in bench.devices if item.device == device] if bench else []
    if not measurements:
        raise ConflictProblem(
            "not_measured",
            f"The speed of {host.name} has not been measured yet; its agent does so at its first "
            "start, in about 15 seconds.",
        )
    return measurements[0]


def _cpu_device(host: Host, facts: HostFacts) -> DeviceSpec:
    """Return the CPU with the memory that a job may use of it."""
    memory = min(facts.memory_bytes, facts.job_memory_bytes or facts.memory_bytes)
    return _from_measurement(
        host, _measured(host, "cpu"), kind="cpu", name=facts.cpu_model, memory=memory
    )


def _gpu_device(host: Host, gpu: GpuFacts) -> DeviceSpec:
    """Return the spec of a host's first GPU, which is the first that torch counts."""
    published = None if gpu.partition or gpu.parent_uuid else device_of_driver(gpu.name)
    if published is not None and gpu.shares_host_memory:  # the planner takes the host's share off
        return published
    if published is not None:
        return published.model_copy(update={"memory_bytes": gpu.memory_bytes})
    measured = _measured(host, "cuda:0")
    return _from_measurement(host, measured, kind="gpu", name=gpu.name, memory=gpu.memory_bytes)


def _from_measurement(
    host: Host, measured: DeviceMeasurement, *, kind: str, name: str, memory: int
) -> DeviceSpec:
    return DeviceSpec.model_validate(
        {
            "id": f"host-{host.slug}",
            "name": name,
            "kind": kind,
            "memory_bytes": memory,
            "memory_bandwidth_bytes_per_second": measured.memory_bandwidth_bytes_per_second,
            "peak_flops_per_second": measured.flops_per_second,
            "op_overhead_seconds": measured.op_overhead_seconds,
            "runtime_overhead_bytes": measured.runtime_memory_bytes,
            "training_overhead_bytes": measured.training_memory_bytes,
            "provenance": "measured",
            "source": f"measured on {host.name}",
            "as_of": measured_on(host),
        }
    )


def measured_on(host: Host) -> str | None:
    """Return the date of the host's micro-benchmark, as ISO date."""
    bench = _bench(host)
    if bench is None:
        return None
    return datetime.fromtimestamp(bench.measured_at_ms / 1000, UTC).date().isoformat()
