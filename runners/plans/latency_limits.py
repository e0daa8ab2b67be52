"""The latency targets of a document as limits for the planner."""

from collections.abc import Mapping

from planner.specs.estimate import Bound
from runners.plans.document import PlanDocument

# Limits in seconds: time to the first token, time of each further token.
SLO_SECONDS: Mapping[str, tuple[float, float]] = {"chat": (1.0, 0.05), "code": (0.5, 0.03)}
LATENCIES = ("ttft", "tpot")  # the planner's names, in the order of the limits


def figure_name(figure: str, percentile: str) -> str:
    """Return the planner's name of a latency at a percentile.

    >>> figure_name("ttft", "p95"), figure_name("tpot", "mean")
    ('ttft_p95_seconds', 'tpot_seconds')
    """
    return f"{figure}_seconds" if percentile == "mean" else f"{figure}_{percentile}_seconds"


def target_seconds(document: PlanDocument) -> dict[str, float]:
    """Return the longest seconds of each latency that a document has as target, by its name."""
    limits = SLO_SECONDS.get(document.latency_target)
    if document.goal != "serve" or limits is None:
        return {}
    return {
        figure_name(figure, document.percentile): limit
        for figure, limit in zip(LATENCIES, limits, strict=True)
    }


def target_limits(document: PlanDocument) -> dict[str, Bound]:
    """Return the limits in seconds of a document's percentiles; empty for means.

    Disaggregated plans have no percentiles: they are evaluated by the mean.
    """
    if document.percentile == "mean" or document.pins.disaggregated:
        return {}
    return {name: Bound(max=limit) for name, limit in target_seconds(document).items()}
