"""Energy, cost and carbon per token and per run, from power, prices and grid data."""

from planner.cost.quantity import Quantity, equation

MILLION = 1e6
SECONDS_PER_HOUR = 3600
JOULES_PER_KWH = 3.6e6
POLCA = "Patel et al. 2023 (POLCA), arXiv:2308.12908: power by phase; hosts and cooling apart"


@equation(
    "P = P_tdp · (idle + (1 - idle) · u)",
    unit="W",
    symbols={"power_watts": "P_tdp", "idle_ratio": "idle", "active_ratio": "u"},
    source=POLCA,
)
def drawn_watts(
    *, power_watts: Quantity, idle_ratio: Quantity, active_ratio: Quantity
) -> Quantity:
    """Return a device's mean power, with ``active_ratio`` of its power above idle."""
    return power_watts * (idle_ratio + (1 - idle_ratio) * active_ratio)


@equation(
    "E = n · P / rate",
    unit="J/token",
    symbols={"num_devices": "n", "power_watts": "P", "tokens_per_s": "rate"},
    source="mean drawn power of the devices, hosts and cooling not counted",
)
def joules_per_token(
    *, num_devices: Quantity, power_watts: Quantity, tokens_per_s: Quantity
) -> Quantity:
    """Return the joules per token of devices with a mean power."""
    return num_devices * power_watts / tokens_per_s


@equation(
    "E_run = n · P · t",
    unit="J",
    symbols={"num_devices": "n", "power_watts": "P", "duration_s": "t"},
)
def run_joules(*, num_devices: Quantity, power_watts: Quantity, duration_s: Quantity) -> Quantity:
    """Return the joules of a whole run."""
    return num_devices * power_watts * duration_s


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


@equation(
    "c_run = n · price / 3600 · t",
    unit="USD",
    symbols={"num_devices": "n", "hourly_usd": "price", "duration_s": "t"},
)
def run_usd(*, num_devices: Quantity, hourly_usd: Quantity, duration_s: Quantity) -> Quantity:
    """Return the dollars of a whole run on devices rented by the hour."""
    return num_devices * hourly_usd / SECONDS_PER_HOUR * duration_s


@equation(
    "x = E / 3.6·10^6 · per_kwh",
    unit="g or USD",
    symbols={"energy_joules": "E", "per_kwh": "per_kwh"},
    source="1 kWh = 3.6 MJ",
)
def of_electricity(*, energy_joules: Quantity, per_kwh: Quantity) -> Quantity:
    """Return the grams or dollars of an amount of energy, at ``per_kwh`` of them."""
    return energy_joules / JOULES_PER_KWH * per_kwh
