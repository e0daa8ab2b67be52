"""The health of a host: checks, their verdicts and ways out."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from webapp.core import display
from webapp.hosts.models import RUNS_JOBS, EnrolmentToken, Host, HostState
from webapp.hosts.services import Contact, contact_of, silent_seconds

# ---------------------------------------------------------------------------
# Hardware health of a host: ok, warn or bad, with its reasons.
#
# Health is shown to people only: it moves no job and closes no host.
# ---------------------------------------------------------------------------


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
MS_SHOWN_SECONDS = 10.0  # of a clock's offset; a longer one is shown in whole parts
YEAR_SECONDS = 365.25 * 86_400


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
        yield WARN, "it is partitioned (MIG); plans count the whole GPU"
    if gpu.get("fabric_state") not in (None, "completed"):
        yield BAD, "it is not registered with the NVSwitches; start nvidia-fabricmanager"
    if gpu.get("compute_mode") == "prohibited":
        yield BAD, "its compute mode prohibits computing (nvidia-smi -c DEFAULT allows it)"


def _host_reasons(host: Host) -> Iterator[Reason]:
    total = host.facts.get("disk_total_bytes") or 0
    free = host.last_beat.get("disk_free_bytes", host.facts.get("disk_free_bytes") or 0)
    if free < max(LOW_DISK_BYTES, LOW_DISK_SHARE * total):
        yield Reason(WARN, f"{display.memory(free)} of disk are free, too little for jobs.")
    offset = host.clock_offset_ms
    if offset is not None and abs(offset) > MAX_CLOCK_OFFSET_MS:
        yield Reason(
            WARN, f"Its clock is {abs(offset) / 1000:.0f} s off; signed messages may be delayed."
        )


# ---------------------------------------------------------------------------
# The check-list of a host that is being added: passed checks, failures, and their fixes.
# ---------------------------------------------------------------------------


MIN_FREE_DISK_BYTES = 1024**3
WAITING, GOOD, BAD_VERDICTS, RUNNING = "wait", "good", "bad", "now"
BENCH_FAILED = "the micro-benchmark failed: "
WORK = "python -m runners work"


@dataclass(frozen=True)
class Check:
    """One line of the check-list: name, status, finding, and the fix where it failed."""

    name: str
    look: str = WAITING
    words: str = ""
    fix: str = ""
    command: str = ""

    @property
    def status(self) -> str:
        """Return the status name that selects the chip."""
        return {GOOD: "succeeded", BAD_VERDICTS: "failed", RUNNING: "checking"}.get(
            self.look, "queued"
        )

    @property
    def word(self) -> str:
        """Return the status as one word, for people who cannot see the chip."""
        return {GOOD: "ok", BAD_VERDICTS: "action needed", RUNNING: "running"}.get(
            self.look, "waiting"
        )


NAMES = (
    "Contacted",
    "Identity",
    "Clock",
    "Driver",
    "GPUs",
    "torch",
    "Disk",
    "Queue round trip",
    "20-second benchmark",
)
CONTACTED, IDENTITY, CLOCK, DRIVER, GPUS, TORCH, DISK, QUEUE, BENCH = NAMES


def checklist(token: EnrolmentToken | None, host: Host | None) -> list[Check]:
    """Return the check-list in fixed order; before the first contact every check is pending."""
    if host is None:
        return [
            Check(CONTACTED, RUNNING, "waiting for the host to connect"),
            *map(Check, NAMES[1:]),
        ]
    facts = host.facts
    return [
        _contact(host, facts),
        _identity(token, host),
        _clock(host),
        _driver(facts),
        _gpus(facts),
        _torch(facts),
        _disk(facts),
        _queue(host),
        _microbench(host),
    ]


def open_checks(host: Host) -> list[Check]:
    """Return the failed checks of a host, for its own page."""
    if host.kind not in RUNS_JOBS or host.state == HostState.RETIRED:
        return []
    return [check for check in checklist(None, host) if check.look == BAD_VERDICTS]


def is_ready(host: Host | None) -> bool:
    """Return whether the host accepts jobs."""
    return host is not None and host.state == HostState.READY


def machine_words(facts: dict[str, Any]) -> str:
    """Return a one-line description of a machine: processor, logical CPUs, memory, GPUs."""
    if not facts:
        return ""
    memory = display.memory(facts.get("memory_bytes", 0))
    return " · ".join([processor_words(facts), f"{memory} memory", gpu_words(facts)])


def processor_words(facts: dict[str, Any]) -> str:
    """Return a machine's processor model and the number of logical CPUs that jobs may use.

    Logical CPUs are hardware threads: several may share one core.
    """
    return f"{facts.get('cpu_model') or 'Processor'}, {cpus_words(facts.get('cpu_count'))}"


def cpus_words(count: int | None) -> str:
    """Return the number of logical CPUs that a host's jobs may use, with its unit."""
    return f"{'?' if count is None else count} logical CPU{'' if count == 1 else 's'}"


def gpu_words(facts: dict[str, Any]) -> str:
    """Return the number, model and memory of a host's GPUs in one phrase."""
    gpus = facts.get("gpus") or []
    if not gpus:
        return "no GPU"
    first = gpus[0]
    return f"{len(gpus)} × {first['name']}, {display.memory(first['memory_bytes'])} each"  # noqa: RUF001 -- a multiplication sign


def clock_words(offset_ms: int) -> str:
    """Return the offset of a host's clock in words; one of more than 10 s in whole parts."""
    seconds, years = abs(offset_ms) / 1000, abs(offset_ms) / 1000 // YEAR_SECONDS
    size = display.clock(seconds) if seconds > MS_SHOWN_SECONDS else f"{abs(offset_ms)} ms"
    if years:
        size = display.counted(int(years), "year")
    return f"{size} {'behind' if offset_ms < 0 else 'ahead of'} this server's"


def _contact(host: Host, facts: dict[str, Any]) -> Check:
    silent = silent_seconds(host)
    who = f"{facts.get('hostname') or host.name}, agent {host.agent_version or 'unknown'}"
    if silent is None:
        words = "enrolled; start the agent with the last part of the command"
        return Check(CONTACTED, RUNNING, words)
    if contact_of(host) is Contact.LIVE:
        return Check(CONTACTED, GOOD, f"{who}, every 10 s")
    fix = "The agent stopped reporting. Start it again on the host:"
    return Check(CONTACTED, BAD_VERDICTS, f"no heartbeat for {display.clock(silent)}", fix, WORK)


def _identity(token: EnrolmentToken | None, host: Host) -> Check:
    if not host.credential_hash:
        fix = "Create a new token under Hosts, Add a host, and enrol the host again."
        return Check(IDENTITY, BAD_VERDICTS, "access revoked", fix)
    used = ", token used up" if token else ""
    return Check(IDENTITY, GOOD, f"credential of its own{used}")


def _clock(host: Host) -> Check:
    offset = host.clock_offset_ms
    if offset is None:
        return Check(CLOCK)
    words = clock_words(offset)
    if abs(offset) > MAX_CLOCK_OFFSET_MS:
        fix = "Signed messages need clocks within half a minute. Switch time synchronisation on:"
        return Check(CLOCK, BAD_VERDICTS, words, fix, "sudo timedatectl set-ntp true")
    return Check(CLOCK, GOOD, words)


def _driver(facts: dict[str, Any]) -> Check:
    if problem := facts.get("driver_problem"):
        fix = "The driver of an NVIDIA GPU does not answer. Run this to see its error:"
        return Check(
            DRIVER, BAD_VERDICTS, str(problem), fix, "nvidia-smi; sudo dmesg | grep -i nvrm"
        )
    version = facts.get("driver_version")
    if not version:
        return Check(DRIVER, GOOD, "no GPU, none needed")
    runs = facts.get("cuda_version")
    if not runs and (rocm := facts.get("rocm_version")):
        return Check(DRIVER, GOOD, f"{version}, ROCm {rocm}")
    return Check(DRIVER, GOOD, f"{version}, CUDA {runs}" if runs else str(version))


def _gpus(facts: dict[str, Any]) -> Check:
    if facts.get("scheduler"):
        return Check(GPUS, GOOD, "those of the nodes that the scheduler gives a job")
    if not facts.get("gpus"):
        unused = ", ".join(gpu["name"] for gpu in facts.get("other_gpus") or ())
        beside = f", not on {unused}" if unused else ""
        return Check(GPUS, GOOD, f"none; jobs run on {processor_words(facts)}{beside}")
    links = {link for row in facts.get("topology") or () for link in row if link != "X"}
    reach = f", {' and '.join(sorted(links))} between them" if links else ""
    if any(access is False for row in facts.get("peer_access") or () for access in row):
        reach += ", not all with access to each other's memory"
    return Check(GPUS, GOOD, gpu_words(facts) + reach)


def _torch(facts: dict[str, Any]) -> Check:
    version = (facts.get("packages") or {}).get("torch")
    if not version:
        fix = "Jobs need torch. Install it on the host, start the agent again, then check again:"
        return Check(
            TORCH, BAD_VERDICTS, "not installed on the host", fix, "pip install 'slipway[gpu]'"
        )
    built, runs = facts.get("torch_cuda_version"), facts.get("cuda_version")
    if not facts.get("gpus"):
        return Check(TORCH, GOOD, str(version))
    if facts["gpus"][0].get("vendor") == "amd":  # listed only where torch is built for ROCm
        return Check(TORCH, GOOD, f"{version}, built for ROCm {facts.get('torch_rocm_version')}")
    if not built:
        words = f"{version}, built for the processor alone"
        fix = "Jobs would not use the GPUs. Install the build for their driver:"
        return Check(TORCH, BAD_VERDICTS, words, fix, _install(version, runs))
    if runs and _major(built) > _major(runs):
        words = f"{version}, built for CUDA {built}; this driver runs up to {runs}"
        fix = "Install the build that fits the driver, or a newer driver:"
        return Check(TORCH, BAD_VERDICTS, words, fix, _install(version, runs))
    return Check(TORCH, GOOD, f"{version}, built for CUDA {built}")


def _major(version: str) -> int:
    """Return the first number of a version; 0 if it begins with none."""
    first = version.partition(".")[0]
    return int(first) if first.isdecimal() else 0


def _install(version: str, runs: str | None) -> str:
    """Return the pip command that installs this torch version for the driver's CUDA version."""
    bare = str(version).partition("+")[0]
    build = f"cu{runs.replace('.', '')}" if runs else "cu128"
    return (
        f"pip install --force-reinstall torch=={bare} "
        f"--index-url https://download.pytorch.org/whl/{build}"
    )


def _disk(facts: dict[str, Any]) -> Check:
    free = facts.get("disk_free_bytes") or 0
    words = f"{display.memory(free)} free"
    if free < MIN_FREE_DISK_BYTES:
        fix = "A job needs at least 1 GiB for its spool and its model. See what uses the disk:"
        return Check(
            DISK, BAD_VERDICTS, words, fix, "du -xh --max-depth=2 ~/.slipway | sort -h | tail"
        )
    return Check(DISK, GOOD, words)


def _queue(host: Host) -> Check:
    """Check the round trip through Redis; without Redis, jobs start with the heartbeats."""
    result = host.checks.get("queue") or {}
    if refusal := host.checks.get("redis_refusal"):
        return Check(QUEUE, GOOD, f"not used: {refusal}")
    if not host.checks.get("has_redis"):
        return Check(QUEUE, GOOD, "not used: everything goes over HTTP, starts take up to 10 s")
    if "seconds" in result:
        return Check(QUEUE, GOOD, f"{result['seconds'] * 1000:.0f} ms, signed, round trip")
    if "problem" in result:
        fix = "Jobs still start, up to 10 s later. Run this to see the host's view of Redis:"
        return Check(QUEUE, BAD_VERDICTS, result["problem"], fix, "python -m runners doctor")
    return Check(QUEUE, RUNNING if host.last_seen_at else WAITING, "a signed ping and its answer")


def _microbench(host: Host) -> Check:
    devices = host.microbench.get("devices") or []
    if devices:
        return Check(BENCH, GOOD, bench_words(devices[-1]))
    problems = host.last_beat.get("problems") or ()
    failed = next((each for each in problems if each.startswith(BENCH_FAILED)), None)
    if failed:
        fix = "Run it by hand to see its output, then check again:"
        words = failed.removeprefix(BENCH_FAILED)
        return Check(
            BENCH, BAD_VERDICTS, words, fix, "python -m runners.jobs.bench.device_rates --short"
        )
    look = RUNNING if host.last_seen_at else WAITING
    words = "matrix rate by dtype, memory bandwidth, copies, disk, network"
    return Check(BENCH, look, words)


def bench_words(device: dict[str, Any]) -> str:
    """Return a measured device's memory bandwidth and its highest matrix rate."""
    rates = device.get("flops_per_second") or {}
    best = max(rates.items(), key=lambda item: item[1], default=None)
    bandwidth = display.bandwidth(device.get("memory_bandwidth_bytes_per_second", 0))
    return f"{bandwidth} memory" + (f", {display.flops(best[1])} in {best[0]}" if best else "")
