"""Symmetric integer quantisation with one scale per group of consecutive weights in a row."""

from dataclasses import dataclass

import torch

TINY = 1e-8  # least scale, so that an all-zero group does not divide by zero


@dataclass(frozen=True)
class Grid:
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
class Codes:
    """A quantised matrix: integers [out, in] and scales [out, groups] in the model's dtype."""

    values: torch.Tensor
    scales: torch.Tensor
    grid: Grid

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


def group_scales(weight: torch.Tensor, grid: Grid, dtype: torch.dtype) -> torch.Tensor:
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


def nearest(values: torch.Tensor, scales: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the codes nearest to ``values``, with ``scales`` broadcast to ``values``."""
    return (values.float() / scales.float()).round().clamp(grid.lowest, grid.highest)


def round_to_nearest(weight: torch.Tensor, grid: Grid, dtype: torch.dtype) -> Codes:
    """Return the nearest code of each weight (RTN), without calibration text."""
    scales = group_scales(weight, grid, dtype)
    spread = scales.repeat_interleave(grid.group_size, dim=1)[:, : weight.shape[1]]
    return Codes(nearest(weight, spread, grid).to(torch.int8), scales, grid)
