"""Energy, cost and carbon of a workload, with intervals."""

from dataclasses import dataclass, field
from typing import TypeGuard

from planner.catalog.reading import data_toml
from planner.cost.energy import (
    MILLION,
    drawn_watts,
    joules_per_token,
    of_electricity,
    run_joules,
    run_usd,
    usd_per_million_tokens,
)
from planner.cost.quantity import Ledger, Line, Origin, any_of, where
from planner.specs.estimate import Interval
from planner.workload.outcome import Outcome
from planner.workload.setting import Setting

GROUP = "energy"
LOW, EXPECTED, HIGH = range(3)


@dataclass(frozen=True)
class Expense:
    """Figures of an estimate by name, and their intervals."""

    figures: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, Interval] = field(default_factory=dict)


def active_ratio(outcome: Outcome, which: int = EXPECTED) -> float:
    """Return the mean share of the dynamic power over the outcome's operator classes."""
    table: dict[str, list[float]] = data_toml("power.toml")["active"]
    seconds = {name: outcome.seconds_by_class.get(name, 0.0) for name in table}
    total = sum(seconds.values())
    drawn = sum(table[name][which] * share for name, share in seconds.items())
    busy = total > 0
    return where(busy, drawn / where(busy, total, 1.0), table["compute"][which])


def expense(setting: Setting, outcome: Outcome, ledger: Ledger, rented: float) -> Expense:
    """Return energy, cost and carbon per token and, if the run is finite, per run."""
    figures: dict[str, float] = {}
    energy = _energy(setting, outcome, ledger)
    figures |= energy.figures | _money(setting, outcome, ledger, rented)
    figures |= _electricity(setting, energy.figures, ledger)
    return Expense(figures, energy.intervals)


def _is_positive(figure: float | None) -> TypeGuard[float]:
    """Return whether a figure exists and is positive for any element."""
    return figure is not None and any_of(figure > 0)


def _energy(setting: Setting, outcome: Outcome, ledger: Ledger) -> Expense:
    device, idle = setting.device, float(data_toml("power.toml")["idle_ratio"])
    if not device.tdp_watts:
        return Expense()
    origin = Origin("published", data_toml("power.toml")["sources"]["active"])
    watts = ledger.term(
        drawn_watts,
        Line(GROUP, "Mean power of a device", origin=origin),
        power_watts=device.tdp_watts,
        idle_ratio=idle,
        active_ratio=active_ratio(outcome),
    )
    count, rate = setting.layout.devices, outcome.energy_tokens_per_second
    figures, intervals = {}, {}
    name = "energy_joules_per_token"
    if _is_positive(rate):
        figures[name] = ledger.term(
            joules_per_token,
            Line(GROUP, "Energy per token", origin=Origin("published", device.source or "")),
            num_devices=count,
            power_watts=watts,
            tokens_per_s=rate,
        )
    if ledger.records and name in figures:
        low, high = (
            float(
                drawn_watts(
                    power_watts=device.tdp_watts,
                    idle_ratio=idle,
                    active_ratio=active_ratio(outcome, which),
                )
            )
            / watts
            for which in (LOW, HIGH)
        )
        intervals[name] = (figures[name] * low, figures[name] * high)
    if _is_positive(outcome.performance.duration_seconds):
        figures["run_energy_joules"] = ledger.term(
            run_joules,
            Line(GROUP, "Energy of the run"),
            num_devices=count,
            power_watts=watts,
            duration_s=outcome.performance.duration_seconds,
        )
    return Expense(figures, intervals)


def _money(setting: Setting, outcome: Outcome, ledger: Ledger, rented: float) -> dict[str, float]:
    device, rate = setting.device, outcome.energy_tokens_per_second
    if not device.price_usd_per_hour:
        return {}
    origin = Origin("published", device.price_source or device.source or "")
    figures = {}
    if _is_positive(rate):
        figures["cost_usd_per_million_tokens"] = ledger.term(
            usd_per_million_tokens,
            Line(GROUP, "Cost per million tokens", origin=origin),
            num_devices=rented,
            hourly_usd=device.price_usd_per_hour,
            tokens_per_s=rate,
        )
    if _is_positive(outcome.performance.duration_seconds):
        figures["run_cost_usd"] = ledger.term(
            run_usd,
            Line(GROUP, "Cost of the run", origin=origin),
            num_devices=rented,
            hourly_usd=device.price_usd_per_hour,
            duration_s=outcome.performance.duration_seconds,
        )
    return figures


def _electricity(setting: Setting, energy: dict[str, float], ledger: Ledger) -> dict[str, float]:
    """Return carbon and price of the electricity if the cluster has grid data."""
    cluster, figures = setting.cluster, {}
    amounts = {
        "per_million_tokens": energy.get("energy_joules_per_token", 0.0) * MILLION,
        "of_the_run": energy.get("run_energy_joules", 0.0),
    }
    rates = {
        "carbon_grams": (cluster.grid_gco2_per_kwh, "Carbon of the electricity"),
        "electricity_usd": (cluster.electricity_usd_per_kwh, "Price of the electricity"),
    }
    for quantity, (per_kwh, title) in rates.items():
        for span, joules in amounts.items():
            if per_kwh is None or not _is_positive(joules):
                continue
            name = f"{quantity}_{span}" if span == "per_million_tokens" else f"run_{quantity}"
            figures[name] = ledger.term(
                of_electricity,
                Line(GROUP, f"{title}, {span.replace('_', ' ')}", key=name),
                energy_joules=joules,
                per_kwh=per_kwh,
            )
    return figures
