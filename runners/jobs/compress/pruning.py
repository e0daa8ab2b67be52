"""Pruning of single weights: by magnitude, or by magnitude times input norm (Wanda).

Source of Wanda: Sun et al. 2023, arXiv:2306.11695.
"""

from typing import Literal

import torch

from runners.compress_options import PATTERN_BLOCK

Pattern = Literal["unstructured", "2:4"]
BLOCK = PATTERN_BLOCK
KEPT = 2


def magnitude(weight: torch.Tensor, sparsity: float, pattern: Pattern) -> torch.Tensor:
    """Set the smallest weights to zero, ranked over the whole matrix."""
    scores = weight.float().abs()
    if pattern == "2:4":
        return weight * two_of_four(scores)
    count = round(sparsity * scores.numel())
    dropped = torch.topk(scores.flatten(), count, largest=False).indices
    pruned = weight.flatten().clone()
    pruned[dropped] = 0
    return pruned.view_as(weight)


def wanda(
    weight: torch.Tensor, norms: torch.Tensor, sparsity: float, pattern: Pattern
) -> torch.Tensor:
    """Set the weights of smallest |weight| x input norm in each row to zero."""
    scores = weight.float().abs() * norms.float()[None, :]
    if pattern == "2:4":
        return weight * two_of_four(scores)
    count = round(sparsity * scores.shape[1])
    dropped = torch.topk(scores, count, dim=1, largest=False).indices
    return weight.scatter(1, dropped, 0.0)


def two_of_four(scores: torch.Tensor) -> torch.Tensor:
    """Return a mask that keeps the two highest of every four consecutive scores of a row.

    Raises:
        ValueError: the row length is no multiple of 4.
    """
    rows, columns = scores.shape
    if columns % BLOCK:
        msg = f"rows of {columns} weights do not divide into blocks of {BLOCK}"
        raise ValueError(msg)
    blocks = scores.view(rows, -1, BLOCK)
    kept = torch.topk(blocks, KEPT, dim=2).indices
    mask = torch.zeros_like(blocks, dtype=torch.bool).scatter(2, kept, value=True)
    return mask.view(rows, columns)


def zero_share(weight: torch.Tensor) -> float:
    """Return the share of weights that are zero."""
    return 1.0 - float(torch.count_nonzero(weight)) / weight.numel()
