"""Switches a model's attention implementation."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Use another attention implementation while the block runs."""
    before = str(model.config._attn_implementation)  # noqa: SLF001 - there is no other reader
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
