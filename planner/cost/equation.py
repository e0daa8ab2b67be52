"""Formulas with their explanation, and the ledger of their evaluations.

A cost function has the text of its equation and the symbol of each argument. A ``Ledger`` calls it
and records the equation with its values, which the UI, the API and the tests read.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, update_wrapper
from typing import ClassVar, Generic, ParamSpec, cast

from planner.cost.quantity import Quantity
from planner.specs.base import OperatorClass
from planner.specs.estimate import Input, ProvenanceKind, Term

P = ParamSpec("P")

UNIT_BY_SUFFIX = {
    "_bytes_per_s": "B/s",
    "_bytes_per_element": "B",
    "_flops_per_s": "FLOP/s",
    "_bytes": "B",
    "_s": "s",
    "_flops": "FLOP",
    "_watts": "W",
    "_usd": "USD",
}
SYMBOLS_OF_ALL = {"calibration_factor": "k"}


@dataclass(frozen=True)
class Origin:
    """The provenance of a value (measured, published or modelled) and its source."""

    provenance: ProvenanceKind = "modelled"
    source: str = ""


class Equation(Generic[P]):
    """A pure function of keyword quantities, with the text of its equation."""

    def __init__(
        self,
        compute: Callable[P, Quantity],
        *,
        text: str,
        unit: str,
        symbols: dict[str, str],
        source: str,
    ) -> None:
        self.compute = compute
        self.text = text
        self.unit = unit
        self.symbols = symbols
        self.source = source
        update_wrapper(self, compute)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Quantity:
        """Return the value of the equation for floats or for numpy columns."""
        return self.compute(*args, **kwargs)

    @cached_property
    def key(self) -> str:
        """Return the name of the function."""
        return self.compute.__name__

    @cached_property
    def defaults(self) -> dict[str, Quantity]:
        """Return the default values of arguments that have a symbol in the equation."""
        parameters = inspect.signature(self.compute).parameters
        default_of = {name: parameter.default for name, parameter in parameters.items()}
        return {
            name: value
            for name, value in default_of.items()
            if name in self.symbols and isinstance(value, int | float)
        }

    def inputs(self, values: dict[str, Quantity]) -> tuple[Input, ...]:
        """Return all arguments, defaults included, with symbol, name and unit."""
        return tuple(
            Input(
                symbol=self.symbols.get(name, SYMBOLS_OF_ALL.get(name, name)),
                name=name.replace("_", " "),
                value=tidy(value),
                unit=unit_of(name),
            )
            for name, value in {**self.defaults, **values}.items()
        )


def equation(
    text: str, *, unit: str, symbols: dict[str, str], source: str = ""
) -> Callable[[Callable[P, Quantity]], Equation[P]]:
    """Return a decorator that attaches the equation's text to the function that computes it."""

    def attach(compute: Callable[P, Quantity]) -> Equation[P]:
        return Equation(compute, text=text, unit=unit, symbols=symbols, source=source)

    return attach


def unit_of(name: str) -> str:
    """Return the unit by the suffix of an argument's name, or '' for a plain number."""
    return next((unit for suffix, unit in UNIT_BY_SUFFIX.items() if name.endswith(suffix)), "")


def tidy(value: Quantity) -> float | int:
    """Return a quantity as an int if it is whole, else as a float."""
    number = float(value)
    return int(number) if number.is_integer() else number


@dataclass(frozen=True)
class Entry:
    """One recorded evaluation of an equation."""

    group: str
    key: str
    name: str
    equation: str
    unit: str
    value: float
    inputs: Callable[[], tuple[Input, ...]]
    operator_class: OperatorClass | None
    origin: Origin


@dataclass(frozen=True)
class Line:
    """The place of an evaluation in the explanation and its calibration factor."""

    group: str
    name: str
    key: str = ""
    operator_class: OperatorClass | None = None
    factor: float = 1.0
    origin: Origin = field(default_factory=Origin)


def calibrated(text: str) -> str:
    """Return an equation with the calibration factor before its right-hand side.

    >>> calibrated("t = S/B + l for n > 1")
    't = k · (S/B + l) for n > 1'
    """
    left, _, right = text.partition(" = ")
    body, when, condition = right.partition(" for ")
    return f"{left} = k · ({body}){when}{condition}"


class Ledger:
    """The record of every term of one estimate, in the order in which they were computed."""

    records: ClassVar[bool] = True

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def term(
        self, formula: Equation[P], line: Line, /, *args: P.args, **kwargs: P.kwargs
    ) -> float:
        """Return the formula's value times the line's calibration factor, and record both."""
        value = float(formula.compute(*args, **kwargs)) * line.factor
        values: dict[str, Quantity] = dict(kwargs)  # type: ignore[arg-type]  # formulas take quantities only
        text = formula.text
        if line.factor != 1.0:
            text = calibrated(text)
            values["calibration_factor"] = line.factor
        self.entries.append(
            Entry(
                group=line.group,
                key=line.key or formula.key,
                name=line.name,
                equation=text,
                unit=formula.unit,
                value=value,
                inputs=lambda: formula.inputs(values),
                operator_class=line.operator_class,
                origin=Origin(line.origin.provenance, line.origin.source or formula.source),
            )
        )
        return value

    def copy(self) -> "Ledger":
        """Return an independent ledger with a copy of the entries."""
        ledger = Ledger()
        ledger.entries = list(self.entries)
        return ledger

    def value_of(self, group: str, key: str) -> float:
        """Return the sum of the values recorded under a group and key."""
        return sum(e.value for e in self.entries if e.group == group and e.key == key)

    def terms(self) -> tuple[Term, ...]:
        """Return the entries as terms of an estimate."""
        return tuple(
            Term(
                group=entry.group,
                key=entry.key,
                name=entry.name,
                equation=entry.equation,
                inputs=entry.inputs(),
                value=entry.value,
                unit=entry.unit,
                operator_class=entry.operator_class,
                provenance=entry.origin.provenance,
                source=entry.origin.source,
            )
            for entry in self.entries
        )


class Unrecorded(Ledger):
    """A ledger that computes terms without recording them, also for columns of strategies.

    Columns give a column. Its type is float for the type checker, because both support the same
    arithmetic; ``planner.cost.columns`` has the operations that differ.
    """

    records = False

    def term(
        self, formula: Equation[P], line: Line, /, *args: P.args, **kwargs: P.kwargs
    ) -> float:
        """Return the formula's value times the line's calibration factor."""
        return cast("float", formula.compute(*args, **kwargs) * line.factor)
