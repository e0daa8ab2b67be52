"""An exact solver of small linear programmes, which spares the planner a scientific library."""

import numpy as np
import numpy.typing as npt

Columns = npt.NDArray[np.float64]
TOLERANCE = 1e-11  # of a reduced cost and of a pivot, in rows scaled to one
MOST_PIVOTS = 10_000


def minimised(costs: Columns, rows: Columns, bounds: Columns, free: int) -> Columns | None:
    """Return the x >= 0 of least ``costs`` · x with ``rows`` · x <= ``bounds``; None if unbounded.

    The last ``free`` unknowns are slack: each has a negative coefficient in the rows that have it,
    and every row with a negative bound has one of them, so that a start is known.

    Source: Dantzig 1963, Linear Programming and Extensions, chapter 5 (the simplex method in a
    tableau); Bland 1977, doi:10.1287/moor.2.2.103 (the rule by which it ends).
    """
    height, width = rows.shape
    scale = np.abs(rows).max(axis=1)
    scale[scale == 0] = 1.0
    tableau = np.hstack([rows / scale[:, None], np.eye(height), (bounds / scale)[:, None]])
    reduced = np.concatenate([costs, np.zeros(height + 1)])
    basis = np.arange(width, width + height)

    def pivot(row: int, column: int) -> None:
        nonlocal reduced
        tableau[row] /= tableau[row, column]
        for other in range(height):
            if other != row and tableau[other, column]:
                tableau[other] -= tableau[other, column] * tableau[row]
        reduced = reduced - reduced[column] * tableau[row]
        basis[row] = column

    for column in range(width - free, width):
        held = np.flatnonzero(tableau[:, column] < 0)
        short = tableau[held, -1] / -tableau[held, column]
        if len(held) and short.min() < 0:
            pivot(int(held[short.argmin()]), column)
    for _ in range(MOST_PIVOTS):
        entering = np.flatnonzero(reduced[:-1] < -TOLERANCE * max(1.0, np.abs(costs).max()))
        if not len(entering):
            found = np.zeros(width + height)
            found[basis] = tableau[:, -1]
            return found[:width]
        column = int(entering[0])
        rising = np.flatnonzero(tableau[:, column] > TOLERANCE)
        if not len(rising):
            return None
        ratios = tableau[rising, -1] / tableau[rising, column]
        ties = rising[ratios <= ratios.min() + TOLERANCE]
        pivot(int(ties[basis[ties].argmin()]), column)
    return None
