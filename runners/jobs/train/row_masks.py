"""Attention masks of rows that hold one text each, without a look at their positions."""

import contextlib
from collections.abc import Iterator

import torch
from transformers import masking_utils

CHECK = "find_packed_sequence_indices"  # transformers 5: whether positions restart within a row


@contextlib.contextmanager
def one_text_per_row() -> Iterator[None]:
    """Build masks within the block as for rows of one text.

    Without a mask, transformers looks for packed texts in the positions of every forward pass, and
    with it waits until the device has finished the micro-batch before.
    """

    def none_packed(_position_ids: torch.Tensor) -> None:
        return None

    if not hasattr(masking_utils, CHECK):
        yield
        return
    looks = getattr(masking_utils, CHECK)
    setattr(masking_utils, CHECK, none_packed)
    try:
        yield
    finally:
        setattr(masking_utils, CHECK, looks)
