"""Chooses how strongly each prior of the serving fit holds, by sweeps that a fit has not seen.

Every pair of model and chip is left out in turn and predicted from the others. A strength is
changed only where pairs are missed by less than before, and by more than chance: the mean gain
must exceed its standard error over the pairs. For each pair this is done once more without looking
at the pair at all: what the accuracy page says of an unseen pair comes from strengths that were
chosen without it.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.fitting import Columns
from planner.serving_cases import Pair, ServingCase
from planner.serving_fitting import Strengths, fit_engines, serving_errors

# What is tried for each strength; the first is where the search starts.
GRID: dict[str, tuple[float, ...]] = {
    "experts": (0.3, 0.15, 0.6),
    "further": (1.6, 0.8, 0.4),
    "issue": (0.25, 0.12, 0.5),
    "linear": (0.1, 0.2),
    "attention": (0.3, 0.15),
    "tensor_parallel": (0.2, 0.1, 0.4),
    "elementwise": (1.5, 0.7),
    "company_ratio": (1.5, 0.7),
    "burst_ratio": (1.0, 2.0),
    "prompts_ahead": (0.7, 0.35),
    "shared": (1.0, 0.5),
    "engine": (0.3, 0.15, 0.6),
    "engine_alike": (0.3, 1.0),
    "engine_experts": (1.0, 0.5, 2.0),
    "habits": (0.6, 1.0),
    "points": (10.0, 5.0, 20.0),
}
FIXED = {
    "expert_exchange": 0.5,
    "scheduling": 0.3,
    "8bit": 0.2,
    "4bit": 0.2,
    "intake": 1.0,
    "steps_awaited": 0.7,
}
START: dict[str, float] = FIXED | {name: tried[0] for name, tried in GRID.items()}
TTFT_SHARE = 0.375  # the goals are 15 and 40 %
GROSSEST = 2.0  # an error of seven times counts as much as any larger one


def missed(cases: Sequence[ServingCase], strengths: Strengths) -> Columns:
    """Return how far each pair of engine and group is missed by a fit without its group."""
    distances: dict[Pair, list[float]] = defaultdict(list)
    for group in sorted({case.group for case in cases}):
        fit, _ = fit_engines([case for case in cases if case.group != group], strengths)
        left = [case for case in cases if case.group == group]
        tpot, ttft = (np.abs(np.log1p(errors)) for errors in serving_errors(left, fit))
        both = tpot + TTFT_SHARE * np.minimum(ttft, GROSSEST)
        for case, distance in zip(left, both, strict=True):
            distances[case.pair].append(float(distance))
    return np.array([float(np.mean(found)) for found in distances.values()])


def is_better(distances: Columns, best: Columns) -> bool:
    """Return whether pairs are missed by less, in the mean by more than its standard error.

    >>> is_better(np.array([0.1, 0.2]), np.array([0.2, 0.3]))
    True
    >>> is_better(np.array([0.1, 0.3]), np.array([0.3, 0.2]))
    False
    """
    gains = best - distances
    return bool(gains.mean() > gains.std(ddof=1) / np.sqrt(len(gains)))


def chosen(cases: Sequence[ServingCase]) -> Strengths:
    """Return the strengths that miss least, each one changed in turn."""
    best, least = START, missed(cases, START)
    for name, tried in GRID.items():
        for value in tried[1:]:
            other = {**best, name: value}
            distances = missed(cases, other)
            if is_better(distances, least):
                best, least = other, distances
    return best


def build_priors(cases: Sequence[ServingCase]) -> dict[str, Any]:
    """Return the strengths chosen by all pairs, and those chosen without each group."""
    found: dict[str, Any] = {"none": chosen(cases)}
    for group in sorted({case.group for case in cases}):
        found[group] = chosen([case for case in cases if case.group != group])
    return {"chosen": found}
