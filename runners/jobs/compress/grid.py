"""Whole-number grids: one scale for each group of weights that lie side by side in a row."""

from dataclasses import dataclass

import torch

TINY = 1e-8  # of a scale: an all-zero group must not divide by zero


@dataclass(frozen=True)
class Grid:
    """Symmetric whole numbers of ``bits`` with one scale per ``group_size`` weights of a row."""

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
class Codes:
    """A matrix as whole numbers [out, in] and scales [out, groups] in the model's dtype."""

    values: torch.Tensor
    scales: torch.Tensor
    grid: Grid

    def weight(self) -> torch.Tensor:
        """Return the matrix that these codes stand for, as a reader of the folder gets it."""
        scales = self.scales.repeat_interleave(self.grid.group_size, dim=1)
        return self.values.to(scales.dtype) * scales[:, : self.values.shape[1]]

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of packed codes and scales."""
        rows, columns = self.values.shape
        words = -(-columns * self.grid.bits // 32)
        return rows * words * 4 + self.scales.numel() * self.scales.element_size()


def group_scales(weight: torch.Tensor, grid: Grid, dtype: torch.dtype) -> torch.Tensor:
    """Return the scales [out, groups] that let each group's largest weight just fit.

    ``dtype`` is that of the stored scales: codes must be found with what a reader will see.
    """
    rows, columns = weight.shape
    padding = -columns % grid.group_size
    padded = torch.nn.functional.pad(weight.float(), (0, padding))
    largest = padded.view(rows, -1, grid.group_size).abs().amax(dim=2)
    # Half of the span, as compressed-tensors has it: 2 bits would else waste the code -2.
    scales = largest / ((grid.highest - grid.lowest) / 2)
    return scales.clamp(min=TINY).to(dtype)


def nearest(values: torch.Tensor, scales: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the codes nearest to ``values``, whose scales stand beside them one to one."""
    return (values.float() / scales.float()).round().clamp(grid.lowest, grid.highest)


def round_to_nearest(weight: torch.Tensor, grid: Grid, dtype: torch.dtype) -> Codes:
    """Return each weight's nearest code: the method that looks at no text."""
    scales = group_scales(weight, grid, dtype)
    spread = scales.repeat_interleave(grid.group_size, dim=1)[:, : weight.shape[1]]
    return Codes(nearest(weight, spread, grid).to(torch.int8), scales, grid)
