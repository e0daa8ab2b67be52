"""AWQ: scale up weights of large activations before quantisation.

The scales are the inputs' mean absolute values to a power; a grid search chooses the power by the
output error after rounding. Source: Lin et al. 2023, arXiv:2306.00978, section 3.2.
"""

import torch

from runners.jobs.compress.folding import (
    LEAST_SCALE,
    LayerStatistics,
    Linears,
    fold_scales,
    folds_of,
)
from runners.jobs.compress.grid import Grid, round_to_nearest
from runners.jobs.compress.statistics import InputStatistics, output_error

POWERS = 20  # grid points of the exponent in [0, 1), as in the paper


def scale_for_rounding(
    layer: torch.nn.Module, linears: Linears, seen: LayerStatistics, grid: Grid
) -> None:
    """Fold the scales of least output error after rounding into the layer."""
    for fold in folds_of(layer, between_linears=True):
        weights = [linears[name].weight.data for name in fold.readers]
        scales = best_scales(weights, seen[fold.readers[0]], grid)
        fold_scales(fold, linears, seen, scales)


def best_scales(weights: list[torch.Tensor], seen: InputStatistics, grid: Grid) -> torch.Tensor:
    """Return the best input scales for ``weights`` with shared inputs; ones if none is better."""
    best = torch.ones_like(seen.mean_absolute)
    least = _error(weights, seen, grid, best)
    for step in range(1, POWERS):
        scales = seen.mean_absolute.pow(step / POWERS).clamp(min=LEAST_SCALE)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = _error(weights, seen, grid, scales)
        if error < least:
            best, least = scales, error
    return best


def _error(
    weights: list[torch.Tensor], statistics: InputStatistics, grid: Grid, scales: torch.Tensor
) -> float:
    """Return the squared output error of the scaled and rounded matrices."""
    rounded = [
        round_to_nearest(each.float() * scales, grid, each.dtype).weight().float() / scales
        for each in weights
    ]
    pairs = zip(weights, rounded, strict=True)
    return sum(output_error(before, after, statistics.gram) for before, after in pairs)
