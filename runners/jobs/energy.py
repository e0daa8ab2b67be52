"""Energy and power of devices, from NVML, amdsmi, RAPL."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from runners.devices import nvidia
from runners.devices.topology import cuda_visible

# ---------------------------------------------------------------------------
# Measures a job's energy in joules from power sensors and energy counters.
# ---------------------------------------------------------------------------


# Reads the energy counters of the host's processors from /sys/class/powercap.
#
# Source: Linux kernel, Documentation/power/powercap/powercap.rst: a zone's ``energy_uj`` counts
# microjoules and wraps at ``max_energy_range_uj``. Of RAPL's zones, packages and memory (dram) are
# counted; cores are part of a package, and psys is the whole platform.


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

    readable: Sequence[Zone]
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


Sample = Callable[[], dict[str, float]]
Figures = tuple[dict[str, float], dict[str, str]]  # measured, notes

GAP_SECONDS = 5.0  # maximum interval between two samples
MAX_WATTS = 1000.0  # of one package: a longer interval may hide a second counter overflow
NAMED_SECONDS = 1.0  # shorter gaps at a job's start and end are not reported
LOCK_TIMEOUT_SECONDS = 2.0  # a hanging driver must not block the job
MICROJOULES = 1e6
WATTS = "_power_watts"
TOTAL, PER_TOKEN = "energy_joules", "energy_joules_per_token"


class Work(NamedTuple):
    """The phases in which this process trained or generated tokens, and their number."""

    phases: Collection[str]
    tokens: float


@dataclass
class Account:
    """One device's energy in one phase, and the measured seconds."""

    joules: float = 0.0
    seconds: float = 0.0


@dataclass
class _Reading:
    at: float
    value: float


@dataclass
class EnergyMeter:
    """Accumulates the energy of a host's whole devices per phase."""

    sample: Sample | None
    zones: Zones
    hosts: int = 1  # number of hosts of the job
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _accounts: dict[tuple[str, str], Account] = field(default_factory=dict)
    _phases: dict[str, float] = field(default_factory=dict)  # name -> seconds
    _seen: dict[str, _Reading] = field(default_factory=dict)
    _phase: str = ""
    _looked_at: float | None = None
    _began: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def has_sensor(self) -> bool:
        """Return whether there is any sensor."""
        return self.sample is not None or bool(self.zones.readable)

    def begin(self, phase: str) -> None:
        """Attribute the energy from now on to a phase."""
        self.read()
        self._phase = phase

    def read(self) -> dict[str, float]:
        """Sample every sensor once; return the GPU figures for the charts."""
        if not self.has_sensor or not self._lock.acquire(timeout=LOCK_TIMEOUT_SECONDS):
            return {}
        try:
            return self._read()
        finally:
            self._lock.release()

    def _read(self) -> dict[str, float]:
        values = self.sample() if self.sample else {}
        now = self.clock()
        if self._looked_at is not None:
            passed = now - self._looked_at
            self._phases[self._phase] = self._phases.get(self._phase, 0.0) + passed
        self._looked_at = now
        for name, watts in values.items():
            if name.endswith(WATTS):
                self._integrate_power(name.removesuffix(WATTS), _Reading(now, watts))
        for zone in self.zones.readable:
            if (count := zone.read()) is not None:
                self._accumulate_energy_counter(zone, _Reading(now, count))
        return values

    def _integrate_power(self, device: str, reading: _Reading) -> None:
        last, self._seen[device] = self._seen.get(device), reading
        seconds = reading.at - last.at if last else 0.0
        account = self._account(device)
        if last is not None and seconds <= GAP_SECONDS:
            account.joules += (last.value + reading.value) / 2 * seconds
            account.seconds += seconds

    def _accumulate_energy_counter(self, zone: Zone, reading: _Reading) -> None:
        last, self._seen[zone.device] = self._seen.get(zone.device), reading
        seconds = reading.at - last.at if last else 0.0
        account = self._account(zone.device)
        is_known = seconds * MAX_WATTS * MICROJOULES < zone.range_microjoules
        if last is not None and is_known:
            passed = (reading.value - last.value) % zone.range_microjoules
            account.joules += passed / MICROJOULES
            account.seconds += seconds

    def _account(self, device: str) -> Account:
        return self._accounts.setdefault((self._phase, device), Account())

    def figures(self, work: Work | None = None) -> Figures:
        """Return the job's joules per device, in total and per token, with notes.

        Joules per token count only the computing devices: GPUs if there are any, else processors.
        """
        self.read()
        accounts = self._accounts_in(None)
        if not accounts:
            silent = "its counters have no value" if self.zones.readable else self.zones.why_none
            power = f"no power of a GPU through NVML, {silent}"
            why = f"not measured: this host has no power sensor: {power}"
            return {}, {TOTAL: why} | ({PER_TOKEN: why} if work else {})
        measured = {f"{name}_{TOTAL}": each.joules for name, each in accounts.items()}
        measured[TOTAL] = sum(measured.values())
        notes = {TOTAL: self._how(accounts, None)}
        if work is not None:
            ratio, notes[PER_TOKEN] = self._per_token(work)
            measured |= {} if ratio is None else {PER_TOKEN: ratio}
        return measured, notes

    def _per_token(self, work: Work) -> tuple[float | None, str]:
        accounts = self._accounts_in(work.phases)
        computing = {
            name: each for name, each in accounts.items() if name.startswith("gpu")
        } or accounts
        if self.hosts > 1:
            return None, f"not measured: {self.hosts} hosts did the work, this one read its own"
        if not computing or work.tokens <= 0:
            return None, "not measured: nothing was read while tokens were made"
        joules = sum(each.joules for each in computing.values())
        phases = ", ".join(sorted(work.phases))
        how = f"{work.tokens:.0f} tokens in {phases}: {self._how(computing, work.phases)}"
        return joules / work.tokens, how

    def _accounts_in(self, phases: Collection[str] | None) -> dict[str, Account]:
        """Return the energy of each measured device in some phases, or in all."""
        accounts: dict[str, Account] = {}
        for (phase, device), each in self._accounts.items():
            if (phases is None or phase in phases) and each.seconds:
                whole = accounts.setdefault(device, Account())
                whole.joules += each.joules
                whole.seconds += each.seconds
        return accounts

    def _how(self, accounts: Mapping[str, Account], phases: Collection[str] | None) -> str:
        zones = {zone.device for zone in self.zones.readable}
        ways = (
            (accounts.keys() - zones, "by NVML, its power as trapezoids between samples"),
            (accounts.keys() & zones, "by RAPL's counters"),
        )
        by = "; ".join(f"{', '.join(sorted(names))} {way}" for names, way in ways if names)
        ended = datetime.now(UTC)
        when = f"{self._began:%Y-%m-%d %H:%M:%S} to {ended:%H:%M:%S} UTC"
        words = f"{by}; whole devices of {socket.gethostname()}, {when}"
        gaps = self._gaps(accounts, phases)
        return f"{words}; not counted: {gaps}" if gaps else words

    def _gaps(self, accounts: Mapping[str, Account], phases: Collection[str] | None) -> str:
        passed = sum(s for name, s in self._phases.items() if phases is None or name in phases)
        gaps = {name: passed - each.seconds for name, each in accounts.items()}
        unmeasured = {device for _, device in self._accounts} - self._accounts_in(phases).keys()
        words = [
            f"{gap:.1f} of {passed:.1f} s of {name}, without a sample"
            for name, gap in sorted(gaps.items())
            if gap > NAMED_SECONDS
        ]
        words += [f"{name}, whose power was never read twice" for name in sorted(unmeasured)]
        return ", ".join(words)


# ---------------------------------------------------------------------------
# GPU figures from inside the job, through NVML.
# ---------------------------------------------------------------------------


PERCENT = 100.0
MILLIWATTS = 1000.0
FIGURES: dict[str, Callable[[Any, object], float]] = {
    "memory_bytes": lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
    "utilization": lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / PERCENT,
    "power_watts": lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / MILLIWATTS,
}


def visible_sample() -> Sample | None:
    """Return a sampler of this process's visible GPUs, or None without NVML or GPU."""
    import pynvml  # not every environment has it

    try:
        pynvml.nvmlInit()
        handles = {
            device.index: device.handle
            for device in visible(nvidia.visible_devices(pynvml, env={}))
        }
    except pynvml.NVMLError:
        return None
    return (lambda: _read(pynvml, handles)) if handles else None


def visible(devices: Sequence[nvidia.NvmlDevice]) -> list[nvidia.NvmlDevice]:
    """Return those that CUDA gives this process."""
    places = cuda_visible([device.cuda for device in devices], os.environ)
    return [devices[place] for place in places]


class GpuPeak:
    """Tracks the peak memory use of one GPU over the samples."""

    def __init__(self, read: Sample | None) -> None:
        self._read = read
        self._bytes = 0
        self.sample = self._sample if read else None

    def _sample(self) -> dict[str, float]:
        values = self._read() if self._read else {}
        used = [int(value) for name, value in values.items() if name.endswith("_memory_bytes")]
        self._bytes = max([self._bytes, *used])
        return values

    def read(self) -> tuple[int, str] | None:
        """Return the peak and how it was measured, or None without GPU."""
        how = "most memory in use on one GPU, read through NVML once a second"
        return (self._bytes, how) if self._bytes else None


def _read(nvml: Any, handles: dict[int, object]) -> dict[str, float]:  # noqa: ANN401 - a module
    values: dict[str, float] = {}
    for index, handle in handles.items():
        for name, figure in FIGURES.items():  # separately: a MIG slice has no utilisation
            with contextlib.suppress(nvml.NVMLError):
                values[f"gpu{index}_{name}"] = figure(nvml, handle)
    return values
