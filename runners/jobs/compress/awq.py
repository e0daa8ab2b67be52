"""AWQ: scale the inputs that are large on the text up before rounding, and divide them again.

The scales are the inputs' mean sizes to a power; the power is searched on a grid by the error of
the outputs after rounding. Source: Lin et al. 2023, arXiv:2306.00978, section 3.2.
"""

import torch

from runners.jobs.compress.folding import LEAST_SCALE, Linears, Seen, fold_scales, folds_of
from runners.jobs.compress.grid import Grid, round_to_nearest
from runners.jobs.compress.statistics import InputStatistics, output_error

POWERS = 20  # from none to the full size of an input, as the paper's grid


def scale_for_rounding(layer: torch.nn.Module, linears: Linears, seen: Seen, grid: Grid) -> None:
    """Fold into the layer the scales with which its matrices lose least when they are rounded."""
    for fold in folds_of(layer, between_linears=True):
        weights = [linears[name].weight.data for name in fold.readers]
        scales = best_scales(weights, seen[fold.readers[0]], grid)
        fold_scales(fold, linears, seen, scales)


def best_scales(weights: list[torch.Tensor], seen: InputStatistics, grid: Grid) -> torch.Tensor:
    """Return the scales of the inputs that ``weights`` share; ones where no other is better."""
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
    weights: list[torch.Tensor], seen: InputStatistics, grid: Grid, scales: torch.Tensor
) -> float:
    """Return the outputs' squared error of the scaled and rounded matrices."""
    rounded = [
        round_to_nearest(each.float() * scales, grid, each.dtype).weight().float() / scales
        for each in weights
    ]
    pairs = zip(weights, rounded, strict=True)
    return sum(output_error(before, after, seen.gram) for before, after in pairs)
