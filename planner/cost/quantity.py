"""The numbers that formulas work on: one strategy as floats, or many as numpy columns."""

import numpy as np
import numpy.typing as npt

Quantity = float | npt.NDArray[np.float64]
