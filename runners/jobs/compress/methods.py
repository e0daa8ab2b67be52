"""Which function compresses a matrix by each method, and which prepares a layer before it."""

from collections.abc import Callable, Mapping

import torch

from runners.jobs.compress.awq import scale_for_rounding
from runners.jobs.compress.finequant import finequant
from runners.jobs.compress.folding import Linears, Seen
from runners.jobs.compress.gptq import gptq
from runners.jobs.compress.grid import Grid, round_to_nearest
from runners.jobs.compress.pruning import magnitude, wanda
from runners.jobs.compress.quantease import quantease, quantease_with_outliers
from runners.jobs.compress.results import Matrix, Pruned
from runners.jobs.compress.smoothing import level_by_logarithm, smooth
from runners.jobs.compress.sparsegpt import sparsegpt
from runners.jobs.compress.statistics import InputStatistics
from runners.jobspec import CompressSpec

Prepare = Callable[[torch.nn.Module, Linears, Seen, CompressSpec], None]
Method = Callable[[torch.Tensor, InputStatistics, CompressSpec], Matrix]


def grid_of(spec: CompressSpec) -> Grid:
    """Return the grid that a spec asks for."""
    return Grid(spec.code_bits, spec.group_size)


def _by_row(weight: torch.Tensor, _seen: InputStatistics, spec: CompressSpec) -> Matrix:
    return round_to_nearest(weight, Grid(spec.code_bits, weight.shape[1]), weight.dtype)


def _nearest(weight: torch.Tensor, _seen: InputStatistics, spec: CompressSpec) -> Matrix:
    return round_to_nearest(weight, grid_of(spec), weight.dtype)


def _gptq(weight: torch.Tensor, seen: InputStatistics, spec: CompressSpec) -> Matrix:
    return gptq(
        weight,
        seen.gram,
        grid_of(spec),
        weight.dtype,
        is_act_ordered=spec.is_act_ordered,
        damping=spec.damping,
    )


def _finequant(weight: torch.Tensor, _seen: InputStatistics, spec: CompressSpec) -> Matrix:
    return finequant(weight, grid_of(spec), weight.dtype, spec.least_gain)


def _quantease(weight: torch.Tensor, seen: InputStatistics, spec: CompressSpec) -> Matrix:
    grid, dtype = grid_of(spec), weight.dtype
    if spec.outlier_share:
        share = spec.outlier_share
        return quantease_with_outliers(weight, seen.gram, grid, dtype, share=share)
    return quantease(weight, seen.gram, grid, dtype)


def _magnitude(weight: torch.Tensor, _seen: InputStatistics, spec: CompressSpec) -> Matrix:
    return Pruned(magnitude(weight, spec.sparsity, spec.pattern))


def _wanda(weight: torch.Tensor, seen: InputStatistics, spec: CompressSpec) -> Matrix:
    return Pruned(wanda(weight, seen.norms, spec.sparsity, spec.pattern))


def _sparsegpt(weight: torch.Tensor, seen: InputStatistics, spec: CompressSpec) -> Matrix:
    return Pruned(sparsegpt(weight, seen.gram, spec.sparsity, spec.pattern))


def _awq(layer: torch.nn.Module, linears: Linears, seen: Seen, spec: CompressSpec) -> None:
    scale_for_rounding(layer, linears, seen, grid_of(spec))


def _smoothed(layer: torch.nn.Module, linears: Linears, seen: Seen, spec: CompressSpec) -> None:
    smooth(layer, linears, seen, spec.smoothing)


def _levelled(layer: torch.nn.Module, linears: Linears, seen: Seen, _spec: CompressSpec) -> None:
    level_by_logarithm(layer, linears, seen)


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
