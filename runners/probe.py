"""What this host is and how busy it is: /proc, psutil, and NVML where there is a GPU."""

import contextlib
import importlib
import importlib.metadata
import os
import platform
import socket
import types
from collections.abc import Iterator
from pathlib import Path

import psutil

from runners.messages import GpuFacts, GpuLoad, HostFacts
from runners.supervision import procfs

AGENT_VERSION = "0.1.0"
REPORTED_PACKAGES = (
    "torch", "transformers", "torchao", "bitsandbytes", "safetensors", "tokenizers", "accelerate",
)  # fmt: skip
CPU_INFO = Path("/proc/cpuinfo")
OS_RELEASE = Path("/etc/os-release")
_MILLIWATTS = 1000
_PERCENT = 100


def host_facts(disk: Path) -> HostFacts:
    """Return the inventory of this host; free space is that of the disk under ``disk``."""
    usage = psutil.disk_usage(str(disk))
    with nvml() as library:
        gpus = tuple(gpu_facts(library)) if library else ()
        driver = str(library.nvmlSystemGetDriverVersion()) if library else None
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
        python_version=platform.python_version(),
        agent_version=AGENT_VERSION,
        driver_version=driver,
        packages=package_versions(),
        gpus=gpus,
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
    """Return what the processor calls itself."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that jobs build on."""
    found = {}
    for name in REPORTED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@contextlib.contextmanager
def nvml() -> Iterator[types.ModuleType | None]:
    """Yield the initialised NVML binding, or None where there is no binding or no GPU."""
    try:
        library = importlib.import_module("pynvml")
        library.nvmlInit()
    except (ImportError, OSError):
        yield None
        return
    except Exception as error:
        if type(error).__name__.startswith("NVMLError"):
            yield None
            return
        raise
    try:
        yield library
    finally:
        library.nvmlShutdown()


def gpu_facts(library: types.ModuleType) -> Iterator[GpuFacts]:
    """Yield every GPU that NVML knows."""
    for index in range(library.nvmlDeviceGetCount()):
        handle = library.nvmlDeviceGetHandleByIndex(index)
        major, minor = library.nvmlDeviceGetCudaComputeCapability(handle)
        limit = library.nvmlDeviceGetPowerManagementLimit(handle)
        yield GpuFacts(
            index=index,
            uuid=_text(library.nvmlDeviceGetUUID(handle)),
            name=_text(library.nvmlDeviceGetName(handle)),
            memory_bytes=library.nvmlDeviceGetMemoryInfo(handle).total,
            compute_capability=f"{major}.{minor}",
            power_limit_watts=limit / _MILLIWATTS,
        )


def gpu_loads(library: types.ModuleType) -> Iterator[GpuLoad]:
    """Yield the present state of every GPU; processes that carry no attempt are foreign."""
    for index in range(library.nvmlDeviceGetCount()):
        handle = library.nvmlDeviceGetHandleByIndex(index)
        pids = [process.pid for process in library.nvmlDeviceGetComputeRunningProcesses(handle)]
        yield GpuLoad(
            uuid=_text(library.nvmlDeviceGetUUID(handle)),
            memory_used_bytes=library.nvmlDeviceGetMemoryInfo(handle).used,
            utilization=library.nvmlDeviceGetUtilizationRates(handle).gpu / _PERCENT,
            power_watts=library.nvmlDeviceGetPowerUsage(handle) / _MILLIWATTS,
            temperature_celsius=library.nvmlDeviceGetTemperature(
                handle, library.NVML_TEMPERATURE_GPU
            ),
            foreign_pids=tuple(pid for pid in pids if not procfs.is_marked(pid)),
        )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
