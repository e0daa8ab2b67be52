"""The KV cache of one device: keys and values, latents or states, and vLLM's pool of blocks."""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from planner.cost.quantity import (
    Equation,
    Ledger,
    Line,
    PerLayerGroup,
    Quantity,
    equation,
    maximum,
    minimum,
    round_up,
    where,
)
from planner.cost.quantity import ceil as ceil_of
from planner.specs.model import (
    AttentionLayers,
    CompressedLayers,
    IndexLayers,
    LatentLayers,
    LayerGroup,
    ModelSpec,
    RecurrentLayers,
)

BLOCK_TOKENS = 16
STATE_BYTES_PER_ELEMENT = 4
CONV_BYTES_PER_ELEMENT = 2
# Indexers cache fp8 keys with one 32-bit scale each.
INDEX_SCALE_BYTES = 4


@equation(
    "C = 2 · max(k/t, 1) · d · B · L · T",
    unit="B",
    symbols={
        "num_kv_heads": "k",
        "tensor_parallel_size": "t",
        "head_dim": "d",
        "kv_bytes_per_element": "B",
        "num_layers": "L",
        "num_tokens": "T",
    },
    source="Kwon et al. 2023 (PagedAttention), arXiv:2309.06180, section 3",
)
def kv_cache_bytes(
    *,
    num_kv_heads: Quantity,
    tensor_parallel_size: Quantity,
    head_dim: Quantity,
    kv_bytes_per_element: Quantity,
    num_layers: Quantity,
    num_tokens: Quantity,
) -> Quantity:
    """Return the KV-cache bytes that one rank holds for ``num_tokens`` tokens of some layers.

    Shapes: K and V, each [num_layers, num_tokens, kv_heads_per_rank, head_dim], where
    ``head_dim`` is the mean of both if values are narrower than keys.
    """
    heads = maximum(num_kv_heads / tensor_parallel_size, 1.0)
    return 2 * heads * head_dim * kv_bytes_per_element * num_layers * num_tokens


@equation(
    "C = (r + d_rope) · B · L · T",
    unit="B",
    symbols={
        "kv_lora_rank": "r",
        "rope_dim": "d_rope",
        "kv_bytes_per_element": "B",
        "num_layers": "L",
        "num_tokens": "T",
    },
    source="DeepSeek-V2, arXiv:2405.04434, section 2.1",
)
def latent_cache_bytes(
    *,
    kv_lora_rank: Quantity,
    rope_dim: Quantity,
    kv_bytes_per_element: Quantity,
    num_layers: Quantity,
    num_tokens: Quantity,
) -> Quantity:
    """Return the bytes of latents and rotary keys, replicated on all tensor-parallel ranks.

    Shape: [num_layers, num_tokens, kv_lora_rank + rope_dim].
    """
    return (kv_lora_rank + rope_dim) * kv_bytes_per_element * num_layers * num_tokens


@equation(
    "C = (d + B_scale) · L · T",
    unit="B",
    symbols={
        "head_dim": "d",
        "scale_bytes": "B_scale",
        "num_layers": "L",
        "num_tokens": "T",
    },
    source="DeepSeek-V3.2, arXiv:2512.02556, section 2.1: one 8-bit index key a token",
)
def index_cache_bytes(
    *, head_dim: Quantity, scale_bytes: Quantity, num_layers: Quantity, num_tokens: Quantity
) -> Quantity:
    """Return the bytes of 8-bit index keys with one scale each, replicated on every rank."""
    return (head_dim + scale_bytes) * num_layers * num_tokens


@equation(
    "C = (S · 4 + s_conv · B) / t · L · b",
    unit="B",
    symbols={
        "state_elements": "S",
        "conv_elements": "s_conv",
        "conv_bytes_per_element": "B",
        "tensor_parallel_size": "t",
        "num_layers": "L",
        "num_sequences": "b",
    },
    source="Dao and Gu 2024 (Mamba-2), arXiv:2405.21060: a state of constant size a sequence",
)
def state_bytes(
    *,
    state_elements: Quantity,
    conv_elements: Quantity,
    conv_bytes_per_element: Quantity,
    tensor_parallel_size: Quantity,
    num_layers: Quantity,
    num_sequences: Quantity,
) -> Quantity:
    """Return the bytes of 32-bit recurrent states and the convolutions' last inputs."""
    each = state_elements * STATE_BYTES_PER_ELEMENT + conv_elements * conv_bytes_per_element
    return each / tensor_parallel_size * num_layers * num_sequences


def cached_tokens(sequence: Quantity, window: int | None, *, paged: bool) -> Quantity:
    """Return the cached tokens of a sequence in one layer.

    All of its tokens, or at most ``window``; rounded up to whole pages if ``paged``.
    """
    tokens = sequence if window is None else minimum(sequence, float(window))
    return round_up(tokens, BLOCK_TOKENS) if paged else tokens


def cached_tokens_per_layer(group: LayerGroup, sequence: Quantity, *, paged: bool) -> Quantity:
    """Return the cached tokens of a sequence in one layer; 1 state in a recurrent layer."""
    if isinstance(group, RecurrentLayers):
        return sequence * 0 + 1.0
    if isinstance(group, AttentionLayers):
        if group.reuses_cache:
            return sequence * 0.0
        return cached_tokens(sequence, group.window, paged=paged)
    if isinstance(group, LatentLayers | IndexLayers):
        return cached_tokens(sequence / _ratio(group), None, paged=paged)
    if isinstance(group, CompressedLayers):
        return window_and_entries(group, sequence, None, paged=paged)
    return sequence * 0.0


def _ratio(group: LatentLayers | IndexLayers) -> int:
    return group.ratio if isinstance(group, IndexLayers) else 1


def window_and_entries(
    group: CompressedLayers, sequence: Quantity, top_k: int | None, *, paged: bool
) -> Quantity:
    """Return the tokens of the window plus the compressed entries, at most ``top_k``."""
    window = cached_tokens(sequence, group.window, paged=paged)
    if group.ratio is None:
        return window
    return window + cached_tokens(sequence / group.ratio, top_k, paged=paged)


def cached_tokens_by_layer_group(
    model: ModelSpec, sequence: Quantity, *, paged: bool
) -> PerLayerGroup:
    """Return the cached tokens of one sequence, summed over the layers of each group."""
    return PerLayerGroup.of(
        model, lambda group: cached_tokens_per_layer(group, sequence, paged=paged)
    )


def read_tokens_by_layer_group(model: ModelSpec, sequence: Quantity) -> PerLayerGroup:
    """Return the cached tokens that a decode step reads, summed over the layers of each group.

    Indexed attention reads the selected tokens; a layer without its own cache reads another's; a
    recurrent state is read and written.
    """
    return PerLayerGroup.of(model, lambda group: _read_tokens_per_layer(group, sequence))


def _read_tokens_per_layer(group: LayerGroup, sequence: Quantity) -> Quantity:
    if isinstance(group, LatentLayers):
        return cached_tokens(sequence, group.top_k, paged=False)
    if isinstance(group, AttentionLayers):
        return cached_tokens(sequence, group.window or group.top_k, paged=False)
    if isinstance(group, CompressedLayers):
        return window_and_entries(group, sequence, group.top_k, paged=False)
    if isinstance(group, RecurrentLayers):
        return sequence * 0 + 2.0
    return cached_tokens_per_layer(group, sequence, paged=False)


def mean_dim(group: AttentionLayers | LatentLayers) -> float:
    """Return the mean width of a key and a value, which are equal in most models."""
    return (group.key_dim + group.value_dim) / 2


def cache_bytes(
    model: ModelSpec,
    tokens: PerLayerGroup,
    tensor_parallel_size: Quantity,
    kv_bytes_per_element: Quantity,
    record: tuple[Ledger, Line],
    share: Quantity = 1.0,
) -> float:
    """Return the cache bytes on one rank for stored or read tokens per group of layers.

    ``share`` is the share of the layers on the rank's pipeline stage. Each group is one term in
    the ledger of ``record``.
    """
    ledger, line = record
    total = 0.0
    for group, group_total in zip(model.layers_by_attention, tokens.values, strict=True):
        formula_of_group = _formula_of(group, tensor_parallel_size, kv_bytes_per_element)
        if formula_of_group is None:
            continue
        formula, count_name, values = formula_of_group
        values |= {"num_layers": group.count * share, count_name: group_total / group.count}
        total = total + ledger.term(formula, line, **values)
    return total


def _formula_of(
    group: LayerGroup, ranks: Quantity, element_bytes: Quantity
) -> tuple[Equation[...], str, dict[str, Quantity]] | None:
    """Return a group's formula, the name of its count and its shape; None without a cache."""
    if isinstance(group, AttentionLayers):
        shape: dict[str, Quantity] = {
            "num_kv_heads": group.kv_heads,
            "tensor_parallel_size": ranks,
            "head_dim": mean_dim(group),
            "kv_bytes_per_element": element_bytes,
        }
        return kv_cache_bytes, "num_tokens", shape
    if isinstance(group, LatentLayers):
        shape = {
            "kv_lora_rank": group.kv_lora_rank,
            "rope_dim": group.qk_rope_head_dim,
            "kv_bytes_per_element": element_bytes,
        }
        return latent_cache_bytes, "num_tokens", shape
    if isinstance(group, CompressedLayers):
        shape = {
            "kv_lora_rank": group.head_dim,
            "rope_dim": 0,
            "kv_bytes_per_element": element_bytes,
        }
        return latent_cache_bytes, "num_tokens", shape
    if isinstance(group, IndexLayers):
        shape = {"head_dim": group.head_dim, "scale_bytes": INDEX_SCALE_BYTES}
        return index_cache_bytes, "num_tokens", shape
    if isinstance(group, RecurrentLayers):
        shape = {
            "state_elements": group.state_elements,
            "conv_elements": group.conv_elements,
            "conv_bytes_per_element": CONV_BYTES_PER_ELEMENT,
            "tensor_parallel_size": ranks,
        }
        return state_bytes, "num_sequences", shape
    return None


# vLLM's one pool of equal blocks for layers that cache windows, entries and partial states.
#
# Every group of layers takes blocks of one size from it, however few bytes the group stores there:
# a block of four tokens' compressor states costs as much as one of 256 tokens' entries. During a
# step the windowed groups hold all tokens of the step beside their windows.
#
# Source: vLLM 0.20 to 0.26, vllm/v1/core/kv_cache_utils.py (_get_kv_cache_groups_uniform_groups,
# _get_kv_cache_config_deepseek_v4) and vllm/v1/kv_cache_interface.py (SlidingWindowSpec); sizes of
# blocks from vllm/models/deepseek_v4 (attention.py, compressor.py) and sparse_swa.py.


POOL_BLOCK_TOKENS, WINDOW_BLOCK = 256, 64
STATE_BLOCKS = {4: 4}  # tokens of states per block, by ratio
OTHER_STATE_BLOCK = 8
OVERLAPPING_RATIO = 4  # these compressors mix each entry with the one before
# Rotary dimensions stay in 16 bits beside narrower ones, which have 8 bytes of scales.
ROTARY_DIMS, ENTRY_SCALE_BYTES = 64, 8
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
    for count, cached_tokens, size in (
        (windowed, window, WINDOW_BLOCK),
        *(
            (
                count,
                ratio * (2 if ratio == OVERLAPPING_RATIO else 1),
                STATE_BLOCKS.get(ratio, OTHER_STATE_BLOCK),
            )
            for ratio, count in layers.items()
        ),
    ):
        pools = ceil(count / shared)
        blocks += pools * (ceil(cached_tokens / size) + 1)
        per_token += pools / size
    index = next((group for group in groups if isinstance(group, IndexLayers)), None)
    keys = POOL_BLOCK_TOKENS / index.ratio * (index.head_dim + INDEX_SCALE_BYTES) if index else 0.0
    return PagePool(
        layers_per_block=shared,
        entries_per_page=tuple(POOL_BLOCK_TOKENS / ratio for ratio in layers),
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
    each = ceil_of(num_tokens / POOL_BLOCK_TOKENS) + window_blocks
    beside = ceil_of(shared_tokens / POOL_BLOCK_TOKENS) + blocks_per_step_token * step_tokens
    return bytes_per_block * (num_requests * each + beside)


def step_tokens_outside_window(group: LayerGroup, step_tokens: Quantity) -> Quantity:
    """Return the tokens of a step that a windowed layer holds beside the windows of requests."""
    if isinstance(group, AttentionLayers) and group.window and not group.reuses_cache:
        return maximum(0.0, step_tokens - float(group.window))
    return step_tokens * 0.0
