"""What a method made of one matrix, and the tensors that a reader of the folder finds for it."""

from dataclasses import dataclass
from typing import Protocol

import torch
from compressed_tensors.compressors.pack_quantized.helpers import (
    pack_to_int32,
    unpack_from_int32,
)

from runners.jobs.compress import sparse_store
from runners.jobs.compress.grid import Codes, Grid

Tensors = dict[str, torch.Tensor]


class Matrix(Protocol):
    """A compressed matrix."""

    def weight(self) -> torch.Tensor:
        """Return the matrix that it stands for."""

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of its compressed form."""


@dataclass(frozen=True)
class Pruned:
    """A matrix with zeros; a bitmask and values are its compressed form."""

    values: torch.Tensor

    def weight(self) -> torch.Tensor:
        """Return the matrix."""
        return self.values

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of bitmask and values."""
        return sparse_store.stored_bytes(self.values)


def packed(codes: Codes) -> Tensors:
    """Return the tensors of the compressed-tensors format ``pack-quantized``."""
    return {
        "weight_packed": pack_to_int32(codes.values.cpu(), codes.grid.bits),
        "weight_scale": codes.scales.cpu().contiguous(),
        "weight_shape": torch.tensor(codes.values.shape),
    }


def unpacked(tensors: Tensors, grid: Grid) -> Codes:
    """Return the codes of ``packed``."""
    shape = torch.Size(tensors["weight_shape"].tolist())
    values = unpack_from_int32(tensors["weight_packed"], grid.bits, shape)
    return Codes(values, tensors["weight_scale"], grid)


def tensors_of(matrix: Matrix) -> Tensors:
    """Return what is stored beside the module's name: packed codes, or a plain weight."""
    if isinstance(matrix, Codes):
        return packed(matrix)
    return {"weight": matrix.weight().cpu().contiguous()}


def format_config(grid: Grid) -> dict[str, object]:
    """Return config.json's ``quantization_config`` of packed codes."""
    weights = {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": grid.group_size,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
