"""Sparse storage of a pruned matrix: a bitmask and the nonzero values."""

import torch

_BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the mask (eight weights per byte) and the nonzero values, in row-major order."""
    flat = weight.flatten().cpu()
    mask = flat != 0
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -len(flat) % 8))
    packed = (padded.view(-1, 8) * _BITS).sum(dim=1).to(torch.uint8)
    return {"mask": packed, "values": flat[mask], "shape": torch.tensor(weight.shape)}


def decode(stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the matrix that ``encode`` stored, bit-exact."""
    rows, columns = stored["shape"].tolist()
    bits = stored["mask"][:, None].bitwise_and(_BITS[None, :]).ne(0).flatten()
    flat = torch.zeros(rows * columns, dtype=stored["values"].dtype)
    flat[bits[: rows * columns]] = stored["values"]
    return flat.view(rows, columns)


def stored_bytes(weight: torch.Tensor) -> int:
    """Return the bytes of mask and values."""
    nonzero_count = int(torch.count_nonzero(weight))
    return -(-weight.numel() // 8) + nonzero_count * weight.element_size()
