"""Quantisation of linear layers: AWQ, GPTQ, QuantEase, FineQuant, SmoothQuant, FPTQ."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from runners.jobs.runtime import BadInputError

# Symmetric integer quantisation with one scale per group of consecutive weights in a row.


TINY = 1e-8  # least scale, so that an all-zero group does not divide by zero


@dataclass(frozen=True)
class QuantizationGrid:
    """Symmetric ``bits``-bit integers with one scale per ``group_size`` weights of a row."""

    bits: int
    group_size: int

    @property
    def lowest(self) -> int:
        """Return the smallest code."""
        return -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        """Return the largest code."""
        return (1 << (self.bits - 1)) - 1


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantised matrix: integers [out, in] and scales [out, groups] in the model's dtype."""

    values: torch.Tensor
    scales: torch.Tensor
    grid: QuantizationGrid

    def weight(self) -> torch.Tensor:
        """Return the dequantised matrix, as loaders of the folder compute it."""
        scales = self.scales.repeat_interleave(self.grid.group_size, dim=1)
        return self.values.to(scales.dtype) * scales[:, : self.values.shape[1]]

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of packed codes and scales."""
        rows, columns = self.values.shape
        words = -(-columns * self.grid.bits // 32)
        return rows * words * 4 + self.scales.numel() * self.scales.element_size()


def group_scales(weight: torch.Tensor, grid: QuantizationGrid, dtype: torch.dtype) -> torch.Tensor:
    """Return the scales [out, groups] that fit the largest weight of each group.

    ``dtype`` is the dtype of the stored scales, so that codes are computed with the stored values.
    """
    rows, columns = weight.shape
    padding = -columns % grid.group_size
    padded = torch.nn.functional.pad(weight.float(), (0, padding))
    largest = padded.view(rows, -1, grid.group_size).abs().amax(dim=2)
    # Divide by half of the range, as compressed-tensors does: else 2 bits never use the code -2.
    scales = largest / ((grid.highest - grid.lowest) / 2)
    return scales.clamp(min=TINY).to(dtype)


def nearest(values: torch.Tensor, scales: torch.Tensor, grid: QuantizationGrid) -> torch.Tensor:
    """Return the codes nearest to ``values``, with ``scales`` broadcast to ``values``."""
    return (values.float() / scales.float()).round().clamp(grid.lowest, grid.highest)


def round_to_nearest(
    weight: torch.Tensor, grid: QuantizationGrid, dtype: torch.dtype
) -> QuantizedMatrix:
    """Return the nearest code of each weight (RTN), without calibration text."""
    scales = group_scales(weight, grid, dtype)
    spread = scales.repeat_interleave(grid.group_size, dim=1)[:, : weight.shape[1]]
    return QuantizedMatrix(nearest(weight, spread, grid).to(torch.int8), scales, grid)


# Upper Cholesky factor of the damped inverse Hessian, shared by GPTQ and SparseGPT.


DAMPING = 0.01  # share of the mean diagonal, as in both papers
MAX_DAMPING = 1.0
BLOCK_COLUMNS = 128


class IllConditionedError(Exception):
    """X^T X of a matrix's inputs is numerically singular."""


def inverse_factor(gram: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """Return U with U^T U = (X^T X + damping)^-1, upper triangular, in fp32.

    Inputs that are always zero get a diagonal of one. Damping grows until the factor exists.

    Raises:
        IllConditionedError: the factor does not exist even at ``MAX_DAMPING``.
    """
    hessian = gram.float().clone()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1.0
    mean = float(diagonal.mean())
    while damping <= MAX_DAMPING:
        damped = hessian + damping * mean * torch.eye(len(hessian), device=hessian.device)
        upper = _factor_of_inverse(damped)
        if upper is not None:
            return upper
        damping *= 10
    msg = "X^T X of the calibration text has no inverse; choose more calibration tokens"
    raise IllConditionedError(msg)


def _factor_of_inverse(damped: torch.Tensor) -> torch.Tensor | None:
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed.item():
        return None
    upper: torch.Tensor
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return None if failed.item() or not bool(upper.isfinite().all()) else upper


# Calibration statistics of a linear layer's inputs: X^T X and the size of each channel.


@dataclass
class InputStatistics:
    """Sums over the input tokens of one linear layer, in fp32."""

    num_inputs: int
    num_tokens: int = 0
    gram: torch.Tensor = field(init=False)
    absolute: torch.Tensor = field(init=False)
    largest: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Initialise the sums to zero."""
        self.gram = torch.zeros(self.num_inputs, self.num_inputs)
        self.absolute = torch.zeros(self.num_inputs)
        self.largest = torch.zeros(self.num_inputs)

    def add(self, inputs: torch.Tensor) -> None:
        """Add tokens [..., in]."""
        rows = inputs.detach().reshape(-1, self.num_inputs).float()
        self.gram = self.gram.to(rows.device).addmm_(rows.T, rows)
        self.absolute = self.absolute.to(rows.device) + rows.abs().sum(dim=0)
        self.largest = torch.maximum(self.largest.to(rows.device), rows.abs().amax(dim=0))
        self.num_tokens += len(rows)

    def divide(self, scales: torch.Tensor) -> None:
        """Rescale the statistics in place to those of the inputs divided by ``scales``."""
        self.gram = self.gram / (scales[:, None] * scales[None, :])
        self.absolute = self.absolute / scales
        self.largest = self.largest / scales

    @property
    def norms(self) -> torch.Tensor:
        """Return the L2 norm of each input channel over all tokens."""
        return self.gram.diagonal().clamp(min=0.0).sqrt()

    @property
    def mean_absolute(self) -> torch.Tensor:
        """Return the mean absolute value of each input channel."""
        return self.absolute / max(1, self.num_tokens)


def output_error(before: torch.Tensor, after: torch.Tensor, gram: torch.Tensor) -> float:
    """Return the squared error of a linear layer's outputs, summed over tokens and channels."""
    difference = (before.float() - after.float()).double()
    return float(((difference @ gram.double()) * difference).sum())


# Fold input scales of linear layers into the preceding module without changing the output.
#
# Each input channel is divided by its scale in the module that computes it (a norm's weight,
# another linear layer's rows), and the weight columns that read it are multiplied by the scale.


Linears = dict[str, torch.nn.Linear]
LayerStatistics = dict[str, InputStatistics]
# Model types whose norms multiply by their weight, with the layer names below.
FOLDABLE = ("llama", "mistral", "qwen2", "qwen3")
NORM_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
LINEAR_READERS = {"self_attn.v_proj": ("self_attn.o_proj",), "mlp.up_proj": ("mlp.down_proj",)}
LEAST_SCALE = 1e-4


@dataclass(frozen=True)
class Fold:
    """A module that computes inputs, and the names of the linear layers that read them."""

    maker: torch.nn.Module
    readers: tuple[str, ...]


def check_shape_known(model_type: str, what_is_done_to: str) -> None:
    """Raise BadInputError for a model type whose layer structure is not supported."""
    if model_type not in FOLDABLE:
        msg = (
            f"{what_is_done_to} {', '.join(FOLDABLE)} layers, and this model is of type "
            f"'{model_type}'; choose gptq or quantease for it"
        )
        raise BadInputError(msg)


def folds_of(layer: torch.nn.Module, *, between_linears: bool) -> list[Fold]:
    """Return a layer's folds; with ``between_linears``, also those between two linear layers.

    With grouped-query attention, v_proj is not folded: several query heads read each output.
    """
    names = NORM_READERS | (LINEAR_READERS if between_linears else {})
    folds = [Fold(layer.get_submodule(maker), readers) for maker, readers in names.items()]
    return [
        fold
        for fold in folds
        if _shape(fold.maker)[0] == _shape(layer.get_submodule(fold.readers[0]))[1]
    ]


def fold_scales(
    fold: Fold, linears: Linears, statistics: LayerStatistics, scales: torch.Tensor
) -> None:
    """Divide the fold's inputs by ``scales`` and multiply the columns that read them, in place."""
    _divide(fold.maker, scales)
    for name in fold.readers:
        weight = linears[name].weight
        weight.data = (weight.data.float() * scales).to(weight.dtype)
        statistics[name].divide(scales)


def _divide(maker: torch.nn.Module, scales: torch.Tensor) -> None:
    for parameter in maker.parameters():  # of a norm: weight; of a linear layer: weight and bias
        divisor = scales[:, None] if parameter.dim() > 1 else scales
        parameter.data = (parameter.data.float() / divisor).to(parameter.dtype)


def _shape(module: torch.nn.Module) -> torch.Size:
    return next(module.parameters()).shape


# AWQ: scale up weights of large activations before quantisation.
#
# The scales are the inputs' mean absolute values to a power; a grid search chooses the power by
# the output error after rounding. Source: Lin et al. 2023, arXiv:2306.00978, section 3.2.


POWERS = 20  # grid points of the exponent in [0, 1), as in the paper


def scale_for_rounding(
    layer: torch.nn.Module, linears: Linears, statistics: LayerStatistics, grid: QuantizationGrid
) -> None:
    """Fold the scales of least output error after rounding into the layer."""
    for fold in folds_of(layer, between_linears=True):
        weights = [linears[name].weight.data for name in fold.readers]
        scales = best_scales(weights, statistics[fold.readers[0]], grid)
        fold_scales(fold, linears, statistics, scales)


def best_scales(
    weights: list[torch.Tensor], statistics: InputStatistics, grid: QuantizationGrid
) -> torch.Tensor:
    """Return the best input scales for ``weights`` with shared inputs; ones if none is better."""
    best = torch.ones_like(statistics.mean_absolute)
    least = _scaled_error(weights, statistics, grid, best)
    for step in range(1, POWERS):
        scales = statistics.mean_absolute.pow(step / POWERS).clamp(min=LEAST_SCALE)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = _scaled_error(weights, statistics, grid, scales)
        if error < least:
            best, least = scales, error
    return best


def _scaled_error(
    weights: list[torch.Tensor],
    statistics: InputStatistics,
    grid: QuantizationGrid,
    scales: torch.Tensor,
) -> float:
    rounded = [
        round_to_nearest(each.float() * scales, grid, each.dtype).weight().float() / scales
        for each in weights
    ]
    pairs = zip(weights, rounded, strict=True)
    return sum(output_error(before, after, statistics.gram) for before, after in pairs)


# FineQuant: choose the group size of each matrix by an error threshold.
#
# Start with one scale per row and halve the group size while that reduces the error enough.
# Source: Kim et al. 2023, arXiv:2308.09723, section 3.3; our threshold is on the squared error.


def finequant(
    weight: torch.Tensor, smallest: QuantizationGrid, dtype: torch.dtype, least_gain: float
) -> QuantizedMatrix:
    """Return nearest codes with an adaptive group size, at least that of ``smallest``.

    ``least_gain`` is the share of the error that halving the group size must remove.
    """
    size = weight.shape[1]
    codes = round_to_nearest(weight, QuantizationGrid(smallest.bits, size), dtype)
    error = _squared_error(weight, codes)
    while size % 2 == 0 and size // 2 >= smallest.group_size:
        size //= 2
        finer = round_to_nearest(weight, QuantizationGrid(smallest.bits, size), dtype)
        finer_error = _squared_error(weight, finer)
        if finer_error > (1.0 - least_gain) * error:
            break
        codes, error = finer, finer_error
    return codes


def _squared_error(weight: torch.Tensor, codes: QuantizedMatrix) -> float:
    return float((weight.float() - codes.weight().float()).square().sum())


# GPTQ: quantise column by column and compensate the error in the remaining columns.
#
# Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1, with the reference implementation's
# "act-order". Group scales come from the original matrix: computed when the group's first column
# is reached, they include propagated error, and 2-bit results were worse than rounding to nearest.


def gptq(
    weight: torch.Tensor,
    gram: torch.Tensor,
    grid: QuantizationGrid,
    dtype: torch.dtype,
    *,
    is_act_ordered: bool = False,
    damping: float = DAMPING,
) -> QuantizedMatrix:
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
    return QuantizedMatrix(codes[:, torch.argsort(order)].to(torch.int8), scales, grid)


# QuantEase: coordinate descent over columns, optionally with 16-bit outlier weights.
#
# Source: Behdin et al. 2023, arXiv:2309.01885, algorithms 1 and 3.


PASSES = 10
RELAXED_EVERY = 3  # passes; every third pass does not round, to escape local minima


@dataclass(frozen=True)
class QuantizedMatrixWithOutliers:
    """Codes and a 16-bit outlier matrix, zero where a weight is no outlier."""

    codes: QuantizedMatrix
    outliers: torch.Tensor

    def weight(self) -> torch.Tensor:
        """Return the dequantised matrix: codes plus outliers."""
        return self.codes.weight() + self.outliers

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of codes, scales and outliers, each outlier with a 4-byte index."""
        count = int(torch.count_nonzero(self.outliers))
        return self.codes.stored_bytes + count * (self.outliers.element_size() + 4)


def quantease(
    weight: torch.Tensor,
    gram: torch.Tensor,
    grid: QuantizationGrid,
    dtype: torch.dtype,
    *,
    start: QuantizedMatrix | None = None,
    passes: int = PASSES,
) -> QuantizedMatrix:
    """Return codes after cyclic coordinate descent on the output error on the text of ``gram``.

    Start from ``start`` (for example GPTQ's codes; default: nearest codes) and keep the best pass.
    """
    if start is None:
        scales = group_scales(weight, grid, dtype)
        spread = _expanded_scales(scales, grid, weight)
        start = QuantizedMatrix(nearest(weight, spread, grid).to(torch.int8), scales, grid)
    spread = _expanded_scales(start.scales, grid, weight)
    target = weight.float()
    hessian = _damped(gram)
    current = start.values.float() * spread
    best, best_error = start.values.float(), _quadratic_error(target - current, hessian)
    for number in range(1, passes + 1):
        is_relaxed = number % RELAXED_EVERY == 0 and number < passes
        current = _descend(current, target, hessian, None if is_relaxed else (spread, grid))
        if is_relaxed:
            continue
        error = _quadratic_error(target - current, hessian)
        if error < best_error:
            best, best_error = nearest(current, spread, grid), error
    return QuantizedMatrix(best.to(torch.int8), start.scales, grid)


def quantease_with_outliers(
    weight: torch.Tensor,
    gram: torch.Tensor,
    grid: QuantizationGrid,
    dtype: torch.dtype,
    *,
    share: float,
    passes: int = PASSES,
) -> QuantizedMatrixWithOutliers:
    """Return codes, and the ``share`` of the weights kept in 16 bits as outliers.

    Outliers are the weights of largest |weight| x input norm: removing them shrinks group scales.
    Their values are fitted between two coordinate descents.
    """
    target = weight.float()
    hessian = _damped(gram)
    count = max(1, round(share * target.numel()))
    importance = target.abs() * hessian.diagonal().sqrt()[None, :]
    mask = _largest(importance, count)
    outliers = torch.where(mask, target, torch.zeros_like(target)).to(dtype)
    codes = quantease(target - outliers.float(), gram, grid, dtype, passes=passes)
    fitted = _descend_masked(outliers.float(), target - codes.weight().float(), hessian, mask)
    refined = quantease(
        target - fitted.to(dtype).float(), gram, grid, dtype, start=codes, passes=passes
    )
    return QuantizedMatrixWithOutliers(refined, fitted.to(dtype))


def _descend(
    current: torch.Tensor,
    target: torch.Tensor,
    hessian: torch.Tensor,
    rounding: tuple[torch.Tensor, QuantizationGrid] | None,
) -> torch.Tensor:
    """Return ``current`` after one pass that sets each column to its optimum, rounded or not."""
    current = current.clone()
    negative_gradient = (target - current) @ hessian
    for column in range(current.shape[1]):
        curvature = hessian[column, column]
        optimum = current[:, column] + negative_gradient[:, column] / curvature
        if rounding is not None:
            spread, grid = rounding
            scale = spread[:, column]
            optimum = nearest(optimum, scale, grid) * scale
        change = optimum - current[:, column]
        negative_gradient -= change[:, None] * hessian[column][None, :]
        current[:, column] = optimum
    return current


def _descend_masked(
    current: torch.Tensor, target: torch.Tensor, hessian: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return ``current`` after one pass that updates only the masked weights."""
    current = current.clone()
    negative_gradient = (target - current) @ hessian
    for column in range(current.shape[1]):
        change = torch.where(
            mask[:, column], negative_gradient[:, column] / hessian[column, column], 0.0
        )
        negative_gradient -= change[:, None] * hessian[column][None, :]
        current[:, column] += change
    return current


def _largest(importance: torch.Tensor, count: int) -> torch.Tensor:
    mask = torch.zeros(importance.numel(), dtype=torch.bool, device=importance.device)
    mask[torch.topk(importance.flatten(), count).indices] = True
    return mask.view_as(importance)


def _expanded_scales(
    scales: torch.Tensor, grid: QuantizationGrid, weight: torch.Tensor
) -> torch.Tensor:
    return scales.float().repeat_interleave(grid.group_size, dim=1)[:, : weight.shape[1]]


def _damped(gram: torch.Tensor) -> torch.Tensor:
    mean = gram.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    return gram.float() + DAMPING * mean * torch.eye(len(gram), device=gram.device)


def _quadratic_error(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    return float(((difference @ hessian) * difference).sum())


# Activation scaling before 8-bit quantisation: SmoothQuant and FPTQ.
#
# Sources: Xiao et al. 2022, arXiv:2211.10438, equation 4; Li et al. 2023, arXiv:2308.15987,
# equation 3 (logarithmic activation equalisation).


def smooth(
    layer: torch.nn.Module, linears: Linears, statistics: LayerStatistics, share: float
) -> None:
    """Migrate activation range into the following weights by SmoothQuant, alpha = ``share``."""
    for fold in folds_of(layer, between_linears=False):
        inputs = statistics[fold.readers[0]].largest
        columns = [linears[name].weight.data.float().abs().amax(dim=0) for name in fold.readers]
        weights = torch.stack(columns).amax(dim=0).clamp(min=LEAST_SCALE)
        scales = inputs.pow(share) / weights.pow(1.0 - share).clamp(min=LEAST_SCALE)
        fold_scales(fold, linears, statistics, scales.clamp(min=LEAST_SCALE))


def level_by_logarithm(
    layer: torch.nn.Module, linears: Linears, statistics: LayerStatistics
) -> None:
    """Divide each input channel by max|x| / log2(2 + max|x|), FPTQ's equalisation scale."""
    for fold in folds_of(layer, between_linears=False):
        largest = statistics[fold.readers[0]].largest
        scales = largest / torch.log2(2.0 + largest)
        fold_scales(fold, linears, statistics, scales.clamp(min=LEAST_SCALE))


# Dynamic 8-bit quantisation of linear-layer inputs with one scale per token.


LOWEST, HIGHEST = -128, 127


@contextmanager
def quantised_inputs(linears: Iterable[torch.nn.Linear]) -> Iterator[None]:
    """Quantise the inputs of the linear layers inside the block."""
    with ExitStack() as hooks:
        for linear in linears:
            hooks.callback(linear.register_forward_pre_hook(_round_first).remove)
        yield


def quantise_per_token(inputs: torch.Tensor) -> torch.Tensor:
    """Return inputs [..., in] quantised to 8-bit integers per token and dequantised."""
    largest = inputs.abs().amax(dim=-1, keepdim=True)
    scales = largest / ((HIGHEST - LOWEST) / 2)
    scales = torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)
    return (inputs / scales).round().clamp(LOWEST, HIGHEST) * scales


def _round_first(_module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return quantise_per_token(inputs[0]), *inputs[1:]
