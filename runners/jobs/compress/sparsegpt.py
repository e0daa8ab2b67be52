"""SparseGPT: prune block by block and let the columns that are left make up for the error.

Source: Frantar and Alistarh 2023, arXiv:2301.00774, algorithm 1.
"""

import torch

from runners.jobs.compress.pruning import BLOCK, Pattern, two_of_four
from runners.jobs.compress.second_order import BLOCK_COLUMNS, DAMPING, inverse_factor


def sparsegpt(
    weight: torch.Tensor,
    gram: torch.Tensor,
    sparsity: float,
    pattern: Pattern,
    damping: float = DAMPING,
) -> torch.Tensor:
    """Return a matrix of the pattern whose outputs on the text of ``gram`` are nearest.

    Unstructured, each block of 128 columns loses the share on its own.

    Raises:
        ValueError: 2:4 was asked for rows that do not divide into fours.
    """
    rest = weight.float().clone()
    rest[:, gram.diagonal() == 0] = 0.0
    factor = inverse_factor(gram, damping)
    columns = rest.shape[1]
    if pattern == "2:4" and columns % BLOCK:
        two_of_four(rest)
    for begin in range(0, columns, BLOCK_COLUMNS):
        end = min(begin + BLOCK_COLUMNS, columns)
        saliency = _saliency(rest[:, begin:end], factor[begin:end, begin:end])
        kept = _kept(saliency, sparsity, pattern)
        errors = torch.zeros(len(rest), end - begin, device=rest.device)
        for column in range(begin, end):
            at = column - begin
            if pattern == "2:4" and at % BLOCK == 0:
                four = slice(column, column + BLOCK)
                kept[:, at : at + BLOCK] = two_of_four(
                    _saliency(rest[:, four], factor[four, four])
                )
            pruned = torch.where(kept[:, at], rest[:, column], 0.0)
            error = (rest[:, column] - pruned) / factor[column, column]
            rest[:, column + 1 : end] -= error[:, None] * factor[column, column + 1 : end][None]
            rest[:, column] = pruned
            errors[:, at] = error
        rest[:, end:] -= errors @ factor[begin:end, end:]
    return rest.to(weight.dtype)


def _saliency(block: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return block.square() / factor.diagonal().square()[None, :]


def _kept(saliency: torch.Tensor, sparsity: float, pattern: Pattern) -> torch.Tensor:
    if pattern == "2:4":
        return torch.ones_like(saliency, dtype=torch.bool)
    count = round(sparsity * saliency.numel())
    kept = torch.ones(saliency.numel(), dtype=torch.bool, device=saliency.device)
    kept[torch.topk(saliency.flatten(), count, largest=False).indices] = False
    return kept.view_as(saliency)
