"""Why the numbers are what they are: every term with its equation, values and origin."""

from typing import NamedTuple

from planner.specs.estimate import Estimate, Input, Term
from webapp.core import units
from webapp.core.display import quantity
from webapp.core.units import number, whole

UNITS = {"B": "bytes", "s": "seconds", "B/s": "bytes_per_second", "FLOP/s": "flops_per_second"}
READABLE = 1e9  # what is larger is written with an exponent
GROUP_WORDS = {
    "memory": "Memory",
    "prefill": "Reading the prompt in",
    "decode": "Writing one token",
    "train_step": "One training step",
    "step": "One training step",
    "compress": "Compression",
    "quality": "Quality",
    "cost": "Cost",
    "energy": "Energy",
}


class Line(NamedTuple):
    """One term as the page shows it."""

    name: str
    key: str
    equation: str
    value: str
    inputs: tuple[str, ...]
    provenance: str
    source: str


class Group(NamedTuple):
    """Terms that belong together."""

    name: str
    lines: tuple[Line, ...]


def explain(estimate: Estimate) -> list[Group]:
    """Return the terms of an estimate by group, in the order in which they were computed."""
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
        inputs=tuple(_input(one) for one in term.inputs),
        provenance=term.provenance,
        source=term.source,
    )


def _input(one: Input) -> str:
    value = one.value if isinstance(one.value, str) else with_unit(float(one.value), one.unit)
    return f"{one.symbol} = {value} ({one.name.replace('_', ' ')})"


def with_unit(value: float, unit: str) -> str:
    """Return a value of an equation as people read it."""
    if unit in {"FLOP", "parameters"}:
        scaled = units.flop(value) if unit == "FLOP" else units.parameters(value)
        return str(scaled)
    if unit in UNITS:
        return str(quantity(value, UNITS[unit]))
    if float(value).is_integer() and abs(value) < READABLE:
        return f"{whole(value)} {unit}".strip()
    text = number(value, 4) if abs(value) < READABLE else f"{value:.3e}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return f"{text} {unit}".strip()


SUMMED = ("step", "ttft", "tpot", "prefill_step", "decode_step")
MOST = 3


def main_lines(estimate: Estimate) -> list[Line]:
    """Return the largest times of the resource that binds: what sets the pace."""
    binding = [term for term in estimate.terms if term.operator_class == estimate.bound_by]
    times = [term for term in binding if term.unit == "s" and term.key not in SUMMED]
    largest = sorted(times, key=lambda term: term.value, reverse=True)[:MOST]
    return [_line(term) for term in largest]
