"""The methods that compress a layer matrix by matrix, and what prepares a layer for some."""

from collections.abc import Callable, Mapping

import torch

from runners.jobs.compress.compressed_store import CompressedMatrix, PrunedMatrix
from runners.jobs.compress.pruning import magnitude, sparsegpt, wanda
from runners.jobs.compress.quantization import (
    InputStatistics,
    LayerStatistics,
    Linears,
    QuantizationGrid,
    QuantizedMatrix,
    finequant,
    gptq,
    level_by_logarithm,
    quantease,
    quantease_with_outliers,
    round_to_nearest,
    scale_for_rounding,
    smooth,
)
from runners.jobspec import CompressSpec

Prepare = Callable[[torch.nn.Module, Linears, LayerStatistics, CompressSpec], None]
Method = Callable[[torch.Tensor, InputStatistics, CompressSpec], CompressedMatrix]


def grid_of(spec: CompressSpec) -> QuantizationGrid:
    """Return the quantisation grid of a spec."""
    return QuantizationGrid(spec.code_bits, spec.group_size)


def _by_row(
    weight: torch.Tensor, _statistics: InputStatistics, spec: CompressSpec
) -> CompressedMatrix:
    return round_to_nearest(
        weight, QuantizationGrid(spec.code_bits, weight.shape[1]), weight.dtype
    )


def _nearest(
    weight: torch.Tensor, _statistics: InputStatistics, spec: CompressSpec
) -> CompressedMatrix:
    return round_to_nearest(weight, grid_of(spec), weight.dtype)


def gptq_of(
    weight: torch.Tensor, statistics: InputStatistics, spec: CompressSpec
) -> QuantizedMatrix:
    """Return a matrix by GPTQ with the spec's options."""
    return gptq(
        weight,
        statistics.gram,
        grid_of(spec),
        weight.dtype,
        is_act_ordered=spec.is_act_ordered,
        damping=spec.damping,
    )


def _finequant(
    weight: torch.Tensor, _statistics: InputStatistics, spec: CompressSpec
) -> CompressedMatrix:
    return finequant(weight, grid_of(spec), weight.dtype, spec.least_gain)


def _quantease(
    weight: torch.Tensor, statistics: InputStatistics, spec: CompressSpec
) -> CompressedMatrix:
    grid, dtype = grid_of(spec), weight.dtype
    if spec.outlier_share:
        share = spec.outlier_share
        return quantease_with_outliers(weight, statistics.gram, grid, dtype, share=share)
    return quantease(weight, statistics.gram, grid, dtype)


def _magnitude(
    weight: torch.Tensor, _statistics: InputStatistics, spec: CompressSpec
) -> CompressedMatrix:
    return PrunedMatrix(magnitude(weight, spec.sparsity, spec.pattern))


def _wanda(
    weight: torch.Tensor, statistics: InputStatistics, spec: CompressSpec
) -> CompressedMatrix:
    return PrunedMatrix(wanda(weight, statistics.norms, spec.sparsity, spec.pattern))


def _sparsegpt(
    weight: torch.Tensor, statistics: InputStatistics, spec: CompressSpec
) -> CompressedMatrix:
    return PrunedMatrix(sparsegpt(weight, statistics.gram, spec.sparsity, spec.pattern))


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


# Those that train a layer are in ``layer_training.py: TUNED_METHODS``.
METHODS: Mapping[str, Method] = {
    "rtn": _nearest,
    "gptq": gptq_of,
    "quantease": _quantease,
    "magnitude": _magnitude,
    "wanda": _wanda,
    "sparsegpt": _sparsegpt,
    "awq": _nearest,
    "smoothquant": _by_row,
    "fptq": _nearest,
    "finequant": _finequant,
}
PREPARATIONS: Mapping[str, Prepare] = {
    "awq": _awq,
    "smoothquant": _smoothed,
    "fptq": _levelled,
}
