"""FineQuant: choose the group size of each matrix by an error threshold.

Start with one scale per row and halve the group size while that reduces the error enough.
Source: Kim et al. 2023, arXiv:2308.09723, section 3.3; our threshold is on the squared error.
"""

import torch

from runners.jobs.compress.grid import Codes, Grid, round_to_nearest


def finequant(
    weight: torch.Tensor, smallest: Grid, dtype: torch.dtype, least_gain: float
) -> Codes:
    """Return nearest codes with an adaptive group size, at least that of ``smallest``.

    ``least_gain`` is the share of the error that halving the group size must remove.
    """
    size = weight.shape[1]
    codes = round_to_nearest(weight, Grid(smallest.bits, size), dtype)
    error = _squared_error(weight, codes)
    while size % 2 == 0 and size // 2 >= smallest.group_size:
        size //= 2
        finer = round_to_nearest(weight, Grid(smallest.bits, size), dtype)
        finer_error = _squared_error(weight, finer)
        if finer_error > (1.0 - least_gain) * error:
            break
        codes, error = finer, finer_error
    return codes


def _squared_error(weight: torch.Tensor, codes: Codes) -> float:
    return float((weight.float() - codes.weight().float()).square().sum())
