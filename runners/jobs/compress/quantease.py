"""QuantEase: coordinate descent over the columns, the outlier-aware form with 16-bit weights.

Source: Behdin et al. 2023, arXiv:2309.01885, algorithms 1 and 3.
"""

from dataclasses import dataclass

import torch

from runners.jobs.compress.grid import Codes, Grid, group_scales, nearest
from runners.jobs.compress.second_order import DAMPING

PASSES = 10
RELAXED_EVERY = 3  # passes; on these the weights stay unrounded, which leaves local minima


@dataclass(frozen=True)
class WithOutliers:
    """Codes and the few weights that stand beside them in 16 bit; zero where there is none."""

    codes: Codes
    outliers: torch.Tensor

    def weight(self) -> torch.Tensor:
        """Return the matrix that codes and outliers stand for together."""
        return self.codes.weight() + self.outliers

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of codes, scales and each outlier with its 4-byte place."""
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
    """Return codes that no change of one column improves on the text of ``gram``.

    It begins at ``start`` (GPTQ's codes, or the nearest) and keeps the best pass.
    """
    if start is None:
        scales = group_scales(weight, grid, dtype)
        spread = _spread(scales, grid, weight)
        start = Codes(nearest(weight, spread, grid).to(torch.int8), scales, grid)
    spread = _spread(start.scales, grid, weight)
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
    """Return codes and the ``share`` of weights that are kept in 16 bit beside them.

    The weights that keep their own value are those whose removal shrinks the groups' scales and
    weighs most in the outputs; what they hold is fitted between two descents.
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
    """Return ``current`` after each column took its best value in turn, rounded or not."""
    current = current.clone()
    pull = (target - current) @ hessian
    for column in range(current.shape[1]):
        own = hessian[column, column]
        wanted = current[:, column] + pull[:, column] / own
        if rounding is not None:
            spread, grid = rounding
            scale = spread[:, column]
            wanted = nearest(wanted, scale, grid) * scale
        change = wanted - current[:, column]
        pull -= change[:, None] * hessian[column][None, :]
        current[:, column] = wanted
    return current


def _descend_masked(
    current: torch.Tensor, target: torch.Tensor, hessian: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return ``current`` after one pass in which only the masked weights moved."""
    current = current.clone()
    pull = (target - current) @ hessian
    for column in range(current.shape[1]):
        change = torch.where(mask[:, column], pull[:, column] / hessian[column, column], 0.0)
        pull -= change[:, None] * hessian[column][None, :]
        current[:, column] += change
    return current


def _largest(importance: torch.Tensor, count: int) -> torch.Tensor:
    mask = torch.zeros(importance.numel(), dtype=torch.bool, device=importance.device)
    mask[torch.topk(importance.flatten(), count).indices] = True
    return mask.view_as(importance)


def _spread(scales: torch.Tensor, grid: Grid, weight: torch.Tensor) -> torch.Tensor:
    return scales.float().repeat_interleave(grid.group_size, dim=1)[:, : weight.shape[1]]


def _damped(gram: torch.Tensor) -> torch.Tensor:
    mean = gram.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    return gram.float() + DAMPING * mean * torch.eye(len(gram), device=gram.device)


def _error(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    return float(((difference @ hessian) * difference).sum())
