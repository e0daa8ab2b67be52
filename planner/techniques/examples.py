"""Computed worked examples: each figure without and with a technique, and its published range."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.cost.memory import CLASSES
from planner.specs.base import JsonObject
from planner.specs.estimate import Estimate, EstimateRequest
from planner.techniques.registry import Example, Technique
from planner.workload.estimator import estimate_request

TERM = "term_"
ROUNDING = 1e-6


@dataclass(frozen=True)
class Change:
    """One figure without and with a technique, and whether it changed as published."""

    figure: str
    without: Any
    with_: Any
    expected: tuple[Any, Any]
    holds: bool

    def to_json(self) -> JsonObject:
        """Return the change as the command line prints it."""
        ratio = _ratio(self.without, self.with_)
        finite = {} if ratio is None or ratio == float("inf") else {"ratio": ratio}
        return {
            "figure": self.figure,
            "without": self.without,
            "with": self.with_,
            **finite,
            "expected": [str(end) if end == float("inf") else end for end in self.expected],
            "holds": self.holds,
        }


def overlaid(base: Mapping[str, Any], over: Mapping[str, Any]) -> JsonObject:
    """Return a document deep-merged with another one."""
    merged = dict(base)
    for key, value in over.items():
        current = merged.get(key)
        if isinstance(current, Mapping) and isinstance(value, Mapping):
            merged[key] = overlaid(current, value)
        else:
            merged[key] = value
    return merged


def both_estimates(example: Example) -> tuple[Estimate, Estimate]:
    """Return the example's estimates without and with the technique."""
    without, with_ = (
        estimate_request(EstimateRequest.model_validate(overlaid(example.request, over)))
        for over in (example.off, example.on)
    )
    return without, with_


def figure(estimate: Estimate, name: str) -> Any:  # noqa: ANN401 - a number or a verdict
    """Return a figure by name: a tensor class, a field of the estimate, or a term.

    Raises:
        KeyError: the estimate has no figure of that name.
    """
    if name in CLASSES:
        return float(estimate.memory.breakdown_bytes.get(name, 0))
    if name == "perplexity":
        return estimate.quality and (estimate.quality.perplexity_ratio or (0, None, 0))[1]
    if name.startswith(TERM):
        key = name.removeprefix(TERM)
        return sum(term.value for term in estimate.terms if term.key == key)
    for section in (estimate, estimate.memory, estimate.performance):
        if name in type(section).model_fields:
            return getattr(section, name)
    raise KeyError(name)


def _ratio(without: Any, with_: Any) -> float | None:  # noqa: ANN401 - figures of any kind
    if isinstance(without, bool) or isinstance(with_, bool) or with_ is None:
        return None
    if not without:
        return float("inf") if with_ else 1.0
    return float(with_) / float(without)


def changes(technique: Technique) -> tuple[Change, ...]:
    """Return the change of every figure of a technique's example, and of unlisted classes."""
    example = technique.example
    if example is None:
        return ()
    without, with_ = both_estimates(example)
    checked = []
    for name, (low, high) in example.expect.items():
        pair = figure(without, name), figure(with_, name)
        ratio = _ratio(*pair)
        holds = ratio is not None and low * (1 - ROUNDING) <= ratio <= high * (1 + ROUNDING)
        checked.append(Change(name, *pair, (low, high), holds))
    for name, expected in example.values.items():
        pair = figure(without, name), figure(with_, name)
        checked.append(Change(name, *pair, expected, pair == expected))
    listed = {*example.expect, *example.also}
    for name in CLASSES:
        pair = figure(without, name), figure(with_, name)
        if name not in listed and any(pair):
            is_unchanged = abs(pair[1] - pair[0]) <= 1 + ROUNDING * pair[0]
            checked.append(Change(name, *pair, (1.0, 1.0), is_unchanged))
    return tuple(checked)


def technique_row(technique: Technique) -> JsonObject:
    """Return a registry entry as the command line prints it, with its computed example."""
    row: JsonObject = technique.model_dump(mode="json", exclude={"used", "example", "needs"})
    row = {name: value for name, value in row.items() if value not in ("", {}, [], None)}
    row["phases"] = sorted(technique.phases)
    row["planned"] = technique.planned
    row["applicability"] = list(technique.applicability)
    example = technique.example
    if example is not None:
        row["example"] = {
            "without": overlaid(example.request, example.off),
            "with": overlaid(example.request, example.on),
            "published": example.published,
            "figures": [change.to_json() for change in changes(technique)],
        }
    return row
