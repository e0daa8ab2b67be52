"""Whether a plan meets its latency targets, at the chosen percentile, in words and odds."""

import math
from statistics import NormalDist
from typing import NamedTuple

from planner.specs.estimate import Estimate
from runners.plans.document import PlanDocument
from runners.plans.latency_limits import LATENCIES, SLO_SECONDS, figure_name
from webapp.core.display import quantity

PERCENTILES = {"p95": "p95", "p99": "p99", "p50": "median", "mean": "mean"}
NAMES = {"ttft": "First token", "tpot": "Each further token"}
INTERVAL_Z = NormalDist().inv_cdf(0.9)  # an 80 % interval has 10 % on each side
RARE = 0.02  # rarer outcomes are not mentioned
MOST_RUNS = 0.5
TENS = 10  # more runs than these are rounded to tens
SAFE = 0.7  # a lower chance of meeting a target is called narrow


class Target(NamedTuple):
    """One target: the predicted value, whether it is met, and how likely."""

    figure: str  # ttft or tpot
    percentile: str
    value: str
    limit: str
    is_met: bool
    ratio: float  # value over limit
    chance: float | None  # probability of meeting it, from the interval; None without one
    interval: str = ""

    @property
    def name(self) -> str:
        """Return the figure's name with the percentile."""
        return f"{NAMES[self.figure]}, {PERCENTILES[self.percentile]}"

    @property
    def missed_words(self) -> str:
        """Return how the target is missed, with both numbers."""
        at = "on average" if self.percentile == "mean" else f"at {PERCENTILES[self.percentile]}"
        subject = {"ttft": "the first token", "tpot": "each further token"}[self.figure]
        return f"{subject} takes {self.value} {at}; the target is {self.limit}"

    @property
    def is_narrow(self) -> bool:
        """Return whether it is met, but likely to be missed in many runs."""
        return self.is_met and self.chance is not None and self.chance < SAFE

    @property
    def word(self) -> str:
        """Return the status in a word."""
        return "met" if self.is_met else "missed"

    @property
    def odds(self) -> str:
        """Return how often a run would end otherwise than predicted, unless that is rare."""
        if self.chance is None:
            return ""
        other = 1 - self.chance if self.is_met else self.chance
        if other < RARE:
            return ""
        return f"{odds_words(other)} would {'miss' if self.is_met else 'meet'} it"


def targets_of(estimate: Estimate, document: PlanDocument) -> tuple[Target, ...]:
    """Return the targets of a serving draft, each evaluated at its percentile.

    If an estimate has no percentiles, the mean is used, and named so.
    """
    limits = SLO_SECONDS.get(document.latency_target)
    if document.goal != "serve" or limits is None:
        return ()
    targets = (
        _target_result(estimate, figure, limit, document.percentile)
        for figure, limit in zip(LATENCIES, limits, strict=True)
    )
    return tuple(target for target in targets if target is not None)


def _target_result(
    estimate: Estimate, figure: str, limit: float, percentile: str
) -> Target | None:
    value = getattr(estimate.performance, figure_name(figure, percentile))
    mean = getattr(estimate.performance, f"{figure}_seconds")
    if value is None:
        value, percentile = mean, "mean"
    if value is None:
        return None
    bounds = _interval(estimate, figure, percentile, value / mean if mean else 1.0)
    return Target(
        figure=figure,
        percentile=percentile,
        value=str(quantity(value, "seconds")),
        limit=str(quantity(limit, "seconds")),
        is_met=value <= limit,
        ratio=value / limit,
        chance=chance_below(value, *bounds, limit) if bounds else None,
        interval=f"{quantity(bounds[0], 'seconds')} to {quantity(bounds[1], 'seconds')}"
        if bounds
        else "",
    )


def _interval(
    estimate: Estimate, figure: str, percentile: str, ratio: float
) -> tuple[float, float] | None:
    """Return a percentile's 80 % interval: its own, else scaled from the mean's."""
    own = estimate.interval.get(figure_name(figure, percentile))
    mean = estimate.interval.get(f"{figure}_seconds")
    if own is None and mean is not None:
        return mean[0] * ratio, mean[1] * ratio
    return own


def chance_below(value: float, low: float, high: float, limit: float) -> float:
    """Return the probability that a figure is at most a limit, from its 80 % interval.

    The figure's logarithm is modelled as normal on each side of the prediction.

    >>> round(chance_below(1.0, 0.8, 1.25, 1.25), 3)
    0.9
    """
    if not (value > 0 and low > 0 and limit > 0):
        return 1.0 if value <= limit else 0.0
    edge = high if limit >= value else low
    spread = abs(math.log(edge / value)) / INTERVAL_Z
    if not spread:
        return 1.0 if value <= limit else 0.0
    return NormalDist().cdf(math.log(limit / value) / spread)


def odds_words(chance: float) -> str:
    """Return a probability as text, with coarse precision.

    >>> odds_words(0.2), odds_words(0.5), odds_words(0.9), odds_words(0.034)
    ('about 1 run in 5', 'about 1 run in 2', 'about 9 runs in 10', 'about 1 run in 30')
    """
    if chance <= MOST_RUNS:
        runs = max(2, round(1 / chance))
        return f"about 1 run in {runs if runs < TENS else round(runs, -1)}"
    return f"about {max(6, min(9, round(chance * 10)))} runs in 10"
