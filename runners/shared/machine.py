"""This machine: a stable identifier, disks, network interfaces, Xid errors, PCI devices."""

import contextlib
import hashlib
import hmac
import os
import re
import socket
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from runners.shared.facts import DiskFacts, NicFacts

MACHINE_ID = Path("/etc/machine-id")
APPLICATION = b"slipway host"
_FORM = re.compile(r"[0-9a-f]{32}")


def machine_id(path: Path = MACHINE_ID) -> str | None:
    """Return a digest that identifies this machine across reboots, or None.

    It is the same for all users of a machine. Containers often have no machine-id, or their
    image's.

    Source: machine-id(5): hash it with a name of the application, never send it as it is.
    """
    try:
        text = path.read_text("ascii").strip()
    except (OSError, ValueError):
        return None
    if not _FORM.fullmatch(text) or not int(text, 16):
        return None
    return hmac.new(bytes.fromhex(text), APPLICATION, hashlib.sha256).hexdigest()


# Inventory of a host: disks, network interfaces, Xid errors, GPUs on the PCI bus.


KERNEL_LOG = Path("/dev/kmsg")
PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA, AMD = "0x10de", "0x1002"
DISPLAY_CLASSES = ("0x0300", "0x0302")  # a graphics card, a GPU without a screen
MAX_RECORDS = 50_000
RECORD_BYTES = 8192
MAX_DISKS = 16
MAX_NICS = 16
BITS_PER_MEGABIT = 1_000_000
_XID = re.compile(rb"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


def disks() -> tuple[DiskFacts, ...]:
    """Return the file systems on disks, each partition once."""
    import psutil  # a job in an engine's environment lacks it, and needs the machine's id alone

    by_device: dict[str, DiskFacts] = {}
    for part in psutil.disk_partitions(all=False):
        with contextlib.suppress(OSError):
            usage = psutil.disk_usage(part.mountpoint)
            by_device.setdefault(
                part.device,
                DiskFacts(
                    path=part.mountpoint,
                    filesystem=part.fstype,
                    total_bytes=usage.total,
                    free_bytes=usage.free,
                ),
            )
    return tuple(by_device.values())[:MAX_DISKS]


def nics() -> tuple[NicFacts, ...]:
    """Return the interfaces that are up, without loopback."""
    import psutil

    stats, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    return tuple(
        NicFacts(
            name=name,
            addresses=tuple(
                address.address.partition("%")[0]
                for address in addresses.get(name, ())
                if address.family in (socket.AF_INET, socket.AF_INET6)
            ),
            bytes_per_second=stat.speed * BITS_PER_MEGABIT / 8 if stat.speed > 0 else None,
        )
        for name, stat in sorted(stats.items())
        if stat.isup and name != "lo"
    )[:MAX_NICS]


def xids(log: Path = KERNEL_LOG) -> dict[str, tuple[int, ...]] | None:
    """Return the NVIDIA driver's Xid errors since boot by bus id, or None if unreadable.

    The kernel log is readable for root, or for all users with ``kernel.dmesg_restrict=0``.
    """
    found: dict[str, list[int]] = defaultdict(list)
    try:
        for record in _records(log):
            if match := _XID.search(record):
                found[_bus(match[1].decode())].append(int(match[2]))
    except OSError:
        return None
    return {bus: tuple(numbers) for bus, numbers in found.items()}


def xids_of(xids_by_bus: dict[str, tuple[int, ...]] | None, bus_id: str) -> tuple[int, ...] | None:
    """Return the Xid errors of one GPU, or None if the log is unreadable."""
    return None if xids_by_bus is None else xids_by_bus.get(_bus(bus_id), ())


def has_nvidia_on_bus(devices: Path = PCI_DEVICES) -> bool:
    """Return whether an NVIDIA GPU is on the PCI bus, independent of the driver."""
    return _is_on_bus(devices, NVIDIA, DISPLAY_CLASSES)


def has_amd_on_bus(devices: Path = PCI_DEVICES) -> bool:
    """Return whether an AMD GPU is on the PCI bus, independent of the driver.

    Instinct boards are processing accelerators (0x1200) or display controllers (0x0380) there.
    """
    return _is_on_bus(devices, AMD, (*DISPLAY_CLASSES, "0x0380", "0x1200"))


def _is_on_bus(devices: Path, vendor: str, classes: tuple[str, ...]) -> bool:
    return any(
        _word(device / "vendor") == vendor and _word(device / "class").startswith(classes)
        for device in devices.glob("*")
    )


def _records(log: Path) -> Iterator[bytes]:
    """Yield the log's records: one per read from the kernel, or lines of a file."""
    handle = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for _ in range(MAX_RECORDS):
            try:
                record = os.read(handle, RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:  # older records were overwritten while we read
                continue
            if not record:
                return
            yield from record.splitlines()
    finally:
        os.close(handle)


def _bus(text: str) -> str:
    """Return domain, bus and device in a canonical form; the log omits the function."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


def _word(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""
