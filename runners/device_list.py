"""The devices of this host as its drivers tell them, held against what torch sees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runners import probe
from runners.devices import amd, nvidia

GIB = 2**30
LEAST_SHARE = 0.85  # of the memory: contexts, ECC and firmware take some
MOST_SHARE = 1.01


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


class Seen(NamedTuple):
    """One device as torch describes it, from ``torch.cuda.get_device_properties``."""

    name: str
    uuid: str  # with or without "GPU-" before it
    memory_bytes: int


def devices_here() -> list[Device]:
    """Return the devices that jobs use on this host, with their present state."""
    found = probe.devices()
    with probe.gpu_library() as library:
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
        for gpu, links in zip(found.gpus, found.topology or [()] * len(found.gpus), strict=True)
        if gpu.uuid in loads  # a GPU can be lost between the queries
    ]


def comparison(devices: Sequence[Device], seen: Sequence[Seen]) -> list[str]:
    """Return how torch's devices, in its order, differ from a host's; empty: not at all."""
    differences = []
    if len(seen) != len(devices):
        differences.append(f"torch sees {len(seen)} GPUs of {len(devices)}")
    by_uuid = {_bare(device.uuid): (place, device) for place, device in enumerate(devices)}
    for number, each in enumerate(seen):
        if _bare(each.uuid) not in by_uuid:
            differences.append(f"torch's number {number}, {each.name}, has an unknown UUID")
            continue
        place, device = by_uuid[_bare(each.uuid)]
        if number != place and len(seen) == len(devices):
            differences.append(f"torch counts GPU {device.index} as its number {number}")
        if each.name not in device.name and device.name not in each.name:
            differences.append(f"GPU {device.index}, {device.name}, is {each.name} to torch")
        share = each.memory_bytes / device.memory_bytes if device.memory_bytes else 1.0
        if not LEAST_SHARE <= share <= MOST_SHARE:
            differences.append(
                f"torch sees {each.memory_bytes / GIB:.1f} GiB of GPU {device.index}, its driver "
                f"{device.memory_bytes / GIB:.1f}"
            )
    return differences


def _bare(uuid: str) -> str:
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
