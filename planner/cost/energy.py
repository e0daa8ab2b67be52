"""Joules and dollars per token, at the devices' rated power and the price that was given."""

from planner.cost.equation import equation
from planner.cost.quantity import Quantity

MILLION = 1e6
SECONDS_PER_HOUR = 3600


@equation(
    "E = n · P / rate",
    unit="J/token",
    symbols={"num_devices": "n", "power_watts": "P", "tokens_per_s": "rate"},
    source="rated power of the devices, hosts and cooling not counted",
)
def joules_per_token(
    *, num_devices: Quantity, power_watts: Quantity, tokens_per_s: Quantity
) -> Quantity:
    """Return the joules per token of devices that draw their rated power."""
    return num_devices * power_watts / tokens_per_s


@equation(
    "c = n · price / 3600 / rate · 10^6",
    unit="USD per million tokens",
    symbols={"num_devices": "n", "hourly_usd": "price", "tokens_per_s": "rate"},
)
def usd_per_million_tokens(
    *, num_devices: Quantity, hourly_usd: Quantity, tokens_per_s: Quantity
) -> Quantity:
    """Return the dollars per million tokens of devices rented by the hour."""
    return num_devices * hourly_usd / SECONDS_PER_HOUR / tokens_per_s * MILLION
