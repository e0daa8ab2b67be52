"""A paged KV cache, and attention that reads keys and values from its pages.

One forward pass takes the new tokens of all sequences in one row: prefill chunks and single
decode tokens together. Only the pages of decoding sequences are padded.

Source: Kwon et al. 2023 (PagedAttention, vLLM), arXiv:2309.06180, section 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from runners.jobs.memory import tensor_bytes
from runners.jobs.runtime import BadInputError

PAGED = "slipway_paged"
PAGE_TOKENS = 16
CHECK_TOKENS = 40
CHECK_PIECES = (23, 16, 1)  # chunks of the check prompt: first, rest, one decode token
TOLERANCE = 0.05  # of the largest logit: bf16 rounds at 0.4 %, a wrong mask is off by far more


def pages_for(tokens: int) -> int:
    """Return the number of pages that a token count needs."""
    return -(-tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class TokenRow:
    """The new tokens of one sequence, and all of its pages."""

    tokens: Sequence[int]
    start: int  # position of the first new token
    pages: Sequence[int]

    @property
    def length(self) -> int:
        """Return the sequence's length after this step."""
        return self.start + len(self.tokens)

    def slots(self, begin: int) -> torch.Tensor:
        """Return the pool slots of the tokens from ``begin`` to the last."""
        positions = torch.arange(begin, self.length)
        table = torch.tensor(self.pages)
        return table[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS


class PagedCache:
    """The page pool: the free pages, and one key and one value tensor per layer.

    One more page, ``scratch_page``, belongs to no sequence: padding is written there.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.scratch_page = num_pages
        self._free = list(range(num_pages))
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def used_ratio(self) -> float:
        """Return the share of pages in use."""
        return 1.0 - len(self._free) / self.num_pages

    @property
    def bytes(self) -> int:
        """Return the bytes of the keys and values of all layers; 0 before the first pass."""
        return sum(tensor_bytes(each) for pair in self._layers.values() for each in pair)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate ``count`` pages; return None if there are not enough."""
        if count > len(self._free):
            return None
        split = len(self._free) - count
        taken, self._free = self._free[split:], self._free[:split]
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Free pages."""
        self._free.extend(pages)

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values [1, heads, tokens, size]; return the layer's whole pool."""
        if layer not in self._layers:
            self._layers[layer] = (self._new_pool(key), self._new_pool(value))
        keys, values = self._layers[layer]
        keys.index_copy_(0, slots, key[0].transpose(0, 1))
        values.index_copy_(0, slots, value[0].transpose(0, 1))
        return keys, values

    def _new_pool(self, like: torch.Tensor) -> torch.Tensor:
        _, heads, _, size = like.shape
        return like.new_zeros((self.num_pages + 1) * PAGE_TOKENS, heads, size)


class PrefillChunk:
    """A row of several tokens: a chunk of a prompt."""

    def __init__(self, row: TokenRow, device: torch.device) -> None:
        self.context = row.slots(0).to(device)
        self._before = row.length - len(row.tokens)
        self._mask = torch.ones(len(row.tokens), row.length, dtype=torch.bool, device=device).tril(
            self._before
        )

    def mask(self, window: int | None) -> torch.Tensor:
        """Return which keys each token attends to [new, all]: of a window, the last so many."""
        return self._mask if window is None else self._mask.triu(self._before - window + 1)


class DecodeRows:
    """Rows of one token each, with their contexts as one padded batch."""

    def __init__(self, rows: Sequence[TokenRow], device: torch.device) -> None:
        longest = max(pages_for(row.length) for row in rows)
        padded = [[*row.pages[:longest], *[0] * (longest - len(row.pages))] for row in rows]
        offsets = torch.arange(PAGE_TOKENS)
        table = torch.tensor(padded)[:, :, None] * PAGE_TOKENS + offsets
        self.contexts = table.flatten(1).to(device)
        self._lengths = torch.tensor([row.length for row in rows], device=device)
        self._places = torch.arange(longest * PAGE_TOKENS, device=device)

    def mask(self, window: int | None) -> torch.Tensor:
        """Return which keys each row attends to [rows, 1, 1, all]."""
        return decode_mask(self._places, self._lengths, window)


def decode_mask(places: torch.Tensor, lengths: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return which of the ``places`` [all] of a padded context each row reads [rows, 1, 1, all].

    Of a window, those are the last so many of the row's ``lengths`` [rows].
    """
    is_read = places[None] < lengths[:, None]
    if window is not None:
        is_read &= places[None] >= lengths[:, None] - window
    return is_read[:, None, None]


class AttentionInputs(Protocol):
    """What attention reads in one forward pass: where keys and values lie, and the masks."""

    def attend(
        self, layer: int, qkv: Sequence[torch.Tensor], options: dict[str, Any]
    ) -> torch.Tensor:
        """Return [1, tokens, heads, size] of queries, keys and values [1, heads, tokens, size]."""


class Step:
    """The attention inputs of one eager pass: prefill chunks first, then single tokens."""

    def __init__(self, rows: Sequence[TokenRow], cache: PagedCache, device: torch.device) -> None:
        self.cache = cache
        self.slots = torch.cat([row.slots(row.start) for row in rows]).to(device)
        several = [row for row in rows if len(row.tokens) > 1]
        self.pieces = [PrefillChunk(row, device) for row in several]
        self.bounds = [0, *accumulate(len(row.tokens) for row in several)]
        single = rows[len(several) :]
        self.decoding = DecodeRows(single, device) if single else None

    def attend(
        self, layer: int, qkv: Sequence[torch.Tensor], options: dict[str, Any]
    ) -> torch.Tensor:
        """Return [1, tokens, heads, size] of queries, keys and values [1, heads, tokens, size]."""
        query, key, value = qkv
        keys, values = self.cache.write(layer, self.slots, key, value)
        window = options.get("sliding_window")
        outputs = []
        for chunk, (begin, end) in zip(self.pieces, pairwise(self.bounds), strict=True):
            queries = query[:, :, begin:end]
            context = (keys[chunk.context][None], values[chunk.context][None])
            mask = chunk.mask(window)
            outputs.append(_attention(queries, *context, mask, options).transpose(1, 2))
        if self.decoding is not None:
            queries = query[0, :, self.bounds[-1] :].transpose(0, 1)
            context = (keys[self.decoding.contexts], values[self.decoding.contexts])
            mask = self.decoding.mask(window)
            outputs.append(decode_attention(queries, *context, mask, options))
        return torch.cat(outputs, dim=1).contiguous()


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attend; queries are [batch, heads, new, size], keys and values [batch, all, heads, size].

    Sinks (``s_aux``, a logit for each head that takes its share of the softmax and gives nothing:
    Xiao et al. 2023, arXiv:2309.17453, and gpt-oss) are one more key, whose value is zero.
    """
    sinks = options.get("s_aux")
    if sinks is not None:
        keys, values, mask = _with_sinks(query, keys, values, mask, sinks)
    return functional.scaled_dot_product_attention(
        query,
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask,
        scale=options.get("scaling"),
        enable_gqa=query.shape[1] != keys.shape[2],
    )


def _with_sinks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys and values with one more place, and the mask [..., all + 1] as logits to add.

    The sinks are as many as the query has heads in all; a decode step has them as the rows of
    each key head.
    """
    batch, heads, new, _ = query.shape
    place = (0, 0, 0, 0, 0, 1)  # one more along the second dimension
    is_grouped = len(sinks) != heads
    own = sinks.view(heads, new) if is_grouped else sinks[:, None].expand(heads, new)
    bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    bias = bias.masked_fill(~mask, float("-inf")).expand(batch, heads, new, -1)
    last = own[None, :, :, None].expand(batch, heads, new, 1).to(query.dtype)
    return (
        functional.pad(keys, place),
        functional.pad(values, place),
        torch.cat([bias, last], dim=-1),
    )


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Return [1, rows, heads, size] of one query per row [rows, heads, size].

    Keys and values are [rows, all, heads, size]. The queries of one key head are rows of one
    product, so that no kernel has to repeat the keys for each of them.
    """
    groups = query.reshape(len(query), keys.shape[2], -1, query.shape[-1])
    return _attention(groups, keys, values, mask, options).flatten(1, 2)[None]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence of ``step``, over all keys and values in its pages."""
    step: AttentionInputs = options["step"]
    layer = int(str(module.layer_idx))
    return step.attend(layer, (query, key, value), options), None


AttentionInterface.register(PAGED, paged_attention)
AttentionMaskInterface.register(PAGED, lambda *_args, **_options: None)


@torch.inference_mode()
def forward(model: PreTrainedModel, cache: PagedCache, rows: Sequence[TokenRow]) -> torch.Tensor:
    """Run the rows through the model; return the logits [rows, vocabulary] after each.

    The model's attention must be ``PAGED``; rows of several tokens come before single ones.
    """
    device = next(model.parameters()).device
    ids = torch.tensor([[token for row in rows for token in row.tokens]], device=device)
    positions = torch.cat([torch.arange(row.start, row.length) for row in rows]).to(device)
    ends = torch.tensor(list(accumulate(len(row.tokens) for row in rows)), device=device)
    output = model(
        input_ids=ids,
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=ends - 1,
        step=Step(rows, cache, device),
    )
    logits: torch.Tensor = output.logits[0].float()
    return logits


PAGED_LAYERS = {"full_attention", "sliding_attention"}  # of ``layer_types``


def check_layers(model: PreTrainedModel) -> None:
    """Check that every layer keeps keys and values that pages can hold.

    Raises:
        BadInputError: a layer has another state or attends by chunks; the message names it.
    """
    config = model.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or ()) - PAGED_LAYERS
    if not other:
        layers = {type(layer) for layer in DynamicCache(config=config).layers}
        other = {each.__name__ for each in layers - {DynamicLayer, DynamicSlidingWindowLayer}}
    if other:
        raise BadInputError(
            f"this engine serves layers that attend to the whole context or to a window, and "
            f"{type(model).__name__} has {', '.join(sorted(other))}; choose llama.cpp with the "
            "model's GGUF files, or another model"
        )


def check_paging(model: PreTrainedModel, cache: PagedCache, vocabulary: int) -> None:
    """Compare paged with ordinary attention on one prompt, before serving begins.

    It also allocates each layer's pool. The model's attention is ``PAGED`` afterwards.

    Raises:
        BadInputError: the logits differ: the architecture has a different attention.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (CHECK_TOKENS,), generator=generator).tolist()
    expected = _plain_logits(model, tokens)
    model.set_attn_implementation(PAGED)
    pages = cache.allocate(pages_for(len(tokens))) or []
    start = 0
    paged = expected
    for count in CHECK_PIECES:
        row = TokenRow(tokens[start : start + count], start, pages)
        paged = forward(model, cache, [row])[0]
        start += count
    cache.free(pages)
    error = float((paged - expected).abs().max() / expected.abs().max())
    if not error <= TOLERANCE:
        msg = (
            f"read from pages, {type(model).__name__} answers otherwise than whole (logits off "
            f"by {error:.0%}), so it cannot be served by this engine; choose another model"
        )
        raise BadInputError(msg)


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    device = next(model.parameters()).device
    output = model(input_ids=torch.tensor([tokens], device=device), use_cache=False)
    logits: torch.Tensor = output.logits[0, -1].float()
    return logits
