"""The KV cache of one device: keys and values, latents or recurrent states of all sequences.

Sliding-window and chunked layers store at most their window; pages round each sequence up. With
more ranks than KV heads, heads are replicated; latents have no heads, so every rank stores them
whole; recurrent states have a constant size. A shared prefix is stored once.
"""

from planner.cost.columns import maximum, minimum, round_up
from planner.cost.equation import Equation, Ledger, Line, equation
from planner.cost.layers import PerGroup
from planner.cost.quantity import Quantity
from planner.specs.layers import (
    AttentionLayers,
    CompressedLayers,
    IndexLayers,
    LatentLayers,
    LayerGroup,
    RecurrentLayers,
)
from planner.specs.model import ModelSpec

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
    """Return the cached tokens of a sequence in one layer: its window, in whole pages."""
    tokens = sequence if window is None else minimum(sequence, float(window))
    return round_up(tokens, BLOCK_TOKENS) if paged else tokens


def group_tokens(group: LayerGroup, sequence: Quantity, *, paged: bool) -> Quantity:
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


def layer_tokens(model: ModelSpec, sequence: Quantity, *, paged: bool) -> PerGroup:
    """Return the cached tokens of one sequence, summed over the layers of each group."""
    return PerGroup.of(model, lambda group: group_tokens(group, sequence, paged=paged))


def read_tokens(model: ModelSpec, sequence: Quantity) -> PerGroup:
    """Return the cached tokens that a decode step reads, summed over the layers of each group.

    Indexed attention reads the selected tokens; a layer without its own cache reads another's; a
    recurrent state is read and written.
    """
    return PerGroup.of(model, lambda group: _group_reads(group, sequence))


def _group_reads(group: LayerGroup, sequence: Quantity) -> Quantity:
    if isinstance(group, LatentLayers):
        return cached_tokens(sequence, group.top_k, paged=False)
    if isinstance(group, AttentionLayers):
        return cached_tokens(sequence, group.window or group.top_k, paged=False)
    if isinstance(group, CompressedLayers):
        return window_and_entries(group, sequence, group.top_k, paged=False)
    if isinstance(group, RecurrentLayers):
        return sequence * 0 + 2.0
    return group_tokens(group, sequence, paged=False)


def mean_dim(group: AttentionLayers | LatentLayers) -> float:
    """Return the mean width of a key and a value, which are equal in most models."""
    return (group.key_dim + group.value_dim) / 2


def cache_bytes(
    model: ModelSpec,
    tokens: PerGroup,
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
