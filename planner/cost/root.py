"""Finds where a falling function crosses zero, of one number or of columns in step.

Source: Chandrupatla 1997, Advances in Engineering Software 28(3): inverse quadratic steps where
the last three points allow one, else false position with the end that stays counted half.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Ends = tuple[Values, Values, Values]
STEPS = 4


def falling_root(
    function: Callable[[float], float], ends: tuple[float, float], at_ends: tuple[float, float]
) -> float:
    """Return about where a function is zero, above at the first end and below at the last.

    Four further values are asked for: few enough for a function that costs whole columns.

    >>> round(falling_root(lambda x: 4 / x - x, (1.0, 100.0), (3.0, -99.96)), 2)
    2.0
    """
    b, a = ends
    at_b, at_a = at_ends
    step = np.asarray(at_a / (at_a - at_b))
    for _ in range(STEPS):
        x = a + step * (b - a)
        found = function(_plain(x))
        same = (np.asarray(found) > 0) == (np.asarray(at_a) > 0)
        c, at_c = np.where(same, a, b), np.where(same, at_a, at_b)
        b, at_b = _plain(np.where(same, b, a)), _plain(np.where(same, at_b, at_a))
        a, at_a = _plain(x), found
        step = _next_step(
            (np.asarray(a), np.asarray(b), c), (np.asarray(at_a), np.asarray(at_b), at_c)
        )
    return _plain(a + step * (b - a))


def _next_step(points: Ends, values: Ends) -> Values:
    """Return how far to go from the first point towards the second one."""
    (a, b, c), (at_a, at_b, at_c) = points, values
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        place = (a - b) / (c - b)
        height = (at_a - at_b) / (at_c - at_b)
        smooth = (height**2 < place) & ((1 - height) ** 2 < 1 - place)
        quadratic = at_a / (at_b - at_a) * at_c / (at_b - at_c)
        quadratic = quadratic + (c - a) / (b - a) * at_a / (at_c - at_a) * at_b / (at_c - at_b)
        halved = at_a / (at_a - at_b / 2)
    return np.where(at_a == 0, 0.0, np.where(smooth, quadratic, halved))


def _plain(value: float | Values) -> float:
    """Return one number as a number, so that what is costed with it is costed as one."""
    return float(value) if np.ndim(value) == 0 else value  # type: ignore[return-value]  # a column passes as a float, as in every formula
