"""GPUs that jobs of this release do not use: Apple's through Metal, Intel's through Level Zero.

They are listed, so that a host with one says why its jobs run on the processor.
"""

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.specs.units import MIB
from runners.devices.topology import CommandUnavailableError, read_json, read_text
from runners.shared.facts import GpuFacts

MACOS = "Darwin"
DISPLAYS = ("system_profiler", "SPDisplaysDataType", "-json")
XPU = ("xpu-smi", "discovery", "-j")


def apple(problems: list[str]) -> Iterator[GpuFacts]:
    """Yield the GPU of an Apple silicon Mac; the planner knows how much of its memory Metal wires.

    ``iogpu.wired_limit_mb`` raises that, and is 0 where nobody set it.
    """
    if platform.system() != MACOS:
        return
    try:
        found = read_json(DISPLAYS).get("SPDisplaysDataType") or []
        total = int(read_text(("sysctl", "-n", "hw.memsize")))
    except (CommandUnavailableError, ValueError, AttributeError) as error:
        problems.append(f"the Mac's GPU cannot be read: {error}")
        return
    for index, entry in enumerate(found):
        if entry.get("spdisplays_vendor") != "sppci_vendor_Apple":
            continue
        cores = entry.get("sppci_cores")
        name = str(entry.get("sppci_model") or "Apple GPU")
        family = entry.get("spdisplays_mtlgpufamilysupport")
        digits = str(family or "").removeprefix("spdisplays_metal")
        yield GpuFacts(
            index=index,
            uuid=f"metal-{index}",
            name=f"{name} ({cores} GPU cores)" if cores else name,
            vendor="apple",
            architecture=f"Metal {digits}" if digits.isdecimal() else None,
            memory_bytes=total,
            usable_memory_bytes=_wired_limit(),
            shares_host_memory=True,
            unread=("power limit: not told by macOS", "clocks: not told by macOS"),
        )


def _wired_limit() -> int | None:
    """Return the memory that the GPU may use at once, if somebody set it."""
    try:
        return int(read_text(("sysctl", "-n", "iogpu.wired_limit_mb"))) * MIB or None
    except (CommandUnavailableError, ValueError):  # macOS before 14
        return None


def intel(problems: list[str], devices: Path) -> Iterator[GpuFacts]:
    """Yield Intel's GPUs as xpu-smi lists them; without it, say what is missing.

    ``devices``: sysfs' PCI devices, to tell a host without an Intel GPU from one without xpu-smi.
    """
    cards = sorted(  # those that compute: Arc and Max
        device.name
        for device in devices.glob("*")
        if _word(device / "vendor") == "0x8086"
        and _word(device / "class").startswith(("0x0300", "0x0302", "0x0380"))
        and not device.name.endswith(":00:02.0")  # the graphics unit of a processor
    )
    if not cards:
        return
    named = f"Intel GPU at {', '.join(cards)}"
    try:
        found = read_json(XPU).get("device_list") or []
        details = [read_json((*XPU, "-d", str(each.get("device_id")))) for each in found]
    except (CommandUnavailableError, AttributeError) as error:
        problems.append(f"{named}: {error}; install xpu-smi and the Level Zero driver")
        return
    if not found:
        problems.append(f"{named}: xpu-smi lists none; see that this user is in the group render")
    for index, detail in enumerate(details):
        memory = _whole(detail.get("memory_physical_size_byte"))
        clock = _whole(detail.get("core_clock_rate_mhz"))
        reads = {"memory": memory, "clocks": clock}
        yield GpuFacts(
            index=index,
            uuid=f"intel-{detail.get('uuid') or detail.get('pci_bdf_address') or index}",
            name=str(detail.get("device_name") or "Intel GPU"),
            vendor="intel",
            memory_bytes=memory or 0,
            pci_bus_id=detail.get("pci_bdf_address"),
            max_clock_hertz=float(clock * 1_000_000) if clock else None,
            pcie_max_width=_whole(detail.get("pcie_max_link_width")),
            pcie_max_generation=_whole(detail.get("pcie_generation")),
            unread=tuple(
                f"{name}: xpu-smi prints N/A" for name, value in reads.items() if not value
            ),
        )


def _word(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


def _whole(value: Any) -> int | None:  # noqa: ANN401 - JSON
    """Return a number that xpu-smi prints as one or as text; None for "N/A"."""
    try:
        return int(float(value))
    except (TypeError, ValueError):
        return None
