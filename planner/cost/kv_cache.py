"""The KV cache: keys and values of every cached token, on one device.

Sliding-window layers keep at most their window. Pages round each sequence up. More ranks than KV
heads replicate heads instead of splitting them. A shared prefix is kept once.
"""

from planner.cost.columns import maximum, minimum, round_up
from planner.cost.equation import equation
from planner.cost.quantity import Quantity
from planner.specs.model import ModelSpec

BLOCK_TOKENS = 16


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

    Shapes: K and V, each [num_layers, num_tokens, kv_heads_per_rank, head_dim].
    """
    heads = maximum(num_kv_heads / tensor_parallel_size, 1.0)
    return 2 * heads * head_dim * kv_bytes_per_element * num_layers * num_tokens


def cached_tokens(sequence: Quantity, window: int | None, *, paged: bool) -> Quantity:
    """Return the tokens that one layer keeps of a sequence: its window, in whole pages."""
    kept = sequence if window is None else minimum(sequence, float(window))
    return round_up(kept, BLOCK_TOKENS) if paged else kept


def layer_tokens(model: ModelSpec, sequence: Quantity, *, paged: bool) -> Quantity:
    """Return the tokens kept by all layers of one sequence, summed over the layers."""
    total: Quantity = 0.0
    for group in model.layers_by_attention:
        total = total + group.count * cached_tokens(sequence, group.window, paged=paged)
    return total
