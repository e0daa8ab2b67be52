"""Energy and cost of a job: measured joules and hours at the prices of its host.

All functions expect a job loaded with its host.
"""

from collections.abc import Mapping
from typing import NamedTuple

from planner.cost.energy import MILLION, of_electricity, run_usd, usd_per_million_tokens
from webapp.hosts.prices import HOURLY, PER_KWH, price_of
from webapp.jobs.models import FINAL_STATES, Job

TOTAL, PER_TOKEN = "energy_joules", "energy_joules_per_token"


class Cost(NamedTuple):
    """An amount in dollars, and how it was computed."""

    usd: float
    how: str


def unmeasured(job: Job) -> str:
    """Return why no energy was measured; empty if it was, or if no result exists yet."""
    result = job.result or {}
    if TOTAL in result.get("measured", {}):
        return ""
    return str(result.get("notes", {}).get(TOTAL, ""))


def costs_of(job: Job) -> dict[str, Cost]:
    """Return the costs of an ended single-host job, if its host's labels have prices."""
    if job.host is None or job.num_hosts > 1 or job.state not in FINAL_STATES:
        return {}
    measured: Mapping[str, float] = (job.result or {}).get("measured", {})
    labels, host = job.host.labels, job.host.name
    costs: dict[str, Cost] = {}
    if (per_kwh := price_of(labels, PER_KWH)) is not None:
        costs |= _electricity(measured, per_kwh, f"${per_kwh:g} per kWh, label of {host}")
    if (hourly := price_of(labels, HOURLY)) is not None:
        costs |= _hire(job, measured, hourly, f"${hourly:g} an hour, label of {host}")
    return costs


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
    costs = {}
    if job.started_at and job.ended_at:
        seconds = (job.ended_at - job.started_at).total_seconds()
        usd = float(run_usd(num_devices=1, hourly_usd=hourly, duration_s=seconds))
        costs["run_cost_usd"] = Cost(usd, f"from start to end at {price}")
    if rate := measured.get("tokens_per_second"):
        usd = float(usd_per_million_tokens(num_devices=1, hourly_usd=hourly, tokens_per_s=rate))
        costs["cost_usd_per_million_tokens"] = Cost(usd, f"at the measured speed, {price}")
    return costs
