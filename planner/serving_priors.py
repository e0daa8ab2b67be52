"""Chooses how strongly each prior of the serving fit holds, by sweeps that a fit has not seen.

Every pair of model and chip is left out in turn and predicted from the others. A strength is
changed only where pairs are missed by less than before, and by more than chance: the mean gain
must exceed its standard error over the pairs. For each pair this is done once more without looking
at the pair at all: what the accuracy page says of an unseen pair comes from strengths that were
chosen without it. How freely a measured layout differs from its pair is chosen the same way, by
the fifths of the sweeps that the page leaves out.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.fitting import Columns
from planner.serving_cases import ServingCase
from planner.serving_factors import fold_of, group_of
from planner.serving_fitting import (
    ServingFit,
    Strengths,
    fit_engines,
    fit_serving,
    serving_errors,
)

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
    "family": (0.5, 0.25, 1.0),
    "habits": (0.6, 1.0),
    "points": (10.0, 5.0, 20.0),
}
# How freely a layout's parts differ from its pair's, in spreads of the parts.
LAYOUT_GRID: dict[str, tuple[float, ...]] = {"layout": (1.0, 0.5, 2.0)}
FIXED = {
    "expert_exchange": 0.5,
    "scheduling": 0.3,
    # Hosts visit their requests in Python or in C++, and feed a stream for each or none.
    "requests": 1.0,
    "8bit": 0.2,
    "4bit": 0.2,
    "intake": 1.0,
    "steps_awaited": 0.7,
}
START: dict[str, float] = FIXED | {name: tried[0] for name, tried in GRID.items()}
TTFT_SHARE = 0.375  # the goals are 15 and 40 %
GROSSEST = 2.0  # an error of seven times counts as much as any larger one


@dataclass(frozen=True)
class Search:
    """What is left out in turn, how it is predicted, whose errors count as one, what is tried."""

    part_of: Callable[[ServingCase], str]
    fit: Callable[[Sequence[ServingCase], Sequence[ServingCase], Strengths], ServingFit]
    unit_of: Callable[[ServingCase], str]
    grid: Mapping[str, tuple[float, ...]]


def of_engines(
    rest: Sequence[ServingCase], _: Sequence[ServingCase], strengths: Strengths
) -> ServingFit:
    """Return what engines show: all that an unseen pair is predicted from."""
    return fit_engines(rest, strengths)[0]


def of_pairs(
    rest: Sequence[ServingCase], left: Sequence[ServingCase], strengths: Strengths
) -> ServingFit:
    """Return what the pairs of the points left out show elsewhere."""
    return fit_serving(rest, strengths, {case.pair for case in left})


ENGINES = Search(group_of, of_engines, lambda case: f"{case.engine} {case.group}", GRID)
LAYOUTS = Search(fold_of, of_pairs, lambda case: case.sweep, LAYOUT_GRID)


def missed(
    cases: Sequence[ServingCase], strengths: Strengths, search: Search = ENGINES
) -> Columns:
    """Return how far each unit, such as a pair, is missed by a fit without its part."""
    distances: dict[str, list[float]] = defaultdict(list)
    for part in sorted({search.part_of(case) for case in cases}):
        left = [case for case in cases if search.part_of(case) == part]
        rest = [case for case in cases if search.part_of(case) != part]
        errors = serving_errors(left, search.fit(rest, left, strengths))
        tpot, ttft = (np.abs(np.log1p(error)) for error in errors)
        both = tpot + TTFT_SHARE * np.minimum(ttft, GROSSEST)
        for case, distance in zip(left, both, strict=True):
            distances[search.unit_of(case)].append(float(distance))
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


def chosen(
    cases: Sequence[ServingCase], search: Search = ENGINES, start: Strengths = START
) -> dict[str, float]:
    """Return the strengths that miss least, each one changed in turn."""
    best = {**start, **{name: tried[0] for name, tried in search.grid.items()}}
    least = missed(cases, best, search)
    for name, tried in search.grid.items():
        for value in tried[1:]:
            other = {**best, name: value}
            distances = missed(cases, other, search)
            if is_better(distances, least):
                best, least = other, distances
    return best


def chosen_without_each(
    cases: Sequence[ServingCase], search: Search, start: Strengths
) -> dict[str, dict[str, float]]:
    """Return the strengths chosen by all cases, and those chosen without each part."""
    found = {"none": chosen(cases, search, start)}
    for part in sorted({search.part_of(case) for case in cases}):
        kept = [case for case in cases if search.part_of(case) != part]
        found[part] = chosen(kept, search, start)
    return found


def build_priors(cases: Sequence[ServingCase]) -> dict[str, Any]:
    """Return the strengths of engines without each group, of layouts without each fold."""
    engines = chosen_without_each(cases, ENGINES, START)
    layouts = chosen_without_each(cases, LAYOUTS, engines["none"])
    alone = {fold: {name: one[name] for name in LAYOUT_GRID} for fold, one in layouts.items()}
    return {"chosen": engines, "layouts": alone}
