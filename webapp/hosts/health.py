"""Hardware health of a host: ok, warn or bad, with its reasons.

Health is shown to people only: it moves no job and closes no host.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from webapp.core import units
from webapp.hosts.models import Host

OK, WARN, BAD = "ok", "warn", "bad"
# Source: NVIDIA, XID Errors: the ones that indicate a hardware fault.
FATAL_XIDS = {
    48: "a memory error that could not be corrected",
    61: "its microcontroller stopped",
    62: "its microcontroller stopped",
    64: "a failed replacement of a memory row",
    74: "an NVLink error",
    79: "it fell off the bus",
    95: "a memory error that was not contained",
    119: "its system processor does not answer",
    120: "its system processor failed",
}
LOW_DISK_SHARE = 0.05
LOW_DISK_BYTES = 2 * 1024**3
MAX_CLOCK_OFFSET_MS = 5000


class Reason(NamedTuple):
    """One health problem: its level and its description."""

    level: str
    words: str


@dataclass(frozen=True)
class Health:
    """The worst level and every reason, worst first."""

    level: str
    reasons: tuple[Reason, ...]

    @property
    def status(self) -> str:
        """Return the status name that selects the chip."""
        return {OK: "ready", WARN: "stale", BAD: "failed"}[self.level]

    @property
    def words(self) -> str:
        """Return the health in one to three words."""
        return {OK: "Healthy", WARN: "Needs attention", BAD: "Needs repair"}[self.level]


def health_of(host: Host) -> Health | None:
    """Return the health of a host, or None before it reported its facts."""
    if not host.facts:
        return None
    unsorted = [*_gpu_reasons(host.facts), *_host_reasons(host)]
    reasons = tuple(sorted(unsorted, key=lambda reason: reason.level != BAD))
    return Health(reasons[0].level if reasons else OK, reasons)


def _gpu_reasons(facts: dict[str, Any]) -> Iterator[Reason]:
    if problem := facts.get("driver_problem"):
        yield Reason(BAD, f"A GPU is on the bus and its driver does not answer: {problem}.")
    for problem in (facts.get("gpus") and facts.get("device_problems")) or []:
        yield Reason(WARN, f"{problem[:1].upper()}{problem[1:]}.")
    for gpu in facts.get("gpus") or []:
        for level, words in (*_memory(gpu), *_xids(gpu), *_board(gpu)):
            yield Reason(level, f"GPU {gpu['index']}: {words}.")


def _memory(gpu: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if num := gpu.get("ecc_uncorrected_errors"):
        yield BAD, f"{num} memory errors that could not be corrected; results may be wrong"
    if gpu.get("is_worn_out"):
        yield BAD, "no spare memory rows are left; it needs to be exchanged"
    if gpu.get("needs_reset"):
        yield WARN, "memory rows wait to be replaced; reset it when it is idle (nvidia-smi -r)"
    if gpu.get("has_ecc") is False:
        yield WARN, "memory errors are not corrected: ECC is switched off"


def _xids(gpu: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for number in sorted(set(gpu.get("xids") or ())):
        fatal = FATAL_XIDS.get(number)
        if fatal:
            yield BAD, f"the driver noted error {number} since boot: {fatal}"
        else:
            yield WARN, f"the driver noted error {number} since boot"


def _board(gpu: dict[str, Any]) -> Iterator[tuple[str, str]]:
    width, full = gpu.get("pcie_width"), gpu.get("pcie_max_width")
    is_in_slot = not gpu.get("shares_host_memory")  # a module reports a link that it has not
    if width and full and width < full and is_in_slot:
        yield WARN, f"{width} of {full} PCIe lanes are in use; check slot and riser"
    if gpu.get("is_partitioned") and not gpu.get("parent_uuid"):  # agents before MIG instances
        yield WARN, "it is partitioned (MIG); plans count it whole"
    if gpu.get("fabric_state") not in (None, "completed"):
        yield BAD, "it is not registered with the NVSwitches; start nvidia-fabricmanager"
    if gpu.get("compute_mode") == "prohibited":
        yield BAD, "computing on it is prohibited (nvidia-smi -c DEFAULT)"


def _host_reasons(host: Host) -> Iterator[Reason]:
    total = host.facts.get("disk_total_bytes") or 0
    free = host.last_beat.get("disk_free_bytes", host.facts.get("disk_free_bytes") or 0)
    if free < max(LOW_DISK_BYTES, LOW_DISK_SHARE * total):
        yield Reason(WARN, f"{units.memory(free)} of disk are free; jobs need room.")
    offset = host.clock_offset_ms
    if offset is not None and abs(offset) > MAX_CLOCK_OFFSET_MS:
        yield Reason(WARN, f"Its clock is {abs(offset) / 1000:.0f} s off; signed news may wait.")
