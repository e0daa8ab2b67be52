"""The check-list of a host that is being added: what is known, what is missing, how to mend it."""

from dataclasses import dataclass
from typing import Any

from webapp.core import units
from webapp.hosts.contact import Contact, contact_of, silent_seconds
from webapp.hosts.models import EnrolmentToken, Host, HostState

MIN_FREE_DISK_BYTES = 1024**3
MAX_CLOCK_OFFSET_MS = 5000
WAITING, GOOD, BAD, RUNNING = "wait", "good", "bad", "now"


@dataclass(frozen=True)
class Check:
    """One line: its name, how it stands, what was found, and how to mend it where it is bad."""

    name: str
    look: str = WAITING
    words: str = ""
    fix: str = ""
    command: str = ""

    @property
    def status(self) -> str:
        """Return the state whose chip is drawn."""
        return {GOOD: "succeeded", BAD: "failed", RUNNING: "checking"}.get(self.look, "queued")

    @property
    def word(self) -> str:
        """Return the state in a word, for those who do not see the shape."""
        return {GOOD: "ok", BAD: "needs you", RUNNING: "running"}.get(self.look, "waiting")


NAMES = (
    "Contacted",
    "Identity",
    "Clock",
    "Machine",
    "torch",
    "Disk",
    "Reports back",
    "Micro-benchmark",
)


def checklist(token: EnrolmentToken | None, host: Host | None) -> list[Check]:
    """Return the check-list in its fixed order; before the first contact every line waits."""
    if host is None:
        return [
            Check("Contacted", RUNNING, "waiting for the host to call"),
            *map(Check, NAMES[1:]),
        ]
    facts = host.facts
    return [
        Check("Contacted", GOOD, _agent(host, facts)),
        Check("Identity", GOOD, _identity(token)),
        _clock(host),
        Check("Machine", GOOD, machine_words(facts)),
        _torch(facts),
        _disk(facts),
        _reports(host),
        _microbench(host),
    ]


def is_ready(host: Host | None) -> bool:
    """Return whether the host takes jobs."""
    return host is not None and host.state == HostState.READY


def machine_words(facts: dict[str, Any]) -> str:
    """Return a machine in one line: processor, cores, memory, GPUs."""
    if not facts:
        return ""
    memory = units.memory(facts.get("memory_bytes", 0))
    words = [f"{facts.get('cpu_count', '?')} × {facts.get('cpu_model') or 'processor'}"]  # noqa: RUF001 -- a multiplication sign
    return " · ".join([*words, f"{memory} memory", gpu_words(facts)])


def gpu_words(facts: dict[str, Any]) -> str:
    """Return the GPUs of a host in one phrase."""
    gpus = facts.get("gpus") or []
    if not gpus:
        return "no GPU"
    first = gpus[0]
    return f"{len(gpus)} × {first['name']}, {units.memory(first['memory_bytes'])} each"  # noqa: RUF001 -- a multiplication sign


def _agent(host: Host, facts: dict[str, Any]) -> str:
    return f"{facts.get('hostname') or host.name}, agent {host.agent_version or 'unknown'}"


def _identity(token: EnrolmentToken | None) -> str:
    return "credential issued, token used up" if token else "credential issued"


def clock_words(offset_ms: int) -> str:
    """Return how far a host's clock is off, in words."""
    return f"{abs(offset_ms)} ms {'behind' if offset_ms < 0 else 'ahead of'} this server's"


def _clock(host: Host) -> Check:
    offset = host.clock_offset_ms
    if offset is None:
        return Check("Clock")
    words = clock_words(offset)
    if abs(offset) > MAX_CLOCK_OFFSET_MS:
        fix = "Signed messages need clocks within a minute. Switch time synchronisation on there:"
        return Check("Clock", BAD, words, fix, "sudo timedatectl set-ntp true")
    return Check("Clock", GOOD, words)


def _torch(facts: dict[str, Any]) -> Check:
    version = (facts.get("packages") or {}).get("torch")
    if version:
        return Check("torch", GOOD, version)
    return Check(
        "torch",
        BAD,
        "not installed on the host",
        "Jobs compute with it. Install it there, then start the agent again:",
        "pip install 'slipway[worker,gpu]'",
    )


def _disk(facts: dict[str, Any]) -> Check:
    free = facts.get("disk_free_bytes") or 0
    words = f"{units.memory(free)} free"
    if free < MIN_FREE_DISK_BYTES:
        return Check("Disk", BAD, words, "A job needs at least 1 GiB for its spool and its model.")
    return Check("Disk", GOOD, words)


def _reports(host: Host) -> Check:
    silent = silent_seconds(host)
    if silent is None:
        words = "start the agent with the second half of the command"
        return Check("Reports back", RUNNING, words)
    if contact_of(host) is Contact.LIVE:
        return Check("Reports back", GOOD, "every 10 s")
    fix = "The agent stopped reporting. Start it again on the host:"
    command = "python -m runners work"
    return Check("Reports back", BAD, f"silent for {units.clock(silent)}", fix, command)


def _microbench(host: Host) -> Check:
    devices = host.microbench.get("devices") or []
    if devices:
        return Check("Micro-benchmark", GOOD, bench_words(devices[0]))
    look = RUNNING if host.last_seen_at else WAITING
    return Check("Micro-benchmark", look, "memory bandwidth, arithmetic rate, overhead, disk")


def bench_words(device: dict[str, Any]) -> str:
    """Return the two figures that matter most of a measured device."""
    rates = device.get("flops_per_second") or {}
    best = max(rates.items(), key=lambda item: item[1], default=None)
    bandwidth = units.bandwidth(device.get("memory_bandwidth_bytes_per_second", 0))
    return f"{bandwidth} memory" + (f", {units.flops(best[1])} in {best[0]}" if best else "")
