"""Registry of the functions that compress a matrix or prepare a layer, by method name."""

from collections.abc import Callable, Mapping

import torch

from runners.jobs.compress.pruning import magnitude, sparsegpt, wanda
from runners.jobs.compress.quantization import (
    Grid,
    InputStatistics,
    LayerStatistics,
    Linears,
    finequant,
    gptq,
    level_by_logarithm,
    quantease,
    quantease_with_outliers,
    round_to_nearest,
    scale_for_rounding,
    smooth,
)
from runners.jobs.compress.store import Matrix, Pruned
from runners.jobspec import CompressSpec

Prepare = Callable[[torch.nn.Module, Linears, LayerStatistics, CompressSpec], None]
Method = Callable[[torch.Tensor, InputStatistics, CompressSpec], Matrix]


def grid_of(spec: CompressSpec) -> Grid:
    """Return the quantisation grid of a spec."""
    return Grid(spec.code_bits, spec.group_size)


def _by_row(weight: torch.Tensor, _statistics: InputStatistics, spec: CompressSpec) -> Matrix:
    return round_to_nearest(weight, Grid(spec.code_bits, weight.shape[1]), weight.dtype)


def _nearest(weight: torch.Tensor, _statistics: InputStatistics, spec: CompressSpec) -> Matrix:
    return round_to_nearest(weight, grid_of(spec), weight.dtype)


def _gptq(weight: torch.Tensor, statistics: InputStatistics, spec: CompressSpec) -> Matrix:
    return gptq(
        weight,
        statistics.gram,
        grid_of(spec),
        weight.dtype,
        is_act_ordered=spec.is_act_ordered,
        damping=spec.damping,
    )


def _finequant(weight: torch.Tensor, _statistics: InputStatistics, spec: CompressSpec) -> Matrix:
    return finequant(weight, grid_of(spec), weight.dtype, spec.least_gain)


def _quantease(weight: torch.Tensor, statistics: InputStatistics, spec: CompressSpec) -> Matrix:
    grid, dtype = grid_of(spec), weight.dtype
    if spec.outlier_share:
        share = spec.outlier_share
        return quantease_with_outliers(weight, statistics.gram, grid, dtype, share=share)
    return quantease(weight, statistics.gram, grid, dtype)


def _magnitude(weight: torch.Tensor, _statistics: InputStatistics, spec: CompressSpec) -> Matrix:
    return Pruned(magnitude(weight, spec.sparsity, spec.pattern))


def _wanda(weight: torch.Tensor, statistics: InputStatistics, spec: CompressSpec) -> Matrix:
    return Pruned(wanda(weight, statistics.norms, spec.sparsity, spec.pattern))


def _sparsegpt(weight: torch.Tensor, statistics: InputStatistics, spec: CompressSpec) -> Matrix:
    return Pruned(sparsegpt(weight, statistics.gram, spec.sparsity, spec.pattern))


def _awq(
    layer: torch.nn.Module, linears: Linears, statistics: LayerStatistics, spec: CompressSpec
) -> None:
    scale_for_rounding(layer, linears, statistics, grid_of(spec))


def _smoothed(
    layer: torch.nn.Module, linears: Linears, statistics: LayerStatistics, spec: CompressSpec
) -> None:
    smooth(layer, linears, statistics, spec.smoothing)


def _levelled(
    layer: torch.nn.Module, linears: Linears, statistics: LayerStatistics, _spec: CompressSpec
) -> None:
    level_by_logarithm(layer, linears, statistics)


METHODS: Mapping[str, Method] = {
    "rtn": _nearest,
    "gptq": _gptq,
    "quantease": _quantease,
    "magnitude": _magnitude,
    "wanda": _wanda,
    "sparsegpt": _sparsegpt,
    "awq": _nearest,
    "smoothquant": _by_row,
    "fptq": _nearest,
    "norm_tweaking": _gptq,
    "finequant": _finequant,
}
PREPARATIONS: Mapping[str, Prepare] = {
    "awq": _awq,
    "smoothquant": _smoothed,
    "fptq": _levelled,
}
