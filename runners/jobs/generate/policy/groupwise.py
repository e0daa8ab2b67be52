"""Group-wise 4-bit weight quantisation: a scale and an offset per group of a row's values.

Source: Sheng et al. 2023 (FlexGen), arXiv:2303.06865, section 5: asymmetric, groups of 64.
"""

# mypy: disable-error-code="no-untyped-call"
# torch ships types, but leaves some of its functions untyped.

import torch

from runners.jobs.generate.caches import Packed
from runners.jobs.stored import Tensors

BITS = 4
MATRIX = 2  # dimensions
PARTS = Packed._fields


def packed(tensors: Tensors, group_size: int) -> dict[str, torch.Tensor]:
    """Return a layer's tensors with each matrix of whole groups quantised to packed parts.

    A part is named ``<matrix>.<part>``; other tensors are unchanged.
    """
    tensors_out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != MATRIX or tensor.shape[-1] % group_size:
            tensors_out[name] = tensor
            continue
        groups = Packed.of(tensor.unflatten(-1, (-1, group_size)), BITS)
        tensors_out |= {f"{name}.{part}": value for part, value in groups._asdict().items()}
    return tensors_out


def unpacked(tensors: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a layer's tensors with dequantised matrices."""
    tensors_out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        matrix, _, part = name.rpartition(".")
        if part not in PARTS:
            tensors_out[name] = tensor
        elif part == PARTS[0]:
            parts = Packed(*(tensors[f"{matrix}.{each}"] for each in PARTS))
            tensors_out[matrix] = parts.unpacked(BITS, dtype).flatten(-2)
    return tensors_out
