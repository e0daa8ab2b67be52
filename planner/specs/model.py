"""The shape of a language model, in the names of Hugging Face configs."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from planner.specs.base import Dtype, SparseSpec

AttentionKind = Literal["full", "sliding"]


class AttentionLayers(SparseSpec):
    """How many layers keep what of the past: all of it, or a window."""

    kind: AttentionKind = "full"
    count: PositiveInt
    window: PositiveInt | None = None


class ModelSpec(SparseSpec):
    """Everything that a cost depends on, and nothing else.

    Dense layers have one feed-forward block of ``intermediate_size``; mixture-of-experts layers
    have ``num_experts`` of ``moe_intermediate_size``, of which each token visits
    ``num_experts_per_tok``, beside ``num_shared_experts`` that see every token.
    """

    id: str = "custom"
    model_type: str
    hidden_size: PositiveInt
    intermediate_size: NonNegativeInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    tie_word_embeddings: bool = False
    gated_mlp: bool = True
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norms_per_layer: PositiveInt = 2
    qk_norm: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    learned_positions: NonNegativeInt = 0
    norm_bias: bool = False
    lm_head_bias: bool = False
    attention_layers: tuple[AttentionLayers, ...] = ()
    num_experts: NonNegativeInt = 0
    num_experts_per_tok: NonNegativeInt = 0
    moe_intermediate_size: NonNegativeInt = 0
    num_shared_experts: NonNegativeInt = 0
    num_dense_layers: NonNegativeInt = 0
    weight_dtype: Dtype | None = Field(default=None, description="as published")
    quantization: str | None = Field(default=None, description="of the published checkpoint")
    source: str | None = None
    as_of: str | None = None

    @property
    def is_moe(self) -> bool:
        """Return whether any layer is a sparse mixture of experts."""
        return self.num_experts > 0

    @property
    def layers_by_attention(self) -> tuple[AttentionLayers, ...]:
        """Return the layers grouped by what they keep; all of them full unless told."""
        return self.attention_layers or (AttentionLayers(count=self.num_hidden_layers),)
