"""What a job drew and what that cost: measured joules and hours at the prices of its host.

Everything here reads a job that is already loaded with its host.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from planner.cost.energy import MILLION, of_electricity, run_usd, usd_per_million_tokens
from webapp.hosts.prices import HOURLY, PER_KWH, price_of
from webapp.jobs.models import FINAL_STATES, Job

TOTAL, PER_TOKEN = "energy_joules", "energy_joules_per_token"
ENERGY: dict[str, tuple[str, str]] = {  # metric -> label, base unit
    PER_TOKEN: ("Energy per token", "joules_per_token"),
    TOTAL: ("Energy of the run", "joules"),
    "run_electricity_usd": ("Electricity of the run", "usd"),
    "electricity_usd_per_million_tokens": ("Electricity per million tokens", "usd"),
    "run_cost_usd": ("The host for the run", "usd"),
    "cost_usd_per_million_tokens": ("The host per million tokens", "usd"),
}
_OF_DEVICE = re.compile(rf"(gpu\d+|package_\w+)_{TOTAL}")


class Cost(NamedTuple):
    """Dollars, and what they were multiplied from."""

    usd: float
    how: str


def device_labels(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return label and unit of what each device drew, in order, as ``ENERGY`` has them."""
    found = {name: match[1] for name in names if (match := _OF_DEVICE.fullmatch(name))}
    return {name: (f"Energy of {found[name]}", "joules") for name in sorted(found)}


def unmeasured(job: Job) -> str:
    """Return why no energy was measured, nothing where it was, or where nobody looked yet."""
    result = job.result or {}
    if TOTAL in result.get("measured", {}):
        return ""
    return str(result.get("notes", {}).get(TOTAL, ""))


def costs_of(job: Job) -> dict[str, Cost]:
    """Return what an ended job cost where its host's labels price that; not of several hosts."""
    if job.host is None or job.num_hosts > 1 or job.state not in FINAL_STATES:
        return {}
    measured: Mapping[str, float] = (job.result or {}).get("measured", {})
    labels, host = job.host.labels, job.host.name
    found: dict[str, Cost] = {}
    if (per_kwh := price_of(labels, PER_KWH)) is not None:
        found |= _electricity(measured, per_kwh, f"${per_kwh:g} per kWh, label of {host}")
    if (hourly := price_of(labels, HOURLY)) is not None:
        found |= _hire(job, measured, hourly, f"${hourly:g} an hour, label of {host}")
    return found


def _electricity(measured: Mapping[str, float], per_kwh: float, price: str) -> dict[str, Cost]:
    amounts = {
        "run_electricity_usd": (TOTAL, 1.0),
        "electricity_usd_per_million_tokens": (PER_TOKEN, MILLION),
    }
    return {
        name: Cost(
            float(of_electricity(energy_joules=measured[source] * times, per_kwh=per_kwh)),
            f"measured joules at {price}; hosts and cooling beyond its sensors not counted",
        )
        for name, (source, times) in amounts.items()
        if source in measured
    }


def _hire(job: Job, measured: Mapping[str, float], hourly: float, price: str) -> dict[str, Cost]:
    found = {}
    if job.started_at and job.ended_at:
        seconds = (job.ended_at - job.started_at).total_seconds()
        usd = float(run_usd(num_devices=1, hourly_usd=hourly, duration_s=seconds))
        found["run_cost_usd"] = Cost(usd, f"from start to end at {price}")
    if rate := measured.get("tokens_per_second"):
        usd = float(usd_per_million_tokens(num_devices=1, hourly_usd=hourly, tokens_per_s=rate))
        found["cost_usd_per_million_tokens"] = Cost(usd, f"at the measured speed, {price}")
    return found
