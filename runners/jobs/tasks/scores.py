"""Task scores of a model, and paired comparison of two models over the same documents."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from runners.jobs.evaluation import Z_95

Values = npt.NDArray[np.float64]
Scale = Literal["difference", "ratio"]


@dataclass(frozen=True)
class Aggregation:
    """A figure as a function ``of`` the weighted mean over documents.

    ``sign`` is the factor from a change of that mean to one of the figure, or of its logarithm.
    """

    of: Callable[[float], float]
    slope: Callable[[float], float]  # derivative at the mean, for the standard error
    scale: Scale = "difference"
    sign: float = 1.0


def _exp_negative(mean: float) -> float:
    return math.exp(-mean)


_PERPLEXITY = Aggregation(_exp_negative, lambda mean: -_exp_negative(mean), "ratio", -1.0)
AGGREGATIONS: Mapping[str, Aggregation] = {
    "mean": Aggregation(lambda mean: mean, lambda _mean: 1.0),
    "perplexity": _PERPLEXITY,
    "weighted_perplexity": _PERPLEXITY,
    "bits_per_byte": Aggregation(
        lambda mean: -mean / math.log(2), lambda _mean: -1 / math.log(2), sign=-1 / math.log(2)
    ),
}


@dataclass(frozen=True)
class Score:
    """One metric of one task: the harness's figure and each document's contribution."""

    task: str
    metric: str
    value: float
    aggregation: str
    is_higher_better: bool
    documents: int
    values: Values | None = field(default=None, compare=False)  # sums per document
    weights: Values | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """Return its name in a job's result."""
        return f"{self.task}/{self.metric}"

    @property
    def stderr(self) -> float | None:
        """Return its standard error over documents (delta method), or None if not defined.

        For a mean it is the harness's: sample standard deviation over the root of the number.
        """
        rule = AGGREGATIONS.get(self.aggregation)
        if rule is None or self.values is None or self.weights is None:
            return None
        mean, error = weighted_mean(self.values, self.weights)
        return abs(rule.slope(mean)) * error


def weighted_mean(values: Values, weights: Values) -> tuple[float, float]:
    """Return sum(values) / sum(weights) and its standard error, 0 for one document.

    Source: Cochran 1977, Sampling Techniques, 3rd ed., eq. 6.13, without the finite correction.
    """
    total, count = float(weights.sum()), len(values)
    mean = float(values.sum()) / total
    if count == 1:
        return mean, 0.0
    residuals = values - mean * weights
    return mean, math.sqrt(count / (count - 1) * float((residuals**2).sum())) / total


def figures(scores: Sequence[Score], originals: Sequence[Score]) -> dict[str, float]:
    """Return the scores of the model and the original model, and their changes, by name."""
    measured: dict[str, float] = {}
    for prefix, group in (("", scores), ("original_", originals)):
        for score in group:
            measured[f"{prefix}{score.name}"] = score.value
            if score.stderr is not None:
                measured[f"{prefix}{score.name}_stderr"] = score.stderr
    for score, original in zip(scores, originals, strict=False):
        if (compared := change(score, original)) is not None:
            scale, *values = compared
            names = (f"{score.name}_{scale}{end}" for end in ("", "_low", "_high"))
            measured |= dict(zip(names, values, strict=True))
    return measured


def change(score: Score, original: Score) -> tuple[Scale, float, float, float] | None:
    """Return model - original, or model / original, with its 95 % interval over documents.

    Paired over the same documents, which cancels their difficulty. None if not defined.
    """
    rule = AGGREGATIONS.get(score.aggregation)
    if rule is None or score.values is None or original.values is None or score.weights is None:
        return None
    mean, error = weighted_mean(score.values - original.values, score.weights)
    middle, spread = rule.sign * mean, abs(rule.sign) * Z_95 * error
    low, high = middle - spread, middle + spread
    if rule.scale == "ratio":
        return rule.scale, math.exp(middle), math.exp(low), math.exp(high)
    return rule.scale, middle, low, high


def notes(scores: Sequence[Score], originals: Sequence[Score]) -> dict[str, str]:
    """Return texts on each figure, and on whether its change is significant."""
    descriptions: dict[str, str] = {}
    for score in scores:
        direction = "higher" if score.is_higher_better else "lower"
        spread = "no standard error" if score.stderr is None else "standard error over documents"
        descriptions[score.name] = f"{score.documents} documents; {spread}; {direction} is better"
    for score, original in zip(scores, originals, strict=False):
        if (compared := change(score, original)) is not None:
            scale, _middle, low, high = compared
            descriptions[f"{score.name}_{scale}"] = _verdict(score, scale, low, high)
    return descriptions


def _verdict(score: Score, scale: Scale, low: float, high: float) -> str:
    no_change = 1.0 if scale == "ratio" else 0.0
    spread = f"{low:.4g} to {high:.4g}; the same documents pair by pair, 95 % interval"
    if low <= no_change <= high:
        return f"no difference that these {score.documents} documents can show: {spread}"
    is_better = (low > no_change) == score.is_higher_better
    return f"{'better' if is_better else 'worse'} than the original beyond chance: {spread}"
