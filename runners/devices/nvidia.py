"""NVIDIA GPUs and MIG instances, read through NVML.

A value that a GPU or driver does not support is unknown, never an error: laptops, vGPU, GeForce,
and modules that share the host's memory leave out different ones.
"""

import ctypes
import os
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from runners.devices import topology
from runners.devices.topology import CUDA, CudaDevice, cuda_selected, is_order_known
from runners.shared import machine
from runners.shared.facts import GpuFacts
from runners.shared.messages import GpuLoad
from runners.supervision import procfs

MILLIWATTS = 1000
PERCENT = 100
MEGAHERTZ = 1_000_000
MEGABYTES = 1_000_000
_MULTIPROCESSOR, _MEMORY = 1, 2  # nvml.h: NVML_CLOCK_SM, NVML_CLOCK_MEM
_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0  # NVML: kinds of memory error, since driver load
_FABRIC_STATES = (None, "not started", "in progress", "completed")  # NVML_GPU_FABRIC_STATE_*
_COMPUTE_MODES = ("default", "exclusive thread", "prohibited", "exclusive process")
_ARCHITECTURE = "NVML_DEVICE_ARCH_"
# nvmlClocksEventReason* (nvml.h) that make a GPU slower than in its benchmark.
_SLOWED_BY = {
    0x08: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True)
class NvmlDevice:
    """A GPU or MIG instance that jobs can use: its NVML handles and its names."""

    index: int
    handle: Any
    gpu_handle: Any  # of the whole GPU
    cuda: CudaDevice
    parent_uuid: str | None = None


class Ask:
    """Asks NVML about one device, and notes what it does not answer."""

    def __init__(self, library: types.ModuleType, device: NvmlDevice) -> None:
        self._library, self._device = library, device
        self.unread: list[str] = []

    def __call__(self, name: str, *arguments: object, label: str = "") -> Any:  # noqa: ANN401 - NVML is untyped
        """Return an answer about the whole GPU, or None; ``label`` names a value to note."""
        try:
            return getattr(self._library, name)(self._device.gpu_handle, *arguments)
        except AttributeError:
            reason = "not in this nvidia-ml-py"
        except self._library.NVMLError as error:
            reason = str(error) or "Not Supported"
        if label:
            self.unread.append(f"{label}: {reason}")
        return None


def visible_devices(
    library: types.ModuleType,
    env: Mapping[str, str] = os.environ,
    problems: list[str] | None = None,
) -> list[NvmlDevice]:
    """Return the devices of this host that ``CUDA_VISIBLE_DEVICES`` selects, in its order.

    A GPU in MIG mode is its instances. ``problems`` takes why others are left out.
    """
    problems = [] if problems is None else problems
    devices = list(_answering(library, problems))
    if any(each.parent_uuid for each in devices):
        devices = [replace(each, index=index) for index, each in enumerate(devices)]
    cuda = [each.cuda for each in devices]
    places = cuda_selected(cuda, env)
    if len(places) < len(devices):
        problems.append(
            f"{len(devices) - len(places)} of {len(devices)} GPUs are hidden by {CUDA}={env[CUDA]}"
        )
    if CUDA in env and "-" not in env[CUDA] and not is_order_known(cuda, env):
        problems.append(
            f"{CUDA}={env[CUDA]} is read in the order of nvidia-smi, while CUDA counts from the "
            "fastest GPU; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or use UUIDs"
        )
    return [devices[place] for place in places]


def _answering(library: types.ModuleType, problems: list[str]) -> Iterator[NvmlDevice]:
    for index in range(library.nvmlDeviceGetCount()):
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            uuid = text(library.nvmlDeviceGetUUID(handle))
        except library.NVMLError as error:  # such as one that fell off the bus, or no permission
            problems.append(f"GPU {index} does not answer: {error}")
            continue
        name = text(topology.query_nvml(library, handle, "nvmlDeviceGetName") or "NVIDIA GPU")
        mode = topology.query_nvml(library, handle, "nvmlDeviceGetMigMode")
        if not mode or not mode[0]:
            yield NvmlDevice(index, handle, handle, CudaDevice(uuid, index, name=name))
            continue
        instances = list(
            _instances(library, NvmlDevice(index, handle, handle, CudaDevice(uuid, index)))
        )
        if not instances:
            problems.append(
                f"GPU {index}, {name}, is in MIG mode without an instance that this user sees"
            )
        yield from instances


def _instances(library: types.ModuleType, gpu: NvmlDevice) -> Iterator[NvmlDevice]:
    count = topology.query_nvml(library, gpu.handle, "nvmlDeviceGetMaxMigDeviceCount") or 0
    for slot in range(count):
        handle = topology.query_nvml(
            library, gpu.handle, "nvmlDeviceGetMigDeviceHandleByIndex", slot
        )
        uuid = handle and topology.query_nvml(library, handle, "nvmlDeviceGetUUID")
        if not uuid:  # slots need not be filled in order
            continue
        ids = [
            topology.query_nvml(library, handle, f"nvmlDeviceGet{kind}InstanceId")
            for kind in ("Gpu", "Compute")
        ]
        name = text(topology.query_nvml(library, handle, "nvmlDeviceGetName") or "MIG instance")
        path = f"MIG-{gpu.cuda.uuid}/{ids[0]}/{ids[1]}"
        cuda = CudaDevice(text(uuid), gpu.index, is_instance=True, name=name, path=path)
        yield NvmlDevice(gpu.index, handle, gpu.handle, cuda, gpu.cuda.uuid)


def facts(library: types.ModuleType, problems: list[str] | None = None) -> Iterator[GpuFacts]:
    """Yield the facts of every device; unsupported values are None and named in ``unread``."""
    errors = machine.xids()
    for device in visible_devices(library, problems=problems):
        ask = Ask(library, device)
        capability = ask("nvmlDeviceGetCudaComputeCapability", label="compute capability")
        total, _, is_shared = _memory(library, device)
        bus = ask("nvmlDeviceGetPciInfo")
        bus_id = text(bus.busId) if bus else None
        if not total:
            ask.unread.append("memory: the driver does not tell")
        yield GpuFacts(
            index=device.index,
            uuid=device.cuda.uuid,
            name=device.cuda.name,
            memory_bytes=total,
            shares_host_memory=is_shared,
            parent_uuid=device.parent_uuid,
            compute_capability=".".join(map(str, capability)) if capability else None,
            architecture=_architecture(library, ask("nvmlDeviceGetArchitecture")),
            pci_bus_id=bus_id,
            numa_node=ask("nvmlDeviceGetNumaNodeId"),
            xids=machine.xids_of(errors, bus_id) if bus_id else None,
            fabric_state=_fabric_state(library, ask),
            compute_mode=_compute_mode(ask("nvmlDeviceGetComputeMode")),
            is_persistent=_switch(ask("nvmlDeviceGetPersistenceMode")),
            **_power(ask),
            **_links(library, device, ask),
            **_health(ask),
            unread=tuple(ask.unread),
        )


def _power(ask: Ask) -> dict[str, Any]:
    limit = ask("nvmlDeviceGetPowerManagementLimit", label="power limit")
    usual = ask("nvmlDeviceGetPowerManagementDefaultLimit")
    clock = ask("nvmlDeviceGetMaxClockInfo", _MULTIPROCESSOR, label="clocks")
    memory_clock = ask("nvmlDeviceGetMaxClockInfo", _MEMORY)
    return {
        "power_limit_watts": None if limit is None else limit / MILLIWATTS,
        "default_power_limit_watts": None if usual is None else usual / MILLIWATTS,
        "max_clock_hertz": None if clock is None else float(clock * MEGAHERTZ),
        "max_memory_clock_hertz": None
        if memory_clock is None
        else float(memory_clock * MEGAHERTZ),
    }


def _links(library: types.ModuleType, device: NvmlDevice, ask: Ask) -> dict[str, Any]:
    count = topology.num_links(library, device.gpu_handle)
    return {
        "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth", label="PCIe link"),
        "pcie_max_width": ask("nvmlDeviceGetMaxPcieLinkWidth"),
        "pcie_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        "pcie_max_generation": ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        "num_links": count,
        "link_bytes_per_second": _link_speed(library, ask) if count else None,
    }


def _link_speed(library: types.ModuleType, ask: Ask) -> float | None:
    """Return the bandwidth of one NVLink; NVML's field is in MB/s."""
    field = getattr(library, "NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON", None)
    values = ask("nvmlDeviceGetFieldValues", [field]) if field is not None else None
    if not values or values[0].nvmlReturn:
        return None
    return float(values[0].value.uiVal * MEGABYTES) or None


def _fabric_state(library: types.ModuleType, ask: Ask) -> str | None:
    """Return how far a GPU is registered with its NVSwitches; CUDA fails until it is.

    Source: NVIDIA, Fabric Manager user guide; nvml.h, nvmlGpuFabricState_t.
    """
    form = getattr(library, "c_nvmlGpuFabricInfo_v2_t", None)
    if form is None:
        return None
    info = form()
    ask("nvmlDeviceGetGpuFabricInfoV", ctypes.byref(info))
    return _FABRIC_STATES[info.state] if info.state < len(_FABRIC_STATES) else None


def _health(ask: Ask) -> dict[str, Any]:
    """Return a GPU's memory error counters and partitioning; GeForce has none of them."""
    ecc, rows, mig = (
        ask(f"nvmlDeviceGet{name}") for name in ("EccMode", "RemappedRows", "MigMode")
    )
    return {
        "has_ecc": None if ecc is None else bool(ecc[0]),
        "ecc_corrected_errors": ask("nvmlDeviceGetTotalEccErrors", _CORRECTED, _VOLATILE),
        "ecc_uncorrected_errors": ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
        "needs_reset": None if rows is None else bool(rows[2]),
        "is_worn_out": None if rows is None else bool(rows[3]),
        "is_partitioned": None if mig is None else bool(mig[0]),
    }


def _memory(library: types.ModuleType, device: NvmlDevice) -> tuple[int, int, bool]:
    """Return total and used bytes of a device, and whether they are the host's.

    NVML supports no memory query on modules whose GPU shares the host's memory.

    Source: NVIDIA, DGX Spark user guide, "Known issues".
    """
    try:
        info = library.nvmlDeviceGetMemoryInfo(device.handle)
    except getattr(library, "NVMLError_NotSupported", library.NVMLError):
        import psutil  # engines' environments need not have it

        host = psutil.virtual_memory()
        return host.total, host.total - host.available, True
    except library.NVMLError:
        return 0, 0, False
    return info.total, info.used, False


def loads(library: types.ModuleType) -> Iterator[GpuLoad]:
    """Yield the present state of every device; processes without attempt marker are foreign.

    Utilisation and power of a GPU in MIG mode cannot be divided among its instances.
    """
    for device in visible_devices(library):
        ask = Ask(library, device)
        is_whole_gpu = device.parent_uuid is None
        rates = ask("nvmlDeviceGetUtilizationRates") if is_whole_gpu else None
        power = ask("nvmlDeviceGetPowerUsage") if is_whole_gpu else None
        processes = (
            topology.query_nvml(library, device.handle, "nvmlDeviceGetComputeRunningProcesses")
            or []
        )
        yield GpuLoad(
            uuid=device.cuda.uuid,
            memory_used_bytes=_memory(library, device)[1],
            utilization=rates.gpu / PERCENT if rates else 0.0,
            power_watts=None if power is None else power / MILLIWATTS,
            temperature_celsius=ask(
                "nvmlDeviceGetTemperature", getattr(library, "NVML_TEMPERATURE_GPU", 0)
            ),
            foreign_pids=tuple(each.pid for each in processes if not procfs.is_marked(each.pid)),
            slowed_by=slowed_by(_reasons(ask)),
        )


def clocks(library: types.ModuleType) -> dict[str, float]:
    """Return the present multiprocessor clock of the devices that tell it, by UUID, in hertz."""
    found = {
        device.cuda.uuid: Ask(library, device)("nvmlDeviceGetClockInfo", _MULTIPROCESSOR)
        for device in visible_devices(library)
    }
    return {uuid: float(clock * MEGAHERTZ) for uuid, clock in found.items() if clock is not None}


def _reasons(ask: Ask) -> int | None:
    """Return why the clocks are held down; drivers before R535 know the older name alone."""
    reasons: int | None = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    return reasons


def slowed_by(reasons: int | None) -> tuple[str, ...]:
    """Return a GPU's throttle reasons, without the usual ones: idle and power cap."""
    return tuple(name for bit, name in _SLOWED_BY.items() if (reasons or 0) & bit)


def _architecture(library: types.ModuleType, value: int | None) -> str | None:
    for name in dir(library) if value is not None else ():
        if name.startswith(_ARCHITECTURE) and getattr(library, name) == value:
            return name.removeprefix(_ARCHITECTURE).title()
    return None


def _compute_mode(value: int | None) -> str | None:
    return _COMPUTE_MODES[value] if value is not None and value < len(_COMPUTE_MODES) else None


def _switch(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def text(value: bytes | str) -> str:
    """Return NVML's text; old bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value
