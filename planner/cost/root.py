"""The root of a falling function, for one number or for columns in parallel.

Source: Chandrupatla 1997, Advances in Engineering Software 28(3): inverse quadratic steps if the
last three points allow one, else false position with half the value at the retained end.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from planner.cost.columns import where

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
