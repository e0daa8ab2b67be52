"""A host's stored rates: its micro-benchmark, and the proofs that measured them since."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from webapp.hosts.models import Host


@dataclass(frozen=True)
class Bench:
    """A host's stored rates: the micro-benchmark's time and versions, and the rates per device.

    ``disk_proof`` and each device's ``proof`` are the jobs whose proofs measured them since, or
    None.
    """

    at: datetime
    torch_version: str
    num_threads: int
    duration_seconds: float
    disk_write_bytes_per_second: float
    devices: list[dict[str, Any]]
    links: list[dict[str, Any]]
    network: dict[str, Any] | None
    disk_proof: str | None


def bench_of(host: Host) -> Bench | None:
    """Return the host's micro-benchmark, or None before the first run."""
    result = host.microbench
    if not result:
        return None
    return Bench(
        datetime.fromtimestamp(result["measured_at_ms"] / 1000, tz=UTC),
        result["torch_version"],
        result["num_threads"],
        result["duration_seconds"],
        result["disk_write_bytes_per_second"],
        [_measured_device(device) for device in result["devices"]],
        result.get("links") or [],
        result.get("network"),
        result.get("disk_proof"),
    )


def _measured_device(measured: Mapping[str, Any]) -> dict[str, Any]:
    overhead_us = measured["op_overhead_seconds"] * 1e6
    at_ms = measured.get("measured_at_ms")
    return {
        **measured,
        "op_overhead_microseconds": f"{overhead_us:.1f}",
        "proof": measured.get("proof"),
        "at": at_ms and datetime.fromtimestamp(at_ms / 1000, tz=UTC),
    }
