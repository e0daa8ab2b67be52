"""Padding-free prefill: all prompts of a batch in one row, with attention per prompt.

Nothing is computed for padding: linear layers get real tokens only, and attention runs once per
prompt. Keys and values are then copied to a padded batch for decoding.

Source: Zhai et al. 2022 (ByteTransformer), arXiv:2210.03052, section III-D.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    DynamicCache,
    DynamicLayer,
    PreTrainedModel,
)

from runners.jobs.attention import attention
from runners.jobs.runtime import BadInputError

VARLEN = "slipway_varlen"


def varlen_attention(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each pair of consecutive ``bounds``; tensors are [1, heads, tokens, size]."""
    out = torch.empty_like(query)
    is_grouped = query.shape[1] != key.shape[1]
    for begin, end in itertools.pairwise(options["bounds"]):
        out[:, :, begin:end] = functional.scaled_dot_product_attention(
            query[:, :, begin:end],
            key[:, :, begin:end],
            value[:, :, begin:end],
            is_causal=True,
            scale=options.get("scaling"),
            enable_gqa=is_grouped,
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(VARLEN, varlen_attention)
AttentionMaskInterface.register(VARLEN, lambda *_args, **_options: None)


def check_packable(model: PreTrainedModel) -> None:
    """Check that all layers have a plain KV cache.

    Raises:
        BadInputError: some have not; the message names the layer type and an alternative.
    """
    layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if other := layers - {DynamicLayer}:
        names = ", ".join(sorted(each.__name__ for each in other))
        msg = f"packed batches need full attention in every layer, here is {names}; choose turbo"
        raise BadInputError(msg)


def packed_prefill(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], cache: Cache
) -> torch.Tensor:
    """Fill the cache as a left-padded batch, and return the next token of each prompt."""
    device = next(model.parameters()).device
    bounds = [0, *itertools.accumulate(map(len, prompts))]
    ids = torch.tensor([[token for each in prompts for token in each]], device=device)
    positions = torch.cat([torch.arange(len(each), device=device) for each in prompts])
    row_cache = DynamicCache(config=model.config)
    with attention(model, VARLEN):
        output = model(
            input_ids=ids,
            position_ids=positions[None],
            past_key_values=row_cache,
            use_cache=True,
            logits_to_keep=torch.tensor(bounds[1:], device=device) - 1,
            bounds=bounds,
        )
    layers: list[Any] = list(row_cache.layers)  # all of them DynamicLayer, as checked
    for index, layer in enumerate(layers):
        keys, values = (_padded(each, bounds) for each in (layer.keys, layer.values))
        cache.update(keys, values, index)
    tokens: torch.Tensor = output.logits[0].argmax(dim=-1)
    return tokens


def _padded(row: torch.Tensor | None, bounds: Sequence[int]) -> torch.Tensor:
    """Return [prompts, heads, longest, size] from a row [1, heads, tokens, size]."""
    if row is None:
        raise ValueError("a layer kept no keys")
    lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
    _, heads, _, size = row.shape
    out = row.new_zeros(len(lengths), heads, max(lengths), size)
    for at, length in enumerate(lengths):
        out[at, :, max(lengths) - length :] = row[0, :, bounds[at] : bounds[at + 1]]
    return out
