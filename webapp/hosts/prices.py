"""What a host costs, as its labels say: dollars for an hour of it, and for a kWh that it draws."""

import math
from collections.abc import Mapping

from planner.specs.cluster import DeviceSpec

HOURLY, PER_KWH = "usd_per_hour", "usd_per_kwh"
MOST_USD = 10_000.0


def price_of(labels: Mapping[str, object], name: str) -> float | None:
    """Return the dollars that a host's label states; None where it states none that is one."""
    try:
        price = float(str(labels[name]))
    except (KeyError, ValueError):
        return None
    return price if math.isfinite(price) and 0 <= price <= MOST_USD else None


def wrong_price(labels: Mapping[str, str]) -> str:
    """Return what is wrong with a price among the labels, nothing where all are right."""
    for name in (HOURLY, PER_KWH):
        if name in labels and price_of(labels, name) is None:
            return (
                f"{name}={labels[name]} is no price; write dollars from 0 to {MOST_USD:,.0f} "
                f"as a number, such as {name}=0.30."
            )
    return ""


def priced(device: DeviceSpec, labels: Mapping[str, object], host: str, count: int) -> DeviceSpec:
    """Return a device with its share of what its host costs by the hour, where a label says it."""
    price = price_of(labels, HOURLY)
    if price is None:
        return device
    source = f"label {HOURLY} of {host}, over its {count} device{'s' if count > 1 else ''}"
    return device.model_copy(update={"price_usd_per_hour": price / count, "price_source": source})
