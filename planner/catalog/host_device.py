"""The device of a host: as its datasheet states it, and as its measured rates make it.

A GPU in the catalog has the published figures with the memory that its driver reports. Measured
rates replace published ones; any other device, such as a CPU, has its measured rates alone.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from planner.catalog.devices import device_of_driver
from planner.specs.cluster import DeviceSpec


class DriverDevice(NamedTuple):
    """A device as its driver, or the kernel, describes it.

    ``is_partition``: a part of a GPU whose name is that of the whole, such as AMD's CPX.
    ``shares_host_memory``: ``memory_bytes`` is the host's, of which the catalog knows the part.
    """

    name: str
    kind: str  # "gpu" or "cpu"
    memory_bytes: int
    is_partition: bool = False
    shares_host_memory: bool = False


class MeasuredRates(NamedTuple):
    """What a device achieves; None and absent dtypes were not measured.

    ``runtime_memory_bytes`` and ``training_memory_bytes`` are a job process's memory without its
    model, and that of training in addition to tensors. ``source`` and ``as_of`` (an ISO date) say
    who measured them and when.
    """

    memory_bandwidth_bytes_per_second: float
    flops_per_second: Mapping[str, float]
    source: str
    as_of: str | None = None
    host_to_device_bytes_per_second: float | None = None
    op_overhead_seconds: float | None = None
    runtime_memory_bytes: int | None = None
    training_memory_bytes: int | None = None


class HostDevice(NamedTuple):
    """A host's device by its datasheet and with its measured rates; None where there is none."""

    datasheet: DeviceSpec | None
    measured: DeviceSpec | None


def host_device(
    device: DriverDevice, rates: MeasuredRates | None, *, device_id: str = "this-host"
) -> HostDevice:
    """Return a host's device; ``device_id`` names it where the catalog does not know it."""
    datasheet = _datasheet(device)
    return HostDevice(datasheet, rates and _measured(device, datasheet, rates, device_id))


def _datasheet(device: DriverDevice) -> DeviceSpec | None:
    published = device_of_driver(device.name) if device.kind == "gpu" else None
    if published is None or device.is_partition:
        return None
    if device.shares_host_memory or published.kind == "uma":
        return published  # the planner takes the host's share off
    return published.model_copy(update={"memory_bytes": device.memory_bytes})


def _measured(
    device: DriverDevice, datasheet: DeviceSpec | None, rates: MeasuredRates, device_id: str
) -> DeviceSpec:
    base: dict[str, Any] = {
        "id": device_id,
        "name": device.name,
        "kind": device.kind,
        "memory_bytes": device.memory_bytes,
        "peak_flops_per_second": {},
    }
    if datasheet is not None:
        base = datasheet.model_dump(mode="json")
    measured: dict[str, Any] = {
        "memory_bandwidth_bytes_per_second": rates.memory_bandwidth_bytes_per_second,
        "peak_flops_per_second": {**base["peak_flops_per_second"], **rates.flops_per_second},
        "host_to_device_bandwidth_bytes_per_second": rates.host_to_device_bytes_per_second,
        "op_overhead_seconds": rates.op_overhead_seconds,
        "runtime_overhead_bytes": rates.runtime_memory_bytes,
        "training_overhead_bytes": rates.training_memory_bytes,
        "provenance": "measured",
        "source": rates.source,
        "as_of": rates.as_of,
    }
    known = {name: value for name, value in measured.items() if value is not None}
    return DeviceSpec.model_validate({**base, **known})
