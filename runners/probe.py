"""Reads this host's inventory and load from /proc, psutil and NVML."""

import contextlib
import functools
import importlib
import importlib.metadata
import os
import platform
import socket
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from runners import cuda, inventory, topology
from runners.config import HostConfig
from runners.facts import GpuFacts, HostFacts
from runners.gangs import own_addresses
from runners.launchers.slurm_facts import scheduler_facts
from runners.machine import machine_id
from runners.messages import GpuLoad
from runners.supervision import procfs

AGENT_VERSION = "0.1.0"
REPORTED_PACKAGES = (
    "torch", "transformers", "torchao", "bitsandbytes", "safetensors", "tokenizers", "accelerate",
    "vllm", "sglang", "xllamacpp", "llama-cpp-python", "deepspeed", "flash-attn", "peft",
)  # fmt: skip
CPU_INFO = Path("/proc/cpuinfo")
OS_RELEASE = Path("/etc/os-release")
_MILLIWATTS = 1000
_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0  # NVML: kinds of memory error, since driver load
Library = types.ModuleType
_PERCENT = 100
# NVML's nvmlClocksThrottleReason* (nvml.h) that make a GPU slower than in its benchmark.
_SLOWED_BY = {
    0x08: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


def host_facts(disk: Path, config: HostConfig | None = None) -> HostFacts:
    """Return the inventory of this host; free space is of the disk at ``disk``."""
    config = config or HostConfig()
    usage = psutil.disk_usage(str(disk))
    with nvml() as library:
        gpus = tuple(gpu_facts(library)) if library else ()
        driver = str(library.nvmlSystemGetDriverVersion()) if library else None
        runs_cuda = cuda.as_text(cuda.cuda_of_driver(library)) if library else None
        links = topology.matrix(library) if library else ()
    return HostFacts(
        hostname=socket.gethostname(),
        os=os_name(OS_RELEASE),
        kernel=platform.release(),
        architecture=platform.machine(),
        cpu_model=cpu_model(CPU_INFO),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        disk_total_bytes=usage.total,
        disk_free_bytes=usage.free,
        boot_id=procfs.boot_id(),
        machine_id=machine_id(),
        user_id=os.getuid(),
        python_version=platform.python_version(),
        agent_version=AGENT_VERSION,
        driver_version=driver,
        driver_problem=None if gpus else driver_problem(),
        cuda_version=runs_cuda,
        torch_cuda_version=cuda.as_text(cuda.cuda_of_torch()),
        packages=package_versions(),
        gpus=gpus,
        topology=links,
        disks=inventory.disks(),
        nics=inventory.nics(),
        addresses=own_addresses(config.address),
        first_gang_port=config.first_gang_port,
        last_gang_port=config.last_gang_port,
        job_memory_bytes=config.job_memory_bytes,
        scheduler=scheduler_facts(config.slurm) if config.slurm else None,
    )


def os_name(path: Path) -> str:
    """Return the name of the Linux distribution."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition("=")
            if name == "PRETTY_NAME":
                return value.strip('"')
    return platform.system()


def cpu_model(path: Path) -> str:
    """Return the processor's model name."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that jobs use."""
    versions = {}
    for name in REPORTED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@contextlib.contextmanager
def nvml() -> Iterator[Library | None]:
    """Yield the initialised NVML binding, or None without binding or GPU."""
    library = _initialised_nvml()
    if library is None:
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()


def _initialised_nvml() -> Library | None:
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
    except library.NVMLError:  # no driver, or a driver without a GPU
        return None
    return library


def gpu_facts(library: Library) -> Iterator[GpuFacts]:
    """Yield the facts of every GPU that NVML lists; unsupported values are None."""
    errors = inventory.xids()
    for index in range(library.nvmlDeviceGetCount()):
        handle = library.nvmlDeviceGetHandleByIndex(index)
        query = functools.partial(topology.query_nvml, library, handle)
        capability = query("nvmlDeviceGetCudaComputeCapability")
        limit = query("nvmlDeviceGetPowerManagementLimit")
        bus = query("nvmlDeviceGetPciInfo")
        bus_id = _text(bus.busId) if bus else None
        yield GpuFacts(
            index=index,
            uuid=_text(library.nvmlDeviceGetUUID(handle)),
            name=_text(library.nvmlDeviceGetName(handle)),
            memory_bytes=library.nvmlDeviceGetMemoryInfo(handle).total,
            compute_capability=".".join(map(str, capability)) if capability else None,
            power_limit_watts=None if limit is None else limit / _MILLIWATTS,
            pci_bus_id=bus_id,
            pcie_width=query("nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_max_width=query("nvmlDeviceGetMaxPcieLinkWidth"),
            numa_node=query("nvmlDeviceGetNumaNodeId"),
            xids=inventory.xids_of(errors, bus_id) if bus_id else None,
            **_health(query),
        )


def _health(query: Callable[..., Any]) -> dict[str, Any]:
    """Return a GPU's memory error counters and partitioning."""
    ecc, rows, mig = (
        query(f"nvmlDeviceGet{name}") for name in ("EccMode", "RemappedRows", "MigMode")
    )
    return {
        "has_ecc": None if ecc is None else bool(ecc[0]),
        "ecc_corrected_errors": query("nvmlDeviceGetTotalEccErrors", _CORRECTED, _VOLATILE),
        "ecc_uncorrected_errors": query("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
        "needs_reset": None if rows is None else bool(rows[2]),
        "is_worn_out": None if rows is None else bool(rows[3]),
        "is_partitioned": None if mig is None else bool(mig[0]),
    }


def driver_problem() -> str | None:
    """Return why NVML fails although a GPU is on the bus, or None."""
    if not inventory.has_nvidia_on_bus():
        return None
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return "the package nvidia-ml-py is not installed"
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return str(error)
    library.nvmlShutdown()
    return "the driver reports no GPU"


def gpu_loads(library: Library) -> Iterator[GpuLoad]:
    """Yield the present state of every GPU; processes without attempt marker are foreign."""
    for index in range(library.nvmlDeviceGetCount()):
        handle = library.nvmlDeviceGetHandleByIndex(index)
        query = functools.partial(topology.query_nvml, library, handle)
        rates, power = query("nvmlDeviceGetUtilizationRates"), query("nvmlDeviceGetPowerUsage")
        processes = query("nvmlDeviceGetComputeRunningProcesses") or []
        yield GpuLoad(
            uuid=_text(library.nvmlDeviceGetUUID(handle)),
            memory_used_bytes=library.nvmlDeviceGetMemoryInfo(handle).used,
            utilization=rates.gpu / _PERCENT if rates else 0.0,
            power_watts=None if power is None else power / _MILLIWATTS,
            temperature_celsius=query("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU),
            foreign_pids=tuple(each.pid for each in processes if not procfs.is_marked(each.pid)),
            slowed_by=_slowed_by(query("nvmlDeviceGetCurrentClocksThrottleReasons")),
        )


def _slowed_by(reasons: int | None) -> tuple[str, ...]:
    """Return a GPU's throttle reasons, without the usual ones: idle and power cap."""
    return tuple(name for bit, name in _SLOWED_BY.items() if (reasons or 0) & bit)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
