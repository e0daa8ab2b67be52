"""Limits on an estimate's figures: read a figure by name and report the first violation."""

import re
from collections.abc import Mapping

from planner.errors import BadRequestError
from planner.specs.estimate import Estimate, Performance
from planner.specs.plan import Bound, PlanRequest
from planner.specs.workload import ServeWorkload

OWN_FIGURES = (
    "per_device_peak_bytes",
    "quality_loss_ratio",
    "energy_joules_per_token",
    "cost_usd_per_million_tokens",
    "carbon_grams_per_million_tokens",
    "electricity_usd_per_million_tokens",
    "run_energy_joules",
    "run_cost_usd",
    "run_carbon_grams",
    "run_electricity_usd",
)
FIGURES = frozenset({*Performance.model_fields, *OWN_FIGURES})
# Figures that only a simulation gives. The search simulates where the mean does not decide.
SIMULATED_OTHERS = frozenset(
    {
        "slo_attainment_ratio",
        "slo_max_concurrency",
        "slo_max_requests_per_second",
        "max_requests_per_second",
    }
)
PERCENTILE = re.compile(r"(ttft|tpot|latency)_p(\d+)_seconds")
# Factors above a percentile's limit at which the mean alone proves a violation. The smallest
# percentiles of 1,477 random loads were 0.13, 0.41, 0.83 and 0.97 of their mean.
FAR_BEYOND = {50: 16.0, 90: 4.0, 95: 2.0, 99: 1.25}
UNITS = {"_seconds": "s", "_bytes": "B", "_per_second": "1/s", "_usd": "USD"}


def figure(estimate: Estimate, name: str) -> float | None:
    """Return one figure of an estimate by its constraint name, or None if it has none."""
    if name == "per_device_peak_bytes":
        return float(estimate.memory.per_device_peak_bytes)
    if name == "quality_loss_ratio":
        return estimate.quality.loss_ratio if estimate.quality else 0.0
    source = estimate if name in OWN_FIGURES else estimate.performance
    value = getattr(source, name)
    return None if value is None else float(value)


def is_simulated(name: str) -> bool:
    """Return whether only a simulation of the load gives a figure."""
    return name in SIMULATED_OTHERS or is_percentile(name)


def is_percentile(name: str) -> bool:
    """Return whether a figure is a percentile of request latencies."""
    return PERCENTILE.fullmatch(name) is not None


def mean_bound(name: str, bound: Bound) -> tuple[str, float] | None:
    """Return a percentile's mean figure and the value above which it violates the limit.

    >>> hopeless("ttft_p99_seconds", Bound(max=0.5))
    ('ttft_seconds', 0.625)
    """
    match = PERCENTILE.fullmatch(name)
    if match is None or bound.max is None:
        return None
    return f"{match[1]}_seconds", FAR_BEYOND[int(match[2])] * bound.max


def unit_of(name: str) -> str:
    """Return the unit of a figure, from the suffix of its name."""
    return next((unit for suffix, unit in UNITS.items() if name.endswith(suffix)), "")


def constraints_of(request: PlanRequest) -> dict[str, Bound]:
    """Return the request's constraints together with the workload's service objectives.

    Raises:
        BadRequestError: a constraint names something that is not a figure of an estimate.
    """
    for name in request.constraints:
        if name not in FIGURES:
            known = ", ".join(sorted(FIGURES))
            raise BadRequestError(
                f"{name!r} is no figure of an estimate: choose among {known}",
                f"constraints.{name}",
            )
    limits = dict(request.constraints)
    workload = request.workload
    if isinstance(workload, ServeWorkload):
        for name, limit in (
            ("ttft_seconds", workload.ttft_slo_seconds),
            ("tpot_seconds", workload.tpot_slo_seconds),
        ):
            # A limit on a percentile of the same figure replaces the limit on the mean.
            percentile_prefix = name.replace("_seconds", "_p")
            if limit is not None and not any(
                constraint.startswith(percentile_prefix) for constraint in limits
            ):
                limits.setdefault(name, Bound(max=limit))
    return limits


def first_violation(
    estimate: Estimate, limits: Mapping[str, Bound]
) -> tuple[str, float | None, float] | None:
    """Return the first violated constraint: its name, the value and the limit."""
    for name, bound in limits.items():
        value = figure(estimate, name)
        if bound.max is not None and (value is None or value > bound.max):
            return name, value, bound.max
        if bound.min is not None and (value is None or value < bound.min):
            return name, value, bound.min
    return None
