"""Group-wise 4-bit weights: a scale and an offset for each group of a row's values.

Source: Sheng et al. 2023 (FlexGen), arXiv:2303.06865, section 5: asymmetric, groups of 64.
"""

# mypy: disable-error-code="no-untyped-call"
# torch ships types, but leaves some of its functions without.

import torch

from runners.jobs.generate.caches import Packed
from runners.jobs.stored import Tensors

BITS = 4
MATRIX = 2  # dimensions
PARTS = Packed._fields


def packed(tensors: Tensors, group_size: int) -> dict[str, torch.Tensor]:
    """Return a layer's tensors with each matrix of whole groups as its packed parts.

    A part's name is the matrix's and its own; everything else stays as it is.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != MATRIX or tensor.shape[-1] % group_size:
            found[name] = tensor
            continue
        groups = Packed.of(tensor.unflatten(-1, (-1, group_size)), BITS)
        found |= {f"{name}.{part}": value for part, value in groups._asdict().items()}
    return found


def unpacked(tensors: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a layer's tensors with matrices whole again, as near as four bits allow."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        matrix, _, part = name.rpartition(".")
        if part not in PARTS:
            found[name] = tensor
        elif part == PARTS[0]:
            parts = Packed(*(tensors[f"{matrix}.{each}"] for each in PARTS))
            found[matrix] = parts.unpacked(BITS, dtype).flatten(-2)
    return found
