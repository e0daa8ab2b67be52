"""SparseGPT: prune block by block and compensate the error in the remaining columns.

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
    """Prune a matrix to the pattern with least output error on the text of ``gram``.

    Unstructured pruning removes the share ``sparsity`` from each block of 128 columns.

    Raises:
        ValueError: the pattern is 2:4 and the row length is no multiple of 4.
    """
    remaining = weight.float().clone()
    remaining[:, gram.diagonal() == 0] = 0.0
    factor = inverse_factor(gram, damping)
    columns = remaining.shape[1]
    if pattern == "2:4" and columns % BLOCK:
        two_of_four(remaining)
    for begin in range(0, columns, BLOCK_COLUMNS):
        end = min(begin + BLOCK_COLUMNS, columns)
        saliency = _saliency(remaining[:, begin:end], factor[begin:end, begin:end])
        mask = _keep_mask(saliency, sparsity, pattern)
        errors = torch.zeros(len(remaining), end - begin, device=remaining.device)
        for column in range(begin, end):
            at = column - begin
            if pattern == "2:4" and at % BLOCK == 0:
                four = slice(column, column + BLOCK)
                mask[:, at : at + BLOCK] = two_of_four(
                    _saliency(remaining[:, four], factor[four, four])
                )
            pruned = torch.where(mask[:, at], remaining[:, column], 0.0)
            error = (remaining[:, column] - pruned) / factor[column, column]
            remaining[:, column + 1 : end] -= (
                error[:, None] * factor[column, column + 1 : end][None]
            )
            remaining[:, column] = pruned
            errors[:, at] = error
        remaining[:, end:] -= errors @ factor[begin:end, end:]
    return remaining.to(weight.dtype)


def _saliency(block: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return block.square() / factor.diagonal().square()[None, :]


def _keep_mask(saliency: torch.Tensor, sparsity: float, pattern: Pattern) -> torch.Tensor:
    if pattern == "2:4":
        return torch.ones_like(saliency, dtype=torch.bool)
    count = round(sparsity * saliency.numel())
    mask = torch.ones(saliency.numel(), dtype=torch.bool, device=saliency.device)
    mask[torch.topk(saliency.flatten(), count, largest=False).indices] = False
    return mask.view_as(saliency)
