"""vLLM's one pool of equal blocks for layers that cache windows, entries and partial states.

Every group of layers takes blocks of one size from it, however few bytes the group stores there: a
block of four tokens' compressor states costs as much as one of 256 tokens' entries. During a step
the windowed groups hold all tokens of the step beside their windows.

Source: vLLM 0.20 to 0.26, vllm/v1/core/kv_cache_utils.py (_get_kv_cache_groups_uniform_groups,
_get_kv_cache_config_deepseek_v4) and vllm/v1/kv_cache_interface.py (SlidingWindowSpec); sizes of
blocks from vllm/models/deepseek_v4 (attention.py, compressor.py) and sparse_swa.py.
"""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from planner.cost.columns import ceil as ceil_of
from planner.cost.columns import maximum, round_up, where
from planner.cost.equation import equation
from planner.cost.quantity import Quantity
from planner.specs.layers import AttentionLayers, CompressedLayers, IndexLayers, LayerGroup

BLOCK_TOKENS, WINDOW_BLOCK = 256, 64
STATE_BLOCKS = {4: 4}  # tokens of states per block, by ratio
OTHER_STATE_BLOCK = 8
OVERLAPPING_RATIO = 4  # these compressors mix each entry with the one before
# Rotary dimensions stay in 16 bits beside narrower ones, which have 8 bytes of scales.
ROTARY_DIMS, ENTRY_SCALE_BYTES, INDEX_SCALE_BYTES = 64, 8, 4
ALIGNMENT = 576.0
BF16_BYTES = 2.0


class PagePool(NamedTuple):
    """The blocks of a model: layers that share one, entries in its pages, blocks in windows."""

    layers_per_block: int
    entries_per_page: tuple[float, ...]
    head_dim: int
    index_page_bytes: float
    window_blocks: float
    blocks_per_step_token: float


@lru_cache(maxsize=256)
def page_pool(groups: tuple[LayerGroup, ...]) -> PagePool | None:
    """Return the block layout of layers with compressed entries, None of other models."""
    compressed = [group for group in groups if isinstance(group, CompressedLayers)]
    layers: dict[int, int] = {}
    for group in compressed:
        if group.ratio:
            layers[group.ratio] = layers.get(group.ratio, 0) + group.count
    if not layers:
        return None
    windowed = sum(group.count for group in compressed)
    tuples = [max(layers.values()), windowed, *layers.values()]
    shared = _layers_per_block(tuples)
    window = compressed[0].window
    blocks, per_token = 0.0, 0.0
    for count, kept, size in (
        (windowed, window, WINDOW_BLOCK),
        *((count, _state_window(ratio), _state_block(ratio)) for ratio, count in layers.items()),
    ):
        pools = ceil(count / shared)
        blocks += pools * (ceil(kept / size) + 1)
        per_token += pools / size
    index = next((group for group in groups if isinstance(group, IndexLayers)), None)
    keys = BLOCK_TOKENS / index.ratio * (index.head_dim + INDEX_SCALE_BYTES) if index else 0.0
    return PagePool(
        layers_per_block=shared,
        entries_per_page=tuple(BLOCK_TOKENS / ratio for ratio in layers),
        head_dim=compressed[0].head_dim,
        index_page_bytes=ceil(keys / ALIGNMENT) * ALIGNMENT,
        window_blocks=blocks,
        blocks_per_step_token=per_token,
    )


def _layers_per_block(counts: list[int]) -> int:
    """Return the layers that share a block, so that the groups are padded least.

    >>> _layers_per_block([21, 43, 21, 20])
    22
    """
    return min(
        range(counts[0], max(counts) + 1),
        key=lambda size: (sum(-count % size for count in counts), -size),
    )


def _state_window(ratio: int) -> int:
    return ratio * (2 if ratio == OVERLAPPING_RATIO else 1)


def _state_block(ratio: int) -> int:
    return STATE_BLOCKS.get(ratio, OTHER_STATE_BLOCK)


def block_bytes(pool: PagePool, element_bytes: Quantity) -> Quantity:
    """Return the bytes of one block: a page of each kind for each layer that shares it.

    >>> from planner.catalog.models import get_model
    >>> layers = get_model("deepseek-ai/DeepSeek-V4-Flash").layers_by_attention
    >>> block_bytes(page_pool(layers), 1.0)
    1051776.0
    """
    narrow = ROTARY_DIMS * (BF16_BYTES - element_bytes) + ENTRY_SCALE_BYTES
    entry = pool.head_dim * element_bytes + where(element_bytes < BF16_BYTES, narrow, 0.0)
    pages = [round_up(entries * entry, ALIGNMENT) for entries in pool.entries_per_page]
    return pool.layers_per_block * (sum(pages[1:], start=pages[0]) + pool.index_page_bytes)


@equation(
    "C = b · (R · (⌈T/256⌉ + n_w) + ⌈P/256⌉ + n_s · T_s)",
    unit="B",
    symbols={
        "bytes_per_block": "b",
        "num_requests": "R",
        "num_tokens": "T",
        "shared_tokens": "P",
        "window_blocks": "n_w",
        "blocks_per_step_token": "n_s",
        "step_tokens": "T_s",
    },
    source="vLLM 0.20 to 0.26, vllm/v1/core/kv_cache_utils.py; issue 44376 of vLLM: 6.66 GiB for "
    "30,000 tokens of DeepSeek-V4-Flash, at most 13,528 in 5.44 GiB",
)
def pooled_cache_bytes(
    *,
    bytes_per_block: Quantity,
    num_requests: Quantity,
    num_tokens: Quantity,
    shared_tokens: Quantity,
    window_blocks: Quantity,
    blocks_per_step_token: Quantity,
    step_tokens: Quantity,
) -> Quantity:
    """Return the bytes of the blocks that requests and the tokens of one step hold on a rank.

    A request has ``num_tokens`` of its own; all have ``shared_tokens`` of a prefix in common.
    """
    each = ceil_of(num_tokens / BLOCK_TOKENS) + window_blocks
    beside = ceil_of(shared_tokens / BLOCK_TOKENS) + blocks_per_step_token * step_tokens
    return bytes_per_block * (num_requests * each + beside)


def step_tokens_outside_window(group: LayerGroup, step_tokens: Quantity) -> Quantity:
    """Return the tokens of a step that a windowed layer holds beside the windows of requests."""
    if isinstance(group, AttentionLayers) and group.window and not group.reuses_cache:
        return maximum(0.0, step_tokens - float(group.window))
    return step_tokens * 0.0
