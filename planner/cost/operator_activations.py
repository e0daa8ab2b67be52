"""Saved tensors of a layer of native PyTorch operators, counted by operator.

A product saves its inputs, a norm its fp32 input and the normalised value, a gate both factors, a
softmax its result. With autocast or adapters, each matrix saves its own copy of the input. The
counts are measured on real ranks: see the docs page training-memory.
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
# Bytes per score: the fp32 result of the softmax, and the 16-bit copy for the product.
FP32_SCORE_BYTES, NARROW_SCORE_BYTES = 4, 2
# Gradients of probabilities and of scores, both in fp32 around the softmax.
SCORE_GRADIENT_BYTES = 8


@dataclass(frozen=True)
class Operators:
    """The element sizes and trained matrices of a layer.

    ``residual_bytes`` and ``product_bytes`` are those of an element of the residual and of an
    operand. ``adapted`` are the frozen matrices with adapters of this ``rank``; None if the
    matrices themselves are trained.
    """

    residual_bytes: float
    product_bytes: float
    adapted: Adapted | None = None
    rank: int = 0
    writes_scores: bool = True

    @property
    def copies_inputs(self) -> bool:
        """Return whether each matrix saves its own copy of its input."""
        return self.adapted is not None or self.product_bytes < self.residual_bytes

    @property
    def learns_everywhere(self) -> bool:
        """Return whether every matrix or its adapter is trained and saves its input."""
        return self.adapted != "query_value"

    @property
    def narrow(self) -> float:
        """Return the size of an operand element relative to a residual element."""
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
    """Return the extra bytes of the layer in its backward pass: recomputed tensors and gradients.

    The feed-forward block is first: its tensors are freed before the gradients of the scores.
    """
    rebuilt = num_tokens * rebuilt_bytes + scores
    later = score_gradients - num_tokens * feed_forward_bytes
    return rebuilt + maximum(num_tokens * gradient_bytes, later)


def kept_residuals(model: ModelSpec, how: Operators) -> float:
    """Return the saved residual-wide tensors of a layer, in units of the residual's bytes."""
    wide = FP32_BYTES / how.residual_bytes
    scaled = 1.0 if model.norm == "rmsnorm" and how.adapted is None else 0.0
    return model.norms_per_layer * (wide + scaled) + _inputs(model, how) * how.narrow


def _inputs(model: ModelSpec, how: Operators) -> int:
    """Return the number of saved copies of the norms' outputs."""
    if not how.learns_everywhere:
        return QUERY_VALUE
    return QUERY_KEY_VALUE + _gates(model) if how.copies_inputs else model.norms_per_layer


def kept_width(model: ModelSpec, how: Operators) -> float:
    """Return the other saved elements per token of a layer, in the operand format."""
    operands = mean_width(model, partial(_operands, how))
    return operands + feed_forward_kept(model, how) + _ranks(model, how)


def feed_forward_kept(model: ModelSpec, how: Operators) -> float:
    """Return the saved elements per token of the feed-forward block without its input."""
    tensors = GATED_FFN_TENSORS if model.gated_mlp else PLAIN_FFN_TENSORS
    return (tensors if how.learns_everywhere else tensors - 1) * widest_feed_forward(model)


def product_residuals(how: Operators) -> float:
    """Return the residual-wide tensors if only products are saved: input and two outputs."""
    outputs = OUT_AND_DOWN * (2 if how.adapted == "all" else 1)
    return 1 + outputs * how.narrow


def product_width(model: ModelSpec, how: Operators) -> float:
    """Return the other saved outputs per token of products, fused attention and adapters."""
    projected = mean_width(model, _projected)
    feed_forward = _gates(model) * widest_feed_forward(model)
    adapters = 0.0
    if how.adapted is not None:
        every = how.adapted == "all"
        adapters = mean_width(model, partial(_projected, keys=every)) + (
            feed_forward if every else 0.0
        )
    fused = 0.0 if how.writes_scores else mean_width(model, _attention_output)
    return projected + feed_forward + adapters + fused + _ranks(model, how)


def gradient_width(model: ModelSpec) -> float:
    """Return the live gradient elements per token of the feed-forward block.

    The gradients of both factors of a gate exist together with that of their product.
    """
    return (PLAIN_FFN_TENSORS + (1 if model.gated_mlp else 0)) * widest_feed_forward(model)


def score_element_bytes(product_bytes: float) -> float:
    """Return the saved bytes per score of eager attention."""
    narrow = product_bytes < FP32_BYTES
    return FP32_SCORE_BYTES + (NARROW_SCORE_BYTES if narrow else 0)


def _gates(model: ModelSpec) -> int:
    return 2 if model.gated_mlp else 1


def _ranks(model: ModelSpec, how: Operators) -> int:
    """Return the sum of the ranks of a layer's adapters."""
    if how.adapted is None:
        return 0
    every = QUERY_KEY_VALUE + _gates(model) + OUT_AND_DOWN
    return how.rank * (every if how.adapted == "all" else QUERY_VALUE)


def _operands(how: Operators, model: ModelSpec, group: LayerGroup) -> int:
    """Return the saved operands per token of attention and of its output projection."""
    if not isinstance(group, AttentionLayers):
        return group_width(model, group)
    values = group.heads * group.value_dim
    if how.writes_scores:
        return 2 * group.heads * group.key_dim + values * (2 if how.learns_everywhere else 1)
    copies_result = how.adapted == "all"  # an own copy in addition to the kernel's result
    return _projected(model, group) + values * (2 if copies_result else 1)


def _projected(model: ModelSpec, group: LayerGroup, *, keys: bool = True) -> int:
    """Return the width of queries, keys and values, or of queries and values only."""
    if not isinstance(group, AttentionLayers):
        return group_width(model, group)
    key = group.kv_heads * group.key_dim if keys else 0
    return group.heads * group.key_dim + key + group.kv_heads * group.value_dim


def _attention_output(_model: ModelSpec, group: LayerGroup) -> int:
    return group.heads * group.value_dim if isinstance(group, AttentionLayers) else 0
