"""The numbers that formulas work on: one strategy as floats, or many as numpy columns."""

from typing import cast

import numpy as np
import numpy.typing as npt

Quantity = float | npt.NDArray[np.float64]


def larger(left: Quantity, right: Quantity) -> Quantity:
    """Return the larger of two quantities, element by element."""
    return cast("Quantity", np.maximum(left, right))


def smaller(left: Quantity, right: Quantity) -> Quantity:
    """Return the smaller of two quantities, element by element."""
    return cast("Quantity", np.minimum(left, right))


def round_up(value: Quantity, step: Quantity = 1.0) -> Quantity:
    """Return ``value`` rounded up to a multiple of ``step``."""
    return cast("Quantity", np.ceil(np.asarray(value) / step) * step)


def where(condition: Quantity, then: Quantity, otherwise: Quantity) -> Quantity:
    """Return ``then`` where ``condition`` is positive, else ``otherwise``."""
    return cast("Quantity", np.where(np.asarray(condition) > 0, then, otherwise))
