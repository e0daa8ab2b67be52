"""Selection functions for numbers and for numpy columns.

A formula that costs single strategies and whole spaces of them must use these functions instead
of ``if``, ``min``, ``max`` and ``ceil`` on values. On plain numbers they are plain Python with
identical results; if an argument is a numpy array, they work element by element with
broadcasting, so a value that depends on few choices is computed once for all others. All
arguments are evaluated, so an unselected branch must not divide by zero where it matters.
"""

import math
from collections.abc import Iterable
from functools import reduce
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from planner.cost.quantity import Quantity

# Numbers give a number, also for the type checker; a column gives a column.
Number = TypeVar("Number", float, Quantity)
Flag = bool | npt.NDArray[np.bool_]


def is_column(*values: object) -> bool:
    """Return whether any value is a numpy array rather than a plain number."""
    for value in values:  # noqa: SIM110 - a loop takes half the time of any(), a million times
        if isinstance(value, np.ndarray):
            return True
    return False


def where(condition: object, then: Number, otherwise: Number) -> Number:
    """Return ``then`` where the condition holds, else ``otherwise``.

    >>> where(2 > 1, 10.0, 0.0)
    10.0
    """
    if isinstance(condition, np.ndarray):
        return cast("Number", np.where(condition, then, otherwise))
    return then if condition else otherwise


def maximum(left: Number, right: Number) -> Number:
    """Return the larger of two quantities, element by element."""
    if is_column(left, right):
        return cast("Number", np.maximum(left, right))
    return max(left, right)


def minimum(left: Number, right: Number) -> Number:
    """Return the smaller of two quantities, element by element."""
    if is_column(left, right):
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
    if is_column(value):
        return cast("Number", np.ceil(value))
    return float(math.ceil(value))


def floor(value: Number) -> Number:
    """Return the quantity rounded down to a whole number."""
    if is_column(value):
        return cast("Number", np.floor(value))
    return float(math.floor(value))


def round_up(value: Quantity, step: Quantity = 1.0) -> Quantity:
    """Return the quantity rounded up to a multiple of ``step``.

    >>> round_up(17.0, 16.0)
    32.0
    """
    return ceil(value / step) * step


def log(value: Number) -> Number:
    """Return the natural logarithm of a positive quantity, element by element."""
    return cast("Number", np.log(value)) if is_column(value) else math.log(value)


def divides(divisor: Quantity, value: Quantity) -> Flag:
    """Return whether a quantity is a whole multiple of a divisor."""
    return cast("Flag", value % divisor == 0)


def both(left: Flag, right: Flag) -> Flag:
    """Return whether both conditions hold, element by element."""
    if is_column(left, right):
        return cast("Flag", np.logical_and(left, right))
    return bool(left) and bool(right)


def either(left: Flag, right: Flag) -> Flag:
    """Return whether at least one condition holds, element by element."""
    if is_column(left, right):
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
