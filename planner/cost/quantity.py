"""Formulas over numbers or columns, with their explanation and the ledger of their evaluations."""

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property, reduce, update_wrapper
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from planner.cost.column import Varying
from planner.specs.base import OperatorClass
from planner.specs.estimate import EquationInput, ProvenanceKind, Term
from planner.specs.model import LayerGroup, ModelSpec

Quantity = float | npt.NDArray[np.float64]


# Selection functions for numbers and for numpy columns.
#
# A formula that costs single strategies and whole spaces of them must use these functions instead
# of ``if``, ``min``, ``max`` and ``ceil`` on values, of the type in ``planner.cost.column``. On
# plain numbers they are plain Python with identical results; if an argument is a numpy array,
# they work element by element with broadcasting, so a value that depends on few choices is
# computed once for all others. All arguments are evaluated, so an unselected branch must not
# divide by zero where it matters.


# Numbers give a number, also for the type checker; a column gives a column.
Number = TypeVar("Number", Varying, float, Quantity)
Flag = bool | npt.NDArray[np.bool_]


def is_column(*values: object) -> bool:
    """Return whether any value is a numpy array rather than a plain number."""
    for value in values:  # noqa: SIM110 - a loop takes half the time of any(), a million times
        if isinstance(value, np.ndarray):
            return True
    return False


@overload
def where(condition: object, then: Varying, otherwise: float) -> Varying: ...
@overload
def where(condition: object, then: float, otherwise: Varying) -> Varying: ...
@overload
def where(condition: object, then: Number, otherwise: Number) -> Number: ...
def where(condition: object, then: Number, otherwise: Number) -> Number:
    """Return ``then`` where the condition holds, else ``otherwise``.

    >>> where(2 > 1, 10.0, 0.0)
    10.0
    """
    if isinstance(condition, np.ndarray):
        return cast("Number", np.where(condition, then, otherwise))
    return then if condition else otherwise


@overload
def maximum(left: Varying, right: float) -> Varying: ...
@overload
def maximum(left: float, right: Varying) -> Varying: ...
@overload
def maximum(left: Number, right: Number) -> Number: ...
def maximum(left: Number, right: Number) -> Number:
    """Return the larger of two quantities, element by element."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):  # type: ignore[redundant-expr]  # a column passes as a float
        return cast("Number", np.maximum(left, right))
    return max(left, right)


@overload
def minimum(left: Varying, right: float) -> Varying: ...
@overload
def minimum(left: float, right: Varying) -> Varying: ...
@overload
def minimum(left: Number, right: Number) -> Number: ...
def minimum(left: Number, right: Number) -> Number:
    """Return the smaller of two quantities, element by element."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):  # type: ignore[redundant-expr]  # a column passes as a float
        return cast("Number", np.minimum(left, right))
    return min(left, right)


def largest(values: Iterable[Number]) -> Number:
    """Return the largest of several quantities, element by element.

    Raises:
        TypeError: ``values`` is empty.
    """
    return reduce(maximum, values)


def ceil(value: Number) -> Number:
    """Return the quantity rounded up to a whole number."""
    number: Any = value
    return cast("Number", np.ceil(number) if is_column(value) else float(math.ceil(number)))


def floor(value: Number) -> Number:
    """Return the quantity rounded down to a whole number."""
    number: Any = value
    return cast("Number", np.floor(number) if is_column(value) else float(math.floor(number)))


def round_up(value: Quantity, step: Quantity = 1.0) -> Quantity:
    """Return the quantity rounded up to a multiple of ``step``.

    >>> round_up(17.0, 16.0)
    32.0
    """
    return ceil(value / step) * step


def log(value: Number) -> Number:
    """Return the natural logarithm of a positive quantity, element by element."""
    number: Any = value
    return cast("Number", np.log(number) if is_column(value) else math.log(number))


def divides(divisor: Quantity, value: Quantity) -> Flag:
    """Return whether a quantity is a whole multiple of a divisor."""
    return cast("Flag", value % divisor == 0)


def both(left: Flag, right: Flag) -> Flag:
    """Return whether both conditions hold, element by element."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return cast("Flag", np.logical_and(left, right))
    return bool(left) and bool(right)


def either(left: Flag, right: Flag) -> Flag:
    """Return whether at least one condition holds, element by element."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return cast("Flag", np.logical_or(left, right))
    return bool(left) or bool(right)


def negate(condition: Flag) -> Flag:
    """Return whether a condition does not hold, element by element."""
    return ~condition if isinstance(condition, np.ndarray) else not condition


def any_of(condition: Flag) -> bool:
    """Return whether a condition holds for any element.

    >>> any_of(False)
    False
    """
    return bool(np.any(condition)) if is_column(condition) else bool(condition)


# Formulas with their explanation, and the ledger of their evaluations.
#
# A cost function has the text of its equation and the symbol of each argument. A ``Ledger`` calls
# it and records the equation with its values, which the UI, the API and the tests read.


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

    def inputs(self, values: dict[str, Quantity]) -> tuple[EquationInput, ...]:
        """Return all arguments, defaults included, with symbol, name and unit."""
        return tuple(
            EquationInput(
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


@cache
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
    inputs: Callable[[], tuple[EquationInput, ...]]
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


def with_calibration_factor(text: str) -> str:
    """Return an equation with the calibration factor before its right-hand side.

    >>> with_calibration_factor("t = S/B + l for n > 1")
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
    ) -> Varying:
        """Return the formula's value times the line's calibration factor, and record both."""
        value = float(formula.compute(*args, **kwargs)) * line.factor
        values: dict[str, Quantity] = dict(kwargs)  # type: ignore[arg-type]  # formulas take quantities only
        text = formula.text
        if line.factor != 1.0:
            text = with_calibration_factor(text)
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
        return cast("Varying", value)

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


class NullLedger(Ledger):
    """A ledger that computes terms without recording them, also for columns of strategies.

    Columns give a column: the type of a term is ``Varying`` for the type checker.
    """

    records = False

    def term(
        self, formula: Equation[P], line: Line, /, *args: P.args, **kwargs: P.kwargs
    ) -> Varying:
        """Return the formula's value times the line's calibration factor."""
        return formula.compute(*args, **kwargs) * line.factor  # type: ignore[return-value]  # a column passes as a float


# The root of a falling function, for one number or for columns in parallel.
#
# Source: Chandrupatla 1997, Advances in Engineering Software 28(3): inverse quadratic steps if the
# last three points allow one, else false position with half the value at the retained end.


Values = npt.NDArray[np.float64]
Ends = tuple[Values, Values, Values]
STEPS = 4


def falling_root(
    function: Callable[[float], float], ends: tuple[float, float], at_ends: tuple[float, float]
) -> float:
    """Return an approximate root; the function is positive at the first end, negative at the last.

    Evaluates the function four more times, because it may cost whole columns.

    >>> round(falling_root(lambda x: 4 / x - x, (1.0, 100.0), (3.0, -99.96)), 2)
    2.0
    """
    b, a = ends
    at_b, at_a = at_ends
    step = _numpy(at_a / (at_a - at_b))
    for _ in range(STEPS):
        x = a + step * (b - a)
        value = function(_plain(x))
        same_sign = (_numpy(value) > 0) == (_numpy(at_a) > 0)
        c, at_c = where(same_sign, a, b), where(same_sign, at_a, at_b)
        b, at_b = _plain(where(same_sign, b, a)), _plain(where(same_sign, at_b, at_a))
        a, at_a = _plain(x), value
        step = _next_step(
            (_numpy(a), _numpy(b), _numpy(c)), (_numpy(at_a), _numpy(at_b), _numpy(at_c))
        )
    return _plain(a + step * (b - a))


def _next_step(points: Ends, values: Ends) -> Values:
    """Return the next step as a share of the distance from the first point to the second."""
    (a, b, c), (at_a, at_b, at_c) = points, values
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        place = (a - b) / (c - b)
        height = (at_a - at_b) / (at_c - at_b)
        smooth = (height * height < place) & ((1 - height) * (1 - height) < 1 - place)
        quadratic = at_a / (at_b - at_a) * at_c / (at_b - at_c)
        quadratic = quadratic + (c - a) / (b - a) * at_a / (at_c - at_a) * at_b / (at_c - at_b)
        halved = at_a / (at_a - at_b / 2)
    return _numpy(where(at_a == 0, 0.0, where(smooth, quadratic, halved)))


def _numpy(value: float | Values) -> Values:
    """Return a column unchanged and a number as numpy float, which can divide by zero."""
    return value if isinstance(value, np.ndarray) else np.float64(value)  # type: ignore[return-value]  # a scalar passes as a column


def _plain(value: float | Values) -> float:
    """Return a column unchanged and a numpy scalar as a float."""
    return value if isinstance(value, np.ndarray) else float(value)  # type: ignore[return-value]  # a column passes as a float, as in every formula


# A quantity per group of layers, for models with different kinds of layer.


@dataclass(frozen=True, eq=False)
class PerLayerGroup:
    """One quantity for each group of ``model.layers_by_attention``, in their order.

    It supports scaling and addition like a number, for all groups at once.
    """

    values: tuple[Quantity, ...]

    # Let numpy columns on the left use __rmul__.
    __array_ufunc__ = None

    @classmethod
    def of(cls, model: ModelSpec, rule: Callable[[LayerGroup], Quantity]) -> "PerLayerGroup":
        """Return the rule's value per layer, summed over the layers of each group."""
        return cls(tuple(group.count * rule(group) for group in model.layers_by_attention))

    def __mul__(self, factor: Quantity) -> "PerLayerGroup":
        """Return every group's quantity times a factor."""
        return PerLayerGroup(tuple(value * factor for value in self.values))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Quantity) -> "PerLayerGroup":
        """Return every group's quantity divided by a divisor."""
        return PerLayerGroup(tuple(value / divisor for value in self.values))

    def __add__(self, other: "PerLayerGroup") -> "PerLayerGroup":
        """Return the sums group by group."""
        return PerLayerGroup(tuple(a + b for a, b in zip(self.values, other.values, strict=True)))

    @property
    def total(self) -> Quantity:
        """Return the sum over all groups."""
        return sum(self.values[1:], start=self.values[0])
