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


def target_limits(document: PlanDocument) -> dict[str, Bound]:
    """Return the limits in seconds of a document's percentiles; empty for means.

    Disaggregated plans have no percentiles: they are evaluated by the mean.
    """
    limits, percentile = SLO_SECONDS.get(document.latency_target), document.percentile
    if document.goal != "serve" or limits is None or percentile == "mean":
        return {}
    if document.pins.disaggregated:
        return {}
    return {
        figure_name(figure, percentile): Bound(max=limit)
        for figure, limit in zip(LATENCIES, limits, strict=True)
    }
