"""GPTQ: round column by column and let the columns that are left make up for the error.

Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1, with the reference implementation's
order by activation ("act-order"). A group's scales are those of the untouched matrix: taken as
late as its first column, they grew with the error that was passed on, and 2 bits lost to rounding.
"""

import torch

from runners.jobs.compress.grid import Codes, Grid, group_scales, nearest
from runners.jobs.compress.second_order import BLOCK_COLUMNS, DAMPING, inverse_factor


def gptq(
    weight: torch.Tensor,
    gram: torch.Tensor,
    grid: Grid,
    dtype: torch.dtype,
    *,
    is_act_ordered: bool = False,
    damping: float = DAMPING,
) -> Codes:
    """Return codes whose outputs on the text of ``gram`` are nearest, greedily by column.

    Ordered by activation, columns of large inputs are rounded first.
    """
    rest = weight.float().clone()
    rest[:, gram.diagonal() == 0] = 0.0
    scales = group_scales(rest, grid, dtype)
    columns = rest.shape[1]
    order = torch.arange(columns, device=rest.device)
    if is_act_ordered:
        order = torch.argsort(gram.diagonal(), descending=True)
    factor = inverse_factor(gram[order][:, order], damping)
    rest = rest[:, order].contiguous()
    codes = torch.zeros_like(rest)
    for begin in range(0, columns, BLOCK_COLUMNS):
        end = min(begin + BLOCK_COLUMNS, columns)
        errors = torch.zeros(len(rest), end - begin, device=rest.device)
        for column in range(begin, end):
            scale = scales[:, int(order[column]) // grid.group_size]
            codes[:, column] = nearest(rest[:, column], scale, grid)
            kept = codes[:, column] * scale.float()
            error = (rest[:, column] - kept) / factor[column, column]
            rest[:, column:end] -= error[:, None] * factor[column, column:end][None, :]
            errors[:, column - begin] = error
        rest[:, end:] -= errors @ factor[begin:end, end:]
    return Codes(codes[:, torch.argsort(order)].to(torch.int8), scales, grid)
