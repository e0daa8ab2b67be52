"""GPTQ: quantise column by column and compensate the error in the remaining columns.

Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1, with the reference implementation's
"act-order". Group scales come from the original matrix: computed when the group's first column is
reached, they include propagated error, and 2-bit results were worse than rounding to nearest.
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
    """Return codes that minimise the output error on the text of ``gram``, greedily by column.

    With ``is_act_ordered``, columns of large inputs are quantised first.
    """
    remaining = weight.float().clone()
    remaining[:, gram.diagonal() == 0] = 0.0
    scales = group_scales(remaining, grid, dtype)
    columns = remaining.shape[1]
    order = torch.arange(columns, device=remaining.device)
    if is_act_ordered:
        order = torch.argsort(gram.diagonal(), descending=True)
    factor = inverse_factor(gram[order][:, order], damping)
    remaining = remaining[:, order].contiguous()
    codes = torch.zeros_like(remaining)
    for begin in range(0, columns, BLOCK_COLUMNS):
        end = min(begin + BLOCK_COLUMNS, columns)
        errors = torch.zeros(len(remaining), end - begin, device=remaining.device)
        for column in range(begin, end):
            scale = scales[:, int(order[column]) // grid.group_size]
            codes[:, column] = nearest(remaining[:, column], scale, grid)
            dequantised = codes[:, column] * scale.float()
            error = (remaining[:, column] - dequantised) / factor[column, column]
            remaining[:, column:end] -= error[:, None] * factor[column, column:end][None, :]
            errors[:, column - begin] = error
        remaining[:, end:] -= errors @ factor[begin:end, end:]
    return Codes(codes[:, torch.argsort(order)].to(torch.int8), scales, grid)
