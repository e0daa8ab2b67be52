"""Reads the energy counters of the host's processors from /sys/class/powercap.

Source: Linux kernel, Documentation/power/powercap/powercap.rst: a zone's ``energy_uj`` counts
microjoules and wraps at ``max_energy_range_uj``. Of RAPL's zones, packages and memory (dram)
are counted; cores are part of a package, and psys is the whole platform.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT_VARIABLE = "SLIPWAY_POWERCAP_DIR"  # path of the host's powercap tree in a container
ROOT = Path("/sys/class/powercap")
CONTROL = "intel-rapl"  # also for AMD processors
MEMORY = "dram"


class Zone(NamedTuple):
    """One energy counter: its device, file and wrap-around value."""

    device: str
    counter: Path
    range_microjoules: int

    def read(self) -> int | None:
        """Return the counter in microjoules, or None if unreadable."""
        return _number(self.counter)


class Zones(NamedTuple):
    """The readable counters, or the reason why there are none."""

    found: Sequence[Zone]
    why_none: str = ""


def zones() -> Zones:
    """Return the counters of this host's processors and their memory."""
    root = Path(os.environ.get(ROOT_VARIABLE) or ROOT)
    names = {path: _text(path / "name") for path in sorted(root.glob(f"{CONTROL}:*"))}
    counted = {path: _device(path, names) for path in names}
    there = {path: device for path, device in counted.items() if device}
    if not there:
        return Zones((), f"no RAPL counter of a package below {root}")
    readable = [
        Zone(device, path / "energy_uj", limit)
        for path, device in there.items()
        if _number(path / "energy_uj") is not None
        and (limit := _number(path / "max_energy_range_uj"))
    ]
    closed = (
        f"RAPL's counters below {root} cannot be read by the agent's user; let it read each "
        "zone's energy_uj"
    )
    return Zones(readable, "" if readable else closed)


def _device(path: Path, names: dict[Path, str]) -> str:
    """Return a zone's device name in figures, or "" if it is not counted."""
    name = names[path]
    if name.startswith("package"):
        return name.replace("-", "_")
    parent = names.get(path.with_name(path.name.rpartition(":")[0]), "")
    if name == MEMORY and parent.startswith("package"):
        return f"{parent}_{MEMORY}".replace("-", "_")
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None
