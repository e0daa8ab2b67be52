"""Explanation of an estimate: every term with its equation, inputs and source."""

from typing import NamedTuple

from planner.specs.estimate import Estimate, Input, Term
from webapp.core import units
from webapp.core.display import quantity
from webapp.core.units import number, whole

UNITS = {"B": "bytes", "s": "seconds", "B/s": "bytes_per_second", "FLOP/s": "flops_per_second"}
READABLE = 1e9  # larger values use an exponent
GROUP_WORDS = {
    "memory": "Memory",
    "prefill": "Reading the prompt in",
    "decode": "Writing one token",
    "serving": "Concurrent requests",
    "train_step": "One training step",
    "step": "One training step",
    "compress": "Compression",
    "quality": "Quality",
    "cost": "Cost",
    "energy": "Energy",
}


class Line(NamedTuple):
    """One term as displayed."""

    name: str
    key: str
    equation: str
    value: str
    inputs: tuple[str, ...]
    provenance: str
    source: str


class Group(NamedTuple):
    """The terms of one group."""

    name: str
    lines: tuple[Line, ...]


def explain(estimate: Estimate) -> list[Group]:
    """Return the terms of an estimate by group, in order of computation."""
    groups: dict[str, list[Term]] = {}
    for term in estimate.terms:
        groups.setdefault(term.group, []).append(term)
    return [
        Group(GROUP_WORDS.get(name, name.replace("_", " ").capitalize()), tuple(map(_line, terms)))
        for name, terms in groups.items()
    ]


def _line(term: Term) -> Line:
    return Line(
        name=term.name,
        key=term.key,
        equation=term.equation,
        value=with_unit(term.value, term.unit),
        inputs=tuple(_input(term_input) for term_input in term.inputs),
        provenance=term.provenance,
        source=term.source,
    )


def _input(term_input: Input) -> str:
    value = (
        term_input.value
        if isinstance(term_input.value, str)
        else with_unit(float(term_input.value), term_input.unit)
    )
    return f"{term_input.symbol} = {value} ({term_input.name.replace('_', ' ')})"


def with_unit(value: float, unit: str) -> str:
    """Return a value of an equation for display."""
    if unit in {"FLOP", "parameters"}:
        scaled = units.flop(value) if unit == "FLOP" else units.parameters(value)
        return str(scaled)
    if unit in UNITS:
        return str(quantity(value, UNITS[unit]))
    if float(value).is_integer() and abs(value) < READABLE:
        return f"{whole(value)} {unit}".strip()
    text = number(value, 4) if abs(value) < READABLE else f"{value:.3e}"
    digits, e, exponent = text.partition("e")
    text = (digits.rstrip("0").rstrip(".") if "." in digits else digits) + e + exponent
    return f"{text} {unit}".strip()
