"""Prices from a host's labels: dollars per hour, and dollars per kWh of electricity."""

import math
from collections.abc import Mapping

from planner.specs.cluster import DeviceSpec

HOURLY, PER_KWH = "usd_per_hour", "usd_per_kwh"
MOST_USD = 10_000.0


def price_of(labels: Mapping[str, object], name: str) -> float | None:
    """Return the price in dollars of a label, or None if it is missing or invalid."""
    try:
        price = float(str(labels[name]))
    except (KeyError, ValueError):
        return None
    return price if math.isfinite(price) and 0 <= price <= MOST_USD else None


def wrong_price(labels: Mapping[str, str]) -> str:
    """Return the error message of the first invalid price label, or an empty string."""
    for name in (HOURLY, PER_KWH):
        if name in labels and price_of(labels, name) is None:
            return (
                f"{name}={labels[name]} is no price; write dollars from 0 to {MOST_USD:,.0f} "
                f"as a number, such as {name}=0.30."
            )
    return ""


def priced(device: DeviceSpec, labels: Mapping[str, object], host: str, count: int) -> DeviceSpec:
    """Return a device with its share of its host's hourly price, if a label states one."""
    price = price_of(labels, HOURLY)
    if price is None:
        return device
    source = f"label {HOURLY} of {host}, over its {count} device{'s' if count > 1 else ''}"
    return device.model_copy(update={"price_usd_per_hour": price / count, "price_source": source})
