"""The energy counters of the host's processors, as Linux shows them below /sys/class/powercap.

Source: Linux kernel, Documentation/power/powercap/powercap.rst: a zone's ``energy_uj`` counts
microjoules and begins anew at ``max_energy_range_uj``. Of RAPL's zones the packages are counted,
and the memory (dram) beside them; cores are part of a package, and psys is the whole platform.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT_VARIABLE = "SLIPWAY_POWERCAP_DIR"  # where a container sees the host's powercap tree
ROOT = Path("/sys/class/powercap")
CONTROL = "intel-rapl"  # of AMD's processors, too
MEMORY = "dram"


class Zone(NamedTuple):
    """One counter: whose energy it counts, where it stands, and where it begins anew."""

    device: str
    counter: Path
    range_microjoules: int

    def read(self) -> int | None:
        """Return the microjoules that it stands at, or None where it gives none."""
        return _number(self.counter)


class Zones(NamedTuple):
    """The counters that can be read, and why there are none where there are not."""

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
    found = [
        Zone(device, path / "energy_uj", limit)
        for path, device in there.items()
        if _number(path / "energy_uj") is not None
        and (limit := _number(path / "max_energy_range_uj"))
    ]
    closed = (
        f"RAPL's counters below {root} cannot be read by the agent's user; let it read each "
        "zone's energy_uj"
    )
    return Zones(found, "" if found else closed)


def _device(path: Path, names: dict[Path, str]) -> str:
    """Return what a zone's counter is called in figures, nothing where it is not counted."""
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
