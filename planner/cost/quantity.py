"""The type of formula values: a float for one strategy or a numpy column for many."""

import numpy as np
import numpy.typing as npt

Quantity = float | npt.NDArray[np.float64]
