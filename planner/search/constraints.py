"""Limits on an estimate's figures: read a figure by name, say by how much it misses."""

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
UNITS = {"_seconds": "s", "_bytes": "B", "_per_second": "1/s", "_usd": "USD"}


def figure(estimate: Estimate, name: str) -> float | None:
    """Return one figure of an estimate by the name that a constraint gives, if it has one."""
    if name == "per_device_peak_bytes":
        return float(estimate.memory.per_device_peak_bytes)
    if name == "quality_loss_ratio":
        return estimate.quality.loss_ratio if estimate.quality else 0.0
    source = estimate if name in OWN_FIGURES else estimate.performance
    value = getattr(source, name)
    return None if value is None else float(value)


def unit_of(name: str) -> str:
    """Return the unit that a figure's name ends with."""
    return next((unit for suffix, unit in UNITS.items() if name.endswith(suffix)), "")


def constraints_of(request: PlanRequest) -> dict[str, Bound]:
    """Return the request's constraints with the workload's service objectives among them.

    Raises:
        BadRequestError: a constraint names something that an estimate does not have.
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
            if limit is not None:
                limits.setdefault(name, Bound(max=limit))
    return limits


def broken(estimate: Estimate, limits: dict[str, Bound]) -> tuple[str, float | None, float] | None:
    """Return the first constraint that an estimate misses: its name, the value and the limit."""
    for name, bound in limits.items():
        value = figure(estimate, name)
        if bound.max is not None and (value is None or value > bound.max):
            return name, value, bound.max
        if bound.min is not None and (value is None or value < bound.min):
            return name, value, bound.min
    return None
