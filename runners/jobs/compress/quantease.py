"""QuantEase: coordinate descent over columns, optionally with 16-bit outlier weights.

Source: Behdin et al. 2023, arXiv:2309.01885, algorithms 1 and 3.
"""

from dataclasses import dataclass

import torch

from runners.jobs.compress.grid import Codes, Grid, group_scales, nearest
from runners.jobs.compress.second_order import DAMPING

PASSES = 10
RELAXED_EVERY = 3  # passes; every third pass does not round, to escape local minima


@dataclass(frozen=True)
class WithOutliers:
    """Codes and a 16-bit outlier matrix, zero where a weight is no outlier."""

    codes: Codes
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
    grid: Grid,
    dtype: torch.dtype,
    *,
    start: Codes | None = None,
    passes: int = PASSES,
) -> Codes:
    """Return codes after cyclic coordinate descent on the output error on the text of ``gram``.

    Start from ``start`` (for example GPTQ's codes; default: nearest codes) and keep the best pass.
    """
    if start is None:
        scales = group_scales(weight, grid, dtype)
        spread = _expanded_scales(scales, grid, weight)
        start = Codes(nearest(weight, spread, grid).to(torch.int8), scales, grid)
    spread = _expanded_scales(start.scales, grid, weight)
    target = weight.float()
    hessian = _damped(gram)
    current = start.values.float() * spread
    best, best_error = start.values.float(), _error(target - current, hessian)
    for number in range(1, passes + 1):
        is_relaxed = number % RELAXED_EVERY == 0 and number < passes
        current = _descend(current, target, hessian, None if is_relaxed else (spread, grid))
        if is_relaxed:
            continue
        error = _error(target - current, hessian)
        if error < best_error:
            best, best_error = nearest(current, spread, grid), error
    return Codes(best.to(torch.int8), start.scales, grid)


def quantease_with_outliers(
    weight: torch.Tensor,
    gram: torch.Tensor,
    grid: Grid,
    dtype: torch.dtype,
    *,
    share: float,
    passes: int = PASSES,
) -> WithOutliers:
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
    return WithOutliers(refined, fitted.to(dtype))


def _descend(
    current: torch.Tensor,
    target: torch.Tensor,
    hessian: torch.Tensor,
    rounding: tuple[torch.Tensor, Grid] | None,
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


def _expanded_scales(scales: torch.Tensor, grid: Grid, weight: torch.Tensor) -> torch.Tensor:
    return scales.float().repeat_interleave(grid.group_size, dim=1)[:, : weight.shape[1]]


def _damped(gram: torch.Tensor) -> torch.Tensor:
    mean = gram.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    return gram.float() + DAMPING * mean * torch.eye(len(gram), device=gram.device)


def _error(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    return float(((difference @ hessian) * difference).sum())
