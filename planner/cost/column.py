"""The type of a number that a search computes as a column, one value per strategy.

Formulas take columns as ``float``, because numbers and numpy columns have the same arithmetic.
What a column has not is one value: ``float``, ``int``, ``round``, ``range``, ``math``, ``if``,
``max`` and ``min`` fail on it, but only in the searches that have a column there. A ``Varying`` is
an int or a float to every formula, and mypy refuses the first six of it, also after arithmetic;
``max`` and ``min`` pass for it, and fail in tests/planner/laws, where every layout is costed as a
column too. Use the functions of ``planner.cost.quantity`` instead, or ``single`` where a request
has one strategy.
"""

import math
from typing import TYPE_CHECKING, Never, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    Flags = bool | npt.NDArray[np.bool_]

    class Varying(int):
        """A number, or a column of numbers."""

        # No call has an argument of type Never: mypy refuses what would call these.
        def __bool__(self, _: Never, /) -> Never: ...  # type: ignore[override]
        def __float__(self, _: Never, /) -> Never: ...  # type: ignore[override]
        def __int__(self, _: Never, /) -> Never: ...  # type: ignore[override]
        def __index__(self, _: Never, /) -> Never: ...  # type: ignore[override]
        def __trunc__(self, _: Never, /) -> Never: ...  # type: ignore[override]
        def __ceil__(self, _: Never, /) -> Never: ...  # type: ignore[override]
        def __floor__(self, _: Never, /) -> Never: ...  # type: ignore[override]
        def __round__(self, _: Never, /) -> Never: ...  # type: ignore[override]

        # A column of flags, which max() and sorted() do not take.
        def __lt__(self, other: float, /) -> Flags: ...  # type: ignore[override]
        def __le__(self, other: float, /) -> Flags: ...  # type: ignore[override]
        def __gt__(self, other: float, /) -> Flags: ...  # type: ignore[override]
        def __ge__(self, other: float, /) -> Flags: ...  # type: ignore[override]

        def __neg__(self) -> "Varying": ...
        def __add__(self, other: float, /) -> "Varying": ...
        def __radd__(self, other: float, /) -> "Varying": ...
        def __sub__(self, other: float, /) -> "Varying": ...
        def __rsub__(self, other: float, /) -> "Varying": ...
        def __mul__(self, other: float, /) -> "Varying": ...
        def __rmul__(self, other: float, /) -> "Varying": ...
        def __truediv__(self, other: float, /) -> "Varying": ...
        def __rtruediv__(self, other: float, /) -> "Varying": ...
        def __floordiv__(self, other: float, /) -> "Varying": ...
        def __rfloordiv__(self, other: float, /) -> "Varying": ...
        def __mod__(self, other: float, /) -> "Varying": ...
        def __rmod__(self, other: float, /) -> "Varying": ...

    class VaryingField:
        """A dataclass field that takes a number and reads as a ``Varying``."""

        def __get__(self, instance: object, owner: object) -> Varying: ...
        def __set__(self, instance: object, value: float) -> None: ...

    def _refused(value: Varying) -> None:
        """Hold mypy to it: an ignored error that is none is an error too."""
        float(value)  # type: ignore[arg-type]
        int(value)  # type: ignore[call-overload]
        round(value)  # type: ignore[call-overload]
        range(value)  # type: ignore[call-overload]
        math.log(2 * value)  # type: ignore[arg-type]
        math.ceil(value / 2)  # type: ignore[call-overload]
        _ = 1 if value else 2  # type: ignore[redundant-expr]

else:
    Varying = VaryingField = float


def varying(default: float) -> VaryingField:
    """Return the default of a field that may be a column."""
    return cast("VaryingField", default)


def single(value: object) -> int:
    """Return the whole number of a request's one strategy.

    Raises:
        TypeError: the value is a column.
    """
    if isinstance(value, np.ndarray):
        raise TypeError("a column of strategies has no single value")
    return int(cast("int", value))
