"""A plan's predicted figures with intervals, for comparison with a measurement."""

from planner.exports.case import ExportCase
from planner.specs.base import JsonObject
from planner.specs.estimate import Estimate

SERVING = (
    "ttft_seconds",
    "tpot_seconds",
    "output_tokens_per_second",
    "requests_per_second",
)
CLAIMS = {
    "serve": SERVING,
    "generate": ("ttft_seconds", "tpot_seconds", "latency_seconds", "output_tokens_per_second"),
    "train": ("step_seconds", "tokens_per_second"),
    "compress": ("duration_seconds",),
}
# Alternative names, used if the first figure is absent.
ALIASES = {"output_tokens_per_second": "tokens_per_second"}


def claims_of(estimate: Estimate, kind: str) -> JsonObject:
    """Return each predicted figure with the bounds of its 80 % interval, if any."""
    claims: JsonObject = {}
    for name in CLAIMS[kind]:
        for attribute in (name, ALIASES.get(name, name)):
            value = getattr(estimate.performance, attribute)
            if value is not None and name not in claims:
                low, high = estimate.interval.get(attribute, (None, None))
                claims[name] = {"value": value, "low": low, "high": high}
    return claims


def claim_words(case: ExportCase) -> str:
    """Return the prediction as one line, for the header of an export."""
    memory = case.plan.memory
    figures = [
        f"{name} {claim['value']:.4g}{_bounds(claim)}"
        for name, claim in claims_of(case.plan, case.workload.kind).items()
    ]
    peak = f"{memory.per_device_peak_bytes / 1024**3:.1f} GiB"
    limit = f"{memory.capacity_bytes / 1024**3:.1f} GiB"
    return "; ".join([*figures, f"peak {peak} of {limit} per device"])


def _bounds(claim: JsonObject) -> str:
    if claim["low"] is None:
        return ""
    return f" (80 %: {claim['low']:.4g} to {claim['high']:.4g})"
