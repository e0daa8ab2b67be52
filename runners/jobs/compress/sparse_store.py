"""A pruned matrix as a bitmask and its values: what the zeros really save on disk."""

import torch

_BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the mask (eight weights a byte) and the values that are not zero, row by row."""
    flat = weight.flatten().cpu()
    mask = flat != 0
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -len(flat) % 8))
    packed = (padded.view(-1, 8) * _BITS).sum(dim=1).to(torch.uint8)
    return {"mask": packed, "values": flat[mask], "shape": torch.tensor(weight.shape)}


def decode(stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the matrix of ``encode``, bit for bit."""
    rows, columns = stored["shape"].tolist()
    bits = stored["mask"][:, None].bitwise_and(_BITS[None, :]).ne(0).flatten()
    flat = torch.zeros(rows * columns, dtype=stored["values"].dtype)
    flat[bits[: rows * columns]] = stored["values"]
    return flat.view(rows, columns)


def stored_bytes(weight: torch.Tensor) -> int:
    """Return the bytes of mask and values."""
    kept = int(torch.count_nonzero(weight))
    return -(-weight.numel() // 8) + kept * weight.element_size()
