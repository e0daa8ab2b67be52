"""Prices of a plan's hardware: per hour, per run and per million tokens, for all devices."""

from typing import NamedTuple

from planner.catalog.devices import get_device
from planner.errors import PlannerError
from planner.specs.plan import PlannedStrategy
from webapp.core.units import money


class Price(NamedTuple):
    """The price of a plan as text: total, price per device, further prices, sources."""

    total: str
    each: str
    more: tuple[str, ...]
    sources: str

    def __str__(self) -> str:
        return " · ".join((self.total, *self.more))


def price_of(best: PlannedStrategy | None) -> Price | None:
    """Return the price of all devices of a plan; None if unknown."""
    if best is None:
        return None
    device, count = best.cluster.device, best.cluster.num_devices
    try:
        device_spec = get_device(device) if isinstance(device, str) else device
    except PlannerError:
        return None
    if device_spec.price_usd_per_hour is None or best.cluster.other_nodes:
        return None
    hourly = device_spec.price_usd_per_hour
    noun = "device" if device_spec.kind == "cpu" else "GPU"
    devices = f"all {count} {noun}s" if count > 1 else f"the {noun}"
    further = []
    if best.run_cost_usd is not None:
        further.append(f"{money(best.run_cost_usd)} for the run")
    if best.cost_usd_per_million_tokens is not None:
        further.append(f"{money(best.cost_usd_per_million_tokens)} for a million tokens")
    return Price(
        total=f"{money(hourly * count)} an hour for {devices}",
        each=f"{money(hourly)} an hour for each" if count > 1 else "",
        more=tuple(further),
        sources=device_spec.price_source or "the catalog",
    )
