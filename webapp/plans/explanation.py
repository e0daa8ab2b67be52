"""Explanation of an estimate: every term with its equation, inputs and source."""

import math
from typing import NamedTuple

from planner.specs.estimate import Estimate, Input, Term
from webapp.core import units
from webapp.core.display import quantity
from webapp.core.units import DAY, HOUR, MINUS, MINUTE, NBSP, THIN, number, whole

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


# The operators of each phase's time; their seconds add up to the phase's figure.


LEAST_SHARE = 0.005  # of a headline: smaller parts are combined
DIGITS = 3  # of a total
# Unit of a total, by its minimum in seconds.
SCALES = (
    (2 * DAY, DAY, "days"),
    (2 * HOUR, HOUR, "h"),
    (2 * MINUTE, MINUTE, "min"),
    (1.0, 1.0, "s"),
)
OTHERS = "Everything else"
# Phase -> label of its sum, its headline figure, label of the figure's remainder.
PHASES = {
    "prefill": ("First token, mean", "ttft_seconds", "Queueing and admission"),
    "decode": ("Each further token, mean", "tpot_seconds", "Prefill of other requests"),
    "train_step": (
        "One training step",
        "step_seconds",
        "Pipeline bubble and exposed communication",
    ),
    "compress": ("The compression", "duration_seconds", "Not attributed"),
}
OF_A_BATCH = {"prefill": "Prompts read in", "decode": "Each further token"}  # all at once: no mean
SPENT_TWICE = "Overlapped with the others"


class Part(NamedTuple):
    """The time of one operator in a phase."""

    name: str
    value: str
    share: str
    seconds: float


class Phase(NamedTuple):
    """One phase: its headline and the parts that add up to it."""

    name: str
    total: str
    seconds: float
    parts: tuple[Part, ...]


def phases_of(estimate: Estimate, *, is_batch: bool = False) -> list[Phase]:
    """Return the phases that an estimate contains."""
    names = OF_A_BATCH if is_batch else {}
    phases = (_phase(estimate, key, names.get(key, PHASES[key][0])) for key in PHASES)
    return [phase for phase in phases if phase is not None]


def _phase(estimate: Estimate, key: str, name: str) -> Phase | None:
    _, figure, rest_name = PHASES[key]
    by_class = estimate.time_breakdown_seconds.get(key)
    total = getattr(estimate.performance, figure)
    if not by_class or not total:
        return None
    seconds = _operators(estimate, key, by_class)
    rest = total - sum(seconds.values())
    if abs(rest) > LEAST_SHARE * total:
        seconds[rest_name if rest > 0 else SPENT_TWICE] = rest
    small = sum(each for each in seconds.values() if abs(each) < LEAST_SHARE * total)
    shown = {
        operator: each for operator, each in seconds.items() if abs(each) >= LEAST_SHARE * total
    }
    remainder = total - sum(shown.values()) if small else 0.0
    if remainder:
        shown[OTHERS] = remainder
    parts = sorted(shown.items(), key=lambda item: (item[0] == OTHERS, -item[1]))
    return Phase(
        name, _in_unit_of_total(total, total), total, tuple(_part(*each, total) for each in parts)
    )


def _operators(estimate: Estimate, key: str, by_class: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each operator name.

    The terms of a class are per micro-batch: they are scaled to the total of the class. Classes
    fully overlapped by others take no time.
    """
    terms = [term for term in estimate.terms if term.group == key and term.unit == "s"]
    seconds: dict[str, float] = {}
    for kind, class_seconds in by_class.items():
        own = [term for term in terms if term.operator_class == kind and term.value > 0]
        term_seconds = sum(term.value for term in own)
        if not term_seconds and class_seconds:
            seconds[kind.replace("_", " ").capitalize()] = class_seconds
        for term in own:
            seconds[term.name] = (
                seconds.get(term.name, 0.0) + term.value / term_seconds * class_seconds
            )
    return seconds


def _part(name: str, seconds: float, total: float) -> Part:
    return Part(name, _in_unit_of_total(seconds, total), _percent(seconds / total), seconds)


def _percent(part: float) -> str:
    """Return a share in whole per cent; the seconds next to it are precise."""
    return f"{whole(100 * part)} %" if abs(part) >= 1 / 100 else "< 1 %"


def _in_unit_of_total(seconds: float, total: float) -> str:
    """Return a part in the unit and precision of its total, so that a column adds up."""
    size, unit = next(
        ((size, unit) for least, size, unit in SCALES if total >= least), (1 / 1000, "ms")
    )
    decimals = max(0, DIGITS - 1 - math.floor(math.log10(total / size)))
    value, least = seconds / size, 10.0**-decimals
    if abs(value) < least / 2:
        return f"< {least:g}{NBSP}{unit}"
    text = f"{value:,.{decimals}f}".replace("-", MINUS).replace(",", THIN)
    return f"{text}{NBSP}{unit}"
