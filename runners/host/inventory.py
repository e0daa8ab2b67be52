"""Reads this host's inventory, load and network: /proc, psutil, vendors' libraries."""

import contextlib
import importlib
import importlib.metadata
import os
import platform
import socket
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from planner.specs.units import GIB
from runners.devices import amd, nvidia, other, topology
from runners.host.schedulers import SCHEDULERS
from runners.jobspec.engines import ENGINE_PACKAGES
from runners.shared import machine
from runners.shared.addresses import own_addresses
from runners.shared.config import HostConfig
from runners.shared.facts import GpuFacts, HostFacts, SchedulerFacts
from runners.shared.machine import machine_id
from runners.shared.messages import GpuLoad
from runners.supervision import procfs

# Reads this host's inventory and load from /proc, psutil and the GPU vendors' libraries.


AGENT_VERSION = "0.1.0"
REPORTED_PACKAGES = (
    "torch", "transformers", "torchao", "bitsandbytes", "safetensors", "tokenizers", "accelerate",
    *ENGINE_PACKAGES, "deepspeed", "flash-attn", "peft",
)  # fmt: skip
CPU_INFO = Path("/proc/cpuinfo")
OS_RELEASE = Path("/etc/os-release")
Library = types.ModuleType  # pynvml or amdsmi, or what has the same functions


def host_facts(disk: Path, config: HostConfig | None = None) -> HostFacts:
    """Return the inventory of this host; free space is of the disk at ``disk``."""
    config = config or HostConfig()
    usage = psutil.disk_usage(str(disk))
    detected = devices()
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
        driver_version=detected.driver_version,
        driver_problem=None if detected.gpus else driver_problem(),
        cuda_version=detected.cuda_version,
        rocm_version=detected.rocm_version,
        torch_cuda_version=topology.as_text(topology.cuda_of_torch()),
        torch_rocm_version=topology.as_text(topology.rocm_of_torch()),
        packages=package_versions(),
        gpus=detected.gpus,
        other_gpus=detected.other_gpus,
        device_problems=detected.problems,
        topology=detected.topology,
        peer_access=detected.peer_access,
        disks=machine.disks(),
        nics=machine.nics(),
        addresses=own_addresses(config.address),
        first_gang_port=config.first_gang_port,
        last_gang_port=config.last_gang_port,
        job_memory_bytes=config.job_memory_bytes,
        scheduler=_scheduler(config),
    )


def _scheduler(config: HostConfig) -> SchedulerFacts | None:
    chosen = config.scheduler
    return SCHEDULERS[chosen.KIND].facts(chosen) if chosen else None


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


class Devices(NamedTuple):
    """The GPUs of a host: those that jobs use, the others, and what does not answer."""

    gpus: tuple[GpuFacts, ...] = ()
    other_gpus: tuple[GpuFacts, ...] = ()
    problems: tuple[str, ...] = ()
    topology: tuple[tuple[str, ...], ...] = ()
    peer_access: tuple[tuple[bool | None, ...], ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    rocm_version: str | None = None


def devices() -> Devices:
    """Return this host's GPUs of every vendor.

    Jobs use those that torch is built for: AMD's with a ROCm build, else NVIDIA's.
    """
    problems: list[str] = []
    others: list[GpuFacts] = [
        *other.apple(problems),
        *other.intel(problems, machine.PCI_DEVICES),
    ]
    has_rocm = topology.rocm_of_torch() is not None
    with nvml() as library:
        by_nvml = _nvidia_devices(library, problems) if library else Devices()
    of_amd: list[str] = []
    with amd_library(of_amd) as amdsmi:
        by_amdsmi = _amd_devices(amdsmi, of_amd) if amdsmi else Devices()
    used, unused = (by_amdsmi, by_nvml) if has_rocm and by_amdsmi.gpus else (by_nvml, by_amdsmi)
    if not by_nvml.gpus:  # else the AMD GPU is the processor's own, as a rule
        problems += of_amd
        if unused.gpus:
            problems.append(
                f"jobs do not use {unused.gpus[0].name}: torch here is not built for ROCm"
            )
    return used._replace(other_gpus=(*unused.gpus, *others), problems=tuple(problems))


def _nvidia_devices(library: Library, problems: list[str]) -> Devices:
    gpus = tuple(nvidia.facts(library, problems))
    named = {gpu.uuid for gpu in gpus}
    handles = [
        each.gpu_handle for each in nvidia.visible_devices(library) if each.cuda.uuid in named
    ]
    if len(handles) < len(gpus):  # one was lost meanwhile: its links are unknown
        handles = []
    has_instances = any(gpu.parent_uuid for gpu in gpus)
    version = topology.query_system(library, "nvmlSystemGetDriverVersion")
    return Devices(
        gpus,
        topology=topology.matrix(library, handles),
        peer_access=() if has_instances else topology.peer_access(library, handles),
        driver_version=nvidia.text(version) if version else None,
        cuda_version=topology.as_text(topology.cuda_of_driver(library)),
    )


def _amd_devices(library: Any, problems: list[str]) -> Devices:  # noqa: ANN401
    return Devices(
        tuple(amd.facts(library, problems)),
        topology=amd.matrix(library),
        peer_access=amd.peer_access(library),
        driver_version=amd.driver_version(library),
        rocm_version=amd.rocm_version(library),
    )


@contextlib.contextmanager
def gpu_library() -> Iterator[Library | None]:
    """Yield the initialised library of the GPUs that jobs use, or None without a GPU.

    It is amdsmi where torch is built for ROCm, else NVML.
    """
    if topology.rocm_of_torch() is not None:
        with amd_library() as library:
            if library is not None and amd.identifiers(library):
                yield library
                return
    with nvml() as library:
        yield library


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


@contextlib.contextmanager
def amd_library(problems: list[str] | None = None) -> Iterator[Any]:
    """Yield the initialised amdsmi, or None; hosts without an AMD GPU do not import it."""
    library = amd.open_library(problems) if machine.has_amd_on_bus() else None
    if library is None:
        yield None
        return
    try:
        yield library
    finally:
        with contextlib.suppress(library.AmdSmiException):
            library.amdsmi_shut_down()


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
    """Yield the facts of every GPU that a library lists; unsupported values are None."""
    yield from amd.facts(library) if amd.is_amdsmi(library) else nvidia.facts(library)


def gpu_loads(library: Library) -> Iterator[GpuLoad]:
    """Yield the present state of every GPU; processes without attempt marker are foreign."""
    yield from amd.loads(library) if amd.is_amdsmi(library) else nvidia.loads(library)


def driver_problem() -> str | None:
    """Return why NVML lists no GPU although one is on the bus, or None; for hosts without one."""
    if not machine.has_nvidia_on_bus():
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


# The devices of this host as its drivers tell them, held against what torch sees.


MIN_SHARE = 0.85  # of the memory: contexts, ECC and firmware take some
MAX_SHARE = 1.01


@dataclass(frozen=True)
class Device:
    """One device now; None: its driver does not tell. ``links`` has one entry per device."""

    index: int
    uuid: str
    name: str
    vendor: str
    memory_bytes: int
    compute_capability: str | None
    architecture: str | None
    links: tuple[str, ...]
    clock_hertz: float | None
    max_clock_hertz: float | None
    power_watts: float | None
    power_limit_watts: float | None
    temperature_celsius: float | None
    slowed_by: tuple[str, ...]
    unread: tuple[str, ...]


class TorchDevice(NamedTuple):
    """One device as torch describes it, from ``torch.cuda.get_device_properties``."""

    name: str
    uuid: str  # with or without "GPU-" before it
    memory_bytes: int


def devices_here() -> list[Device]:
    """Return the devices that jobs use on this host, with their present state."""
    detected = devices()
    with gpu_library() as library:
        if library is None:
            return []
        vendor = amd if amd.is_amdsmi(library) else nvidia
        loads = {load.uuid: load for load in vendor.loads(library)}
        clocks = vendor.clocks(library)
    return [
        Device(
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.name,
            vendor=gpu.vendor,
            memory_bytes=gpu.memory_bytes,
            compute_capability=gpu.compute_capability,
            architecture=gpu.architecture,
            links=links,
            clock_hertz=clocks.get(gpu.uuid),
            max_clock_hertz=gpu.max_clock_hertz,
            power_watts=loads[gpu.uuid].power_watts,
            power_limit_watts=gpu.power_limit_watts,
            temperature_celsius=loads[gpu.uuid].temperature_celsius,
            slowed_by=loads[gpu.uuid].slowed_by,
            unread=gpu.unread,
        )
        for gpu, links in zip(
            detected.gpus, detected.topology or [()] * len(detected.gpus), strict=True
        )
        if gpu.uuid in loads  # a GPU can be lost between the queries
    ]


def device_differences(devices: Sequence[Device], seen: Sequence[TorchDevice]) -> list[str]:
    """Return how torch's devices, in its order, differ from a host's; empty: not at all."""
    differences = []
    if len(seen) != len(devices):
        differences.append(f"torch sees {len(seen)} GPUs of {len(devices)}")
    by_uuid = {_uuid_digits(device.uuid): (place, device) for place, device in enumerate(devices)}
    for number, each in enumerate(seen):
        if _uuid_digits(each.uuid) not in by_uuid:
            differences.append(f"torch's number {number}, {each.name}, has an unknown UUID")
            continue
        place, device = by_uuid[_uuid_digits(each.uuid)]
        if number != place and len(seen) == len(devices):
            differences.append(f"torch counts GPU {device.index} as its number {number}")
        if each.name not in device.name and device.name not in each.name:
            differences.append(f"GPU {device.index}, {device.name}, is {each.name} to torch")
        share = each.memory_bytes / device.memory_bytes if device.memory_bytes else 1.0
        if not MIN_SHARE <= share <= MAX_SHARE:
            differences.append(
                f"torch sees {each.memory_bytes / GIB:.1f} GiB of GPU {device.index}, its driver "
                f"{device.memory_bytes / GIB:.1f}"
            )
    return differences


def _uuid_digits(uuid: str) -> str:
    """Return a UUID's digits; torch leaves out what stands before them.

    HIP's 16 bytes are the digits' letters in ASCII, which torch prints as hexadecimal again.

    Source: clr, rocdevice.cpp.
    """
    digits = uuid.lower().removeprefix("gpu-").removeprefix("mig-").replace("-", "")
    try:
        letters = bytes.fromhex(digits).decode("ascii")
        int(letters, 16)
    except ValueError:
        return digits
    return letters
