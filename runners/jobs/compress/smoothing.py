"""Activation scaling before 8-bit quantisation: SmoothQuant and FPTQ.

Sources: Xiao et al. 2022, arXiv:2211.10438, equation 4; Li et al. 2023, arXiv:2308.15987,
equation 3 (logarithmic activation equalisation).
"""

import torch

from runners.jobs.compress.folding import (
    LEAST_SCALE,
    Fold,
    LayerStatistics,
    Linears,
    fold_scales,
    folds_of,
)


def smooth(layer: torch.nn.Module, linears: Linears, seen: LayerStatistics, share: float) -> None:
    """Migrate activation range into the following weights by SmoothQuant, alpha = ``share``."""
    for fold in folds_of(layer, between_linears=False):
        inputs = seen[fold.readers[0]].largest
        weights = _largest_weights(fold, linears)
        scales = inputs.pow(share) / weights.pow(1.0 - share).clamp(min=LEAST_SCALE)
        fold_scales(fold, linears, seen, scales.clamp(min=LEAST_SCALE))


def level_by_logarithm(layer: torch.nn.Module, linears: Linears, seen: LayerStatistics) -> None:
    """Divide each input channel by max|x| / log2(2 + max|x|), FPTQ's equalisation scale."""
    for fold in folds_of(layer, between_linears=False):
        largest = seen[fold.readers[0]].largest
        scales = largest / torch.log2(2.0 + largest)
        fold_scales(fold, linears, seen, scales.clamp(min=LEAST_SCALE))


def _largest_weights(fold: Fold, linears: Linears) -> torch.Tensor:
    columns = [linears[name].weight.data.float().abs().amax(dim=0) for name in fold.readers]
    return torch.stack(columns).amax(dim=0).clamp(min=LEAST_SCALE)
