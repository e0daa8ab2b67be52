"""Joules of a job: powers and counters that are read as it runs, added up, gaps left out.

A power is integrated as trapezoids between its samples; a counter by its differences. What lies
between two looks that are too far apart is not counted, and said to be missing.
"""

import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from runners.jobs.powercap import Zone, Zones

Sample = Callable[[], dict[str, float]]
Figures = tuple[dict[str, float], dict[str, str]]  # measured, notes

GAP_SECONDS = 5.0  # a power is not known for longer than this after its last sample
MOST_WATTS = 1000.0  # of one package: a counter that may have begun anew twice says nothing
NAMED_SECONDS = 1.0  # shorter ones at a job's two ends are none that is worth a word
LOOK_SECONDS = 2.0  # a driver that hangs holds no job back
MICROJOULES = 1e6
WATTS = "_power_watts"
TOTAL, PER_TOKEN = "energy_joules", "energy_joules_per_token"


class Work(NamedTuple):
    """The phases in which tokens were trained or written by this process, and how many."""

    phases: Collection[str]
    tokens: float


@dataclass
class Account:
    """What one device drew in one phase, and for how many of its seconds that is known."""

    joules: float = 0.0
    seconds: float = 0.0


@dataclass
class _Seen:
    """The last look at one sensor."""

    at: float
    value: float


@dataclass
class EnergyMeter:
    """Adds up what a host's devices draw, phase by phase; whole devices, whoever used them."""

    sample: Sample | None
    zones: Zones
    hosts: int = 1  # that do the job together
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _accounts: dict[tuple[str, str], Account] = field(default_factory=dict)
    _phases: dict[str, float] = field(default_factory=dict)  # name -> seconds
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _phase: str = ""
    _looked_at: float | None = None
    _began: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def has_sensor(self) -> bool:
        """Return whether there is anything to look at."""
        return self.sample is not None or bool(self.zones.found)

    def begin(self, phase: str) -> None:
        """Put what is drawn from now on down to a phase."""
        self.look()
        self._phase = phase

    def look(self) -> dict[str, float]:
        """Read every sensor once; return the figures of the GPUs for the charts."""
        if not self.has_sensor or not self._lock.acquire(timeout=LOOK_SECONDS):
            return {}
        try:
            return self._look()
        finally:
            self._lock.release()

    def _look(self) -> dict[str, float]:
        values = self.sample() if self.sample else {}
        now = self.clock()
        if self._looked_at is not None:
            passed = now - self._looked_at
            self._phases[self._phase] = self._phases.get(self._phase, 0.0) + passed
        self._looked_at = now
        for name, watts in values.items():
            if name.endswith(WATTS):
                self._take_power(name.removesuffix(WATTS), _Seen(now, watts))
        for zone in self.zones.found:
            if (count := zone.read()) is not None:
                self._take_count(zone, _Seen(now, count))
        return values

    def _take_power(self, device: str, seen: _Seen) -> None:
        last, self._seen[device] = self._seen.get(device), seen
        seconds = seen.at - last.at if last else 0.0
        account = self._account(device)
        if last is not None and seconds <= GAP_SECONDS:
            account.joules += (last.value + seen.value) / 2 * seconds
            account.seconds += seconds

    def _take_count(self, zone: Zone, seen: _Seen) -> None:
        last, self._seen[zone.device] = self._seen.get(zone.device), seen
        seconds = seen.at - last.at if last else 0.0
        account = self._account(zone.device)
        is_known = seconds * MOST_WATTS * MICROJOULES < zone.range_microjoules
        if last is not None and is_known:
            passed = (seen.value - last.value) % zone.range_microjoules
            account.joules += passed / MICROJOULES
            account.seconds += seconds

    def _account(self, device: str) -> Account:
        return self._accounts.setdefault((self._phase, device), Account())

    def figures(self, work: Work | None = None) -> Figures:
        """Return joules of the job by device and in sum, those per token, and how they came.

        Per token count the devices that compute: GPUs where there are any, else processors.
        """
        self.look()
        told = self._told(None)
        if not told:
            why = f"not measured: this host has no power sensor: {self._why_none()}"
            return {}, {TOTAL: why} | ({PER_TOKEN: why} if work else {})
        measured = {f"{name}_{TOTAL}": each.joules for name, each in told.items()}
        measured[TOTAL] = sum(measured.values())
        notes = {TOTAL: self._how(told, None)}
        if work is not None:
            ratio, notes[PER_TOKEN] = self._per_token(work)
            measured |= {} if ratio is None else {PER_TOKEN: ratio}
        return measured, notes

    def _per_token(self, work: Work) -> tuple[float | None, str]:
        told = self._told(work.phases)
        computing = {name: each for name, each in told.items() if name.startswith("gpu")} or told
        if self.hosts > 1:
            return None, f"not measured: {self.hosts} hosts did the work, this one read its own"
        if not computing or work.tokens <= 0:
            return None, "not measured: nothing was read while tokens were made"
        joules = sum(each.joules for each in computing.values())
        phases = ", ".join(sorted(work.phases))
        how = f"{work.tokens:.0f} tokens in {phases}: {self._how(computing, work.phases)}"
        return joules / work.tokens, how

    def _told(self, phases: Collection[str] | None) -> dict[str, Account]:
        """Return what each device that told anything drew in some phases, or in all."""
        found: dict[str, Account] = {}
        for (phase, device), each in self._accounts.items():
            if (phases is None or phase in phases) and each.seconds:
                whole = found.setdefault(device, Account())
                whole.joules += each.joules
                whole.seconds += each.seconds
        return found

    def _how(self, told: Mapping[str, Account], phases: Collection[str] | None) -> str:
        zones = {zone.device for zone in self.zones.found}
        ways = (
            (told.keys() - zones, "by NVML, its power as trapezoids between samples"),
            (told.keys() & zones, "by RAPL's counters"),
        )
        by = "; ".join(f"{', '.join(sorted(names))} {way}" for names, way in ways if names)
        ended = datetime.now(UTC)
        when = f"{self._began:%Y-%m-%d %H:%M:%S} to {ended:%H:%M:%S} UTC"
        words = f"{by}; whole devices of {socket.gethostname()}, {when}"
        gaps = self._gaps(told, phases)
        return f"{words}; not counted: {gaps}" if gaps else words

    def _gaps(self, told: Mapping[str, Account], phases: Collection[str] | None) -> str:
        passed = sum(s for name, s in self._phases.items() if phases is None or name in phases)
        gaps = {name: passed - each.seconds for name, each in told.items()}
        lost = {device for _, device in self._accounts} - self._told(phases).keys()
        words = [
            f"{gap:.1f} of {passed:.1f} s of {name}, without a sample"
            for name, gap in sorted(gaps.items())
            if gap > NAMED_SECONDS
        ]
        words += [f"{name}, whose power was never read twice" for name in sorted(lost)]
        return ", ".join(words)

    def _why_none(self) -> str:
        silent = "its counters told nothing" if self.zones.found else self.zones.why_none
        return f"no power of a GPU through NVML, {silent}"
