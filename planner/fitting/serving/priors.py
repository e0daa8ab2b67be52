"""Choose the prior strengths of the serving fit by cross-validation.

Each pair of model and chip is left out in turn and predicted from the others. A strength changes
only if the mean error decreases by more than its standard error over the pairs. The choice is
repeated with each pair excluded entirely: the accuracy page's figures for an unseen pair use
strengths chosen without it. The freedom of layouts within a pair is chosen in the same manner over
the folds of sweeps that the page leaves out.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.fitting.robust_fit import Columns
from planner.fitting.serving.cases import ServingCase
from planner.fitting.serving.factors import fold_of, group_of
from planner.fitting.serving.fitting import (
    ServingFit,
    Strengths,
    fit_engines,
    fit_serving,
    serving_errors,
)

# Candidate values of each strength; the search starts at the first.
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
    "pair_experts": (1.0, 0.5, 2.0, 4.0),
}
# Freedom of a layout's parts relative to its pair, in spreads of the parts.
LAYOUT_GRID: dict[str, tuple[float, ...]] = {"layout": (1.0, 0.5, 2.0)}
FIXED = {
    "expert_exchange": 0.5,
    "scheduling": 0.3,
    # Hosts process their requests in Python or in C++, with or without one stream each.
    "requests": 1.0,
    "8bit": 0.2,
    "4bit": 0.2,
    "intake": 1.0,
    "steps_awaited": 0.7,
}
START: dict[str, float] = FIXED | {name: tried[0] for name, tried in GRID.items()}
TTFT_SHARE = 0.375  # ratio of the goals, 15 and 40 %
GROSSEST = 2.0  # errors beyond a factor of seven count the same


@dataclass(frozen=True)
class Search:
    """A cross-validation: left-out part, fit, unit of averaging, and candidate values."""

    part_of: Callable[[ServingCase], str]
    fit: Callable[[Sequence[ServingCase], Sequence[ServingCase], Strengths], ServingFit]
    unit_of: Callable[[ServingCase], str]
    grid: Mapping[str, tuple[float, ...]]


def of_engines(
    rest: Sequence[ServingCase], _: Sequence[ServingCase], strengths: Strengths
) -> ServingFit:
    """Return the fit of engines only, from which an unseen pair is predicted."""
    return fit_engines(rest, strengths)[0]


def of_pairs(
    rest: Sequence[ServingCase], left: Sequence[ServingCase], strengths: Strengths
) -> ServingFit:
    """Return the fit that includes the other points of the left-out points' pairs."""
    return fit_serving(rest, strengths, {case.pair for case in left})


ENGINES = Search(group_of, of_engines, lambda case: f"{case.engine} {case.group}", GRID)
LAYOUTS = Search(fold_of, of_pairs, lambda case: case.sweep, LAYOUT_GRID)


def missed(
    cases: Sequence[ServingCase], strengths: Strengths, search: Search = ENGINES
) -> Columns:
    """Return the mean error of each unit, such as a pair, under a fit without its part."""
    distances: dict[str, list[float]] = defaultdict(list)
    for part in sorted({search.part_of(case) for case in cases}):
        left_out = [case for case in cases if search.part_of(case) == part]
        rest = [case for case in cases if search.part_of(case) != part]
        errors = serving_errors(left_out, search.fit(rest, left_out, strengths))
        tpot, ttft = (np.abs(np.log1p(error)) for error in errors)
        combined = tpot + TTFT_SHARE * np.minimum(ttft, GROSSEST)
        for case, distance in zip(left_out, combined, strict=True):
            distances[search.unit_of(case)].append(float(distance))
    return np.array([float(np.mean(unit_errors)) for unit_errors in distances.values()])


def is_better(distances: Columns, best: Columns) -> bool:
    """Return whether the mean error decreases by more than its standard error.

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
    """Return the strengths of least error, by coordinate search."""
    best = {**start, **{name: candidates[0] for name, candidates in search.grid.items()}}
    least = missed(cases, best, search)
    for name, candidates in search.grid.items():
        for value in candidates[1:]:
            other = {**best, name: value}
            distances = missed(cases, other, search)
            if is_better(distances, least):
                best, least = other, distances
    return best


def chosen_without_each(
    cases: Sequence[ServingCase], search: Search, start: Strengths
) -> dict[str, dict[str, float]]:
    """Return the strengths chosen from all cases, and those chosen without each part."""
    strengths_by_part = {"none": chosen(cases, search, start)}
    for part in sorted({search.part_of(case) for case in cases}):
        rest = [case for case in cases if search.part_of(case) != part]
        strengths_by_part[part] = chosen(rest, search, start)
    return strengths_by_part


def build_priors(cases: Sequence[ServingCase]) -> dict[str, Any]:
    """Return the strengths of engines without each group, and of layouts without each fold."""
    engines = chosen_without_each(cases, ENGINES, START)
    layouts = chosen_without_each(cases, LAYOUTS, engines["none"])
    layout_only = {
        fold: {name: strengths[name] for name in LAYOUT_GRID}
        for fold, strengths in layouts.items()
    }
    return {"chosen": engines, "layouts": layout_only}
