"""Compressed matrices and the tensors stored for them in a model folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from compressed_tensors.compressors.pack_quantized.helpers import (
    pack_to_int32,
    unpack_from_int32,
)

from runners.jobs.compress import sparse_store
from runners.jobs.compress.grid import Codes, Grid
from runners.jobspec import CompressSpec

Tensors = dict[str, torch.Tensor]
INT_QUANTIZED = "int-quantized"
TOKENS: Mapping[str, object] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}


class Matrix(Protocol):
    """A compressed matrix."""

    def weight(self) -> torch.Tensor:
        """Return the dequantised matrix."""

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of the compressed form."""


@dataclass(frozen=True)
class Pruned:
    """A pruned matrix; its compressed form is a bitmask and the nonzero values."""

    values: torch.Tensor

    def weight(self) -> torch.Tensor:
        """Return the matrix."""
        return self.values

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of bitmask and values."""
        return sparse_store.stored_bytes(self.values)


def coded(codes: Codes, spec: CompressSpec) -> Tensors:
    """Return the tensors of the spec's compressed-tensors format."""
    if format_of(spec) == INT_QUANTIZED:
        return {"weight": codes.values.cpu(), "weight_scale": codes.scales.cpu().contiguous()}
    return packed(codes)


def packed(codes: Codes) -> Tensors:
    """Return the tensors of the compressed-tensors format ``pack-quantized``."""
    return {
        "weight_packed": pack_to_int32(codes.values.cpu(), codes.grid.bits),
        "weight_scale": codes.scales.cpu().contiguous(),
        "weight_shape": torch.tensor(codes.values.shape),
    }


def decoded(tensors: Tensors, bits: int) -> Codes:
    """Return the codes stored by ``coded``; infer the group size from the scales' shape."""
    scales = tensors["weight_scale"]
    if "weight" in tensors:
        values = tensors["weight"]
    else:
        shape = torch.Size(tensors["weight_shape"].tolist())
        values = unpack_from_int32(tensors["weight_packed"], bits, shape)
    return Codes(values, scales, Grid(bits, -(-values.shape[1] // scales.shape[1])))


def tensors_of(matrix: Matrix, spec: CompressSpec) -> Tensors:
    """Return the tensors stored under the module's name: codes, or a plain weight."""
    if isinstance(matrix, Codes):
        return coded(matrix, spec)
    return {"weight": matrix.weight().cpu().contiguous()}


def format_of(spec: CompressSpec) -> str:
    """Return the compressed-tensors format of a spec's codes."""
    return "pack-quantized" if spec.has_groups else INT_QUANTIZED


def format_config(spec: CompressSpec, grids: Mapping[str, Grid]) -> dict[str, object]:
    """Return config.json's ``quantization_config``; ``grids`` maps matrix names to grids."""
    inputs = {"input_activations": dict(TOKENS)} if spec.rounds_inputs else {}
    sizes = sorted({grid.group_size for grid in grids.values()}) if spec.has_groups else [0]
    groups: dict[str, object] = {}
    for number, size in enumerate(sizes):
        own = [name for name, grid in grids.items() if grid.group_size == size]
        groups[f"group_{number}"] = {
            "targets": own if len(sizes) > 1 else ["Linear"],
            "weights": _weights_config(spec, size),
            "format": format_of(spec),  # else inferred, as int8 with activations
            **inputs,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": format_of(spec),
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": groups,
    }


def _weights_config(spec: CompressSpec, group_size: int) -> dict[str, object]:
    scales: dict[str, object] = {"strategy": "channel"}
    if spec.has_groups:
        scales = {"strategy": "group", "group_size": group_size}
    common = {"num_bits": spec.code_bits, "type": "int", "symmetric": True, "dynamic": False}
    return common | scales
