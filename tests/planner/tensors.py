"""A slow second opinion: every tensor of a decoder by name and shape, cut rank by rank.

It shares no formula with the planner: it lists what a checkpoint of a dense or sparse decoder
holds, cuts each matrix as Megatron does and adds up elements. Only for models without biases.
"""

from dataclasses import dataclass
from math import prod

from planner.specs.model import ModelSpec

COLUMN, ROW, WHOLE, HEADS, EXPERT = "column", "row", "whole", "heads", "expert"


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, and how tensor parallelism cuts it."""

    name: str
    shape: tuple[int, ...]
    cut: str

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def elements_on_a_rank(self, ranks: int, kv_heads: int) -> float:
        """Return what one rank holds; a key-value head is never cut, only repeated."""
        if self.cut == WHOLE:
            return self.elements
        if self.cut == HEADS:
            heads = max(1, kv_heads // ranks)
            return self.elements * heads / kv_heads
        return self.elements / ranks


def attention_tensors(model: ModelSpec, layer: int) -> list[Tensor]:
    hidden = model.hidden_size
    query = model.num_attention_heads * model.head_dim
    key_value = model.num_key_value_heads * model.head_dim
    at = f"layers.{layer}.attention"
    return [
        Tensor(f"{at}.q", (query, hidden), COLUMN),
        Tensor(f"{at}.k", (key_value, hidden), HEADS),
        Tensor(f"{at}.v", (key_value, hidden), HEADS),
        Tensor(f"{at}.o", (hidden, query), ROW),
    ]


def feed_forward_tensors(model: ModelSpec, layer: int) -> list[Tensor]:
    hidden, at = model.hidden_size, f"layers.{layer}.mlp"
    names = ("gate", "up", "down") if model.gated_mlp else ("up", "down")
    if not model.is_moe:
        width = model.intermediate_size
        return [Tensor(f"{at}.{name}", (width, hidden), COLUMN) for name in names]
    width = model.moe_intermediate_size
    experts = [
        Tensor(f"{at}.experts.{number}.{name}", (width, hidden), EXPERT)
        for number in range(model.num_experts)
        for name in names
    ]
    return [Tensor(f"{at}.router", (model.num_experts, hidden), WHOLE), *experts]


def norm_tensors(model: ModelSpec, layer: int) -> list[Tensor]:
    at = f"layers.{layer}.norm"
    norms = [
        Tensor(f"{at}.{n}", (model.hidden_size,), WHOLE) for n in range(model.norms_per_layer)
    ]
    if model.qk_norm:
        norms += [Tensor(f"{at}.{side}", (model.head_dim,), WHOLE) for side in ("q", "k")]
    return norms


def layer_tensors(model: ModelSpec, layer: int) -> list[Tensor]:
    """Return the tensors of one layer."""
    parts = (attention_tensors, feed_forward_tensors, norm_tensors)
    return [tensor for part in parts for tensor in part(model, layer)]


def vocabulary_tensors(model: ModelSpec) -> list[Tensor]:
    shape = (model.vocab_size, model.hidden_size)
    tied = [] if model.tie_word_embeddings else [Tensor("head", shape, COLUMN)]
    return [Tensor("embedding", shape, COLUMN), *tied]


def all_tensors(model: ModelSpec) -> list[Tensor]:
    """Return the whole checkpoint."""
    layers = [t for n in range(model.num_hidden_layers) for t in layer_tensors(model, n)]
    return [*vocabulary_tensors(model), *layers, Tensor("norm", (model.hidden_size,), WHOLE)]


def bytes_on_a_rank(model: ModelSpec, ranks: int, bytes_each: float) -> float:
    """Return the bytes of all weights that one tensor-parallel rank holds."""
    tensors = all_tensors(model)
    held = sum(t.elements_on_a_rank(ranks, model.num_key_value_heads) for t in tensors)
    return held * bytes_each


def cached_bytes(model: ModelSpec, lengths: list[int], ranks: int, bytes_each: float) -> float:
    """Return the bytes of keys and values of these sequences on one rank, token by token."""
    heads = max(1, model.num_key_value_heads // ranks)
    per_token = 2 * heads * model.head_dim * bytes_each
    return sum(length * model.num_hidden_layers * per_token for length in lengths)
