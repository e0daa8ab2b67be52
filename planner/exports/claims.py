"""What a plan predicts, as figures with their intervals that a measurement can be held against."""

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
# What counts the same thing under another name, when the first is absent.
ALIASES = {"output_tokens_per_second": "tokens_per_second"}


def claims_of(estimate: Estimate, kind: str) -> JsonObject:
    """Return each predicted figure with the bounds of its 80 % interval, where it has one."""
    found: JsonObject = {}
    for name in CLAIMS[kind]:
        for known in (name, ALIASES.get(name, name)):
            value = getattr(estimate.performance, known)
            if value is not None and name not in found:
                low, high = estimate.interval.get(known, (None, None))
                found[name] = {"value": value, "low": low, "high": high}
    return found


def claim_words(case: ExportCase) -> str:
    """Return the prediction in one line, for the head of an export."""
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
