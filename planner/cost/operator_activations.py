"""What a layer that runs as PyTorch's own operators keeps for its backward pass, one by one.

A product keeps its inputs, a norm its input in fp32 and what its weight scales, a gate both its
factors, a softmax its result. Autocast, and an adapter beside a frozen matrix, give each matrix a
copy of the input of its own. Counted on real ranks: the docs page training-memory.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from planner.cost.activations import (
    FP32_BYTES,
    GATED_FFN_TENSORS,
    KORTHIKANTI,
    PLAIN_FFN_TENSORS,
    group_width,
    mean_width,
    widest_feed_forward,
)
from planner.cost.columns import maximum
from planner.cost.equation import equation
from planner.cost.quantity import Quantity
from planner.specs.layers import AttentionLayers, LayerGroup
from planner.specs.model import ModelSpec

Adapted = Literal["all", "query_value"]
QUERY_KEY_VALUE, QUERY_VALUE, OUT_AND_DOWN = 3, 2, 2
# Of each score: the fp32 result of the softmax, and the 16-bit copy that the product reads.
FP32_SCORE_BYTES, NARROW_SCORE_BYTES = 4, 2
# Gradients of probabilities and of scores, both in fp32 around the softmax.
SCORE_GRADIENT_BYTES = 8


@dataclass(frozen=True)
class Operators:
    """How a layer's operators run, and what of it learns.

    Bytes are those of an element between layers and of one in products. ``adapted`` says beside
    which matrices an adapter of this ``rank`` learns while they are frozen; None: they learn.
    """

    residual_bytes: float
    product_bytes: float
    adapted: Adapted | None = None
    rank: int = 0
    writes_scores: bool = True

    @property
    def copies_inputs(self) -> bool:
        """Return whether each matrix keeps a copy of its input that is its own."""
        return self.adapted is not None or self.product_bytes < self.residual_bytes

    @property
    def learns_everywhere(self) -> bool:
        """Return whether every matrix needs its input: it learns, or an adapter beside it."""
        return self.adapted != "query_value"

    @property
    def narrow(self) -> float:
        """Return the bytes of a product's element in those of a residual one."""
        return self.product_bytes / self.residual_bytes


@equation(
    "A_w = T · A_r + A_s + max(T · G_1, G_s - T · F_1)",
    unit="B",
    symbols={
        "num_tokens": "T",
        "rebuilt_bytes": "A_r",
        "scores": "A_s",
        "gradient_bytes": "G_1",
        "score_gradients": "G_s",
        "feed_forward_bytes": "F_1",
    },
    source=f"{KORTHIKANTI}; gradients on their way as counted on real ranks",
)
def layer_at_work_bytes(
    *,
    num_tokens: Quantity,
    rebuilt_bytes: Quantity,
    scores: Quantity,
    gradient_bytes: Quantity,
    score_gradients: Quantity,
    feed_forward_bytes: Quantity,
) -> Quantity:
    """Return what the layer that goes backward adds: what is rebuilt, and gradients on their way.

    The feed-forward block goes first, and its tensors are gone when the scores' gradients come.
    """
    rebuilt = num_tokens * rebuilt_bytes + scores
    later = score_gradients - num_tokens * feed_forward_bytes
    return rebuilt + maximum(num_tokens * gradient_bytes, later)


def kept_residuals(model: ModelSpec, how: Operators) -> float:
    """Return how many tensors as wide as the residual a layer keeps per token, in its elements."""
    wide = FP32_BYTES / how.residual_bytes
    scaled = 1.0 if model.norm == "rmsnorm" and how.adapted is None else 0.0
    return model.norms_per_layer * (wide + scaled) + _inputs(model, how) * how.narrow


def _inputs(model: ModelSpec, how: Operators) -> int:
    """Return how many copies of a norm's output the matrices behind it keep."""
    if not how.learns_everywhere:
        return QUERY_VALUE
    return QUERY_KEY_VALUE + _gates(model) if how.copies_inputs else model.norms_per_layer


def kept_width(model: ModelSpec, how: Operators) -> float:
    """Return the other elements that a layer keeps per token, in the products' format."""
    operands = mean_width(model, partial(_operands, how))
    return operands + feed_forward_kept(model, how) + _ranks(model, how)


def feed_forward_kept(model: ModelSpec, how: Operators) -> float:
    """Return the elements per token that the feed-forward block keeps beside its input."""
    tensors = GATED_FFN_TENSORS if model.gated_mlp else PLAIN_FFN_TENSORS
    return (tensors if how.learns_everywhere else tensors - 1) * widest_feed_forward(model)


def product_residuals(how: Operators) -> float:
    """Return the residual-wide tensors kept where products alone are: input, two outputs."""
    outputs = OUT_AND_DOWN * (2 if how.adapted == "all" else 1)
    return 1 + outputs * how.narrow


def product_width(model: ModelSpec, how: Operators) -> float:
    """Return the other elements that products gave, and fused attention; adapters give theirs."""
    projected = mean_width(model, _projected)
    wide = _gates(model) * widest_feed_forward(model)
    beside = 0.0
    if how.adapted is not None:
        every = how.adapted == "all"
        beside = mean_width(model, partial(_projected, keys=every)) + (wide if every else 0.0)
    fused = 0.0 if how.writes_scores else mean_width(model, _mixed)
    return projected + wide + beside + fused + _ranks(model, how)


def gradient_width(model: ModelSpec) -> float:
    """Return the elements per token of gradients that the feed-forward block has at once.

    Those of a product's two factors stand beside its own.
    """
    return (PLAIN_FFN_TENSORS + (1 if model.gated_mlp else 0)) * widest_feed_forward(model)


def score_element_bytes(product_bytes: float) -> float:
    """Return what attention that is written out keeps of one score."""
    narrow = product_bytes < FP32_BYTES
    return FP32_SCORE_BYTES + (NARROW_SCORE_BYTES if narrow else 0)


def _gates(model: ModelSpec) -> int:
    return 2 if model.gated_mlp else 1


def _ranks(model: ModelSpec, how: Operators) -> int:
    """Return the widths between the two halves of a layer's adapters."""
    if how.adapted is None:
        return 0
    every = QUERY_KEY_VALUE + _gates(model) + OUT_AND_DOWN
    return how.rank * (every if how.adapted == "all" else QUERY_VALUE)


def _operands(how: Operators, model: ModelSpec, group: LayerGroup) -> int:
    """Return what the products of attention read, and what the matrix behind them does."""
    if not isinstance(group, AttentionLayers):
        return group_width(model, group)
    values = group.heads * group.value_dim
    if how.writes_scores:
        return 2 * group.heads * group.key_dim + values * (2 if how.learns_everywhere else 1)
    own = how.adapted == "all"  # its copy stands beside the result that the kernel keeps
    return _projected(model, group) + values * (2 if own else 1)


def _projected(model: ModelSpec, group: LayerGroup, *, keys: bool = True) -> int:
    """Return the widths of queries, keys and values, or of queries and values alone."""
    if not isinstance(group, AttentionLayers):
        return group_width(model, group)
    key = group.kv_heads * group.key_dim if keys else 0
    return group.heads * group.key_dim + key + group.kv_heads * group.value_dim


def _mixed(_model: ModelSpec, group: LayerGroup) -> int:
    return group.heads * group.value_dim if isinstance(group, AttentionLayers) else 0
