"""The shape of a language model, in the names of Hugging Face configs."""

from functools import cached_property
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from planner.specs.base import Dtype, SparseSpec
from planner.specs.layers import (
    AttentionLayers,
    CompressedLayers,
    IndexLayers,
    LatentLayers,
    LayerGroup,
    NoMixingLayers,
    RecurrentLayers,
)

__all__ = [
    "AttentionLayers",
    "CompressedLayers",
    "IndexLayers",
    "LatentLayers",
    "LayerGroup",
    "ModelSpec",
    "NoMixingLayers",
    "RecurrentLayers",
    "WeightPart",
]

WeightPart = Literal["attention", "feed_forward", "experts"]


class ModelSpec(SparseSpec):
    """The properties of a model that costs depend on.

    Dense layers have one feed-forward block of ``intermediate_size``. Mixture-of-experts layers
    have ``num_experts`` experts of ``moe_intermediate_size``, of which each token uses
    ``num_experts_per_tok``, and ``num_shared_experts`` that process every token.
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
    norms_per_layer: NonNegativeInt = 2
    qk_norm: bool = False
    qk_norm_width: Literal["head", "full"] = Field(
        default="head", description="whether one norm serves every head or spans all of them"
    )
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    learned_positions: NonNegativeInt = 0
    norm_bias: bool = False
    lm_head_bias: bool = False
    attention_layers: tuple[LayerGroup, ...] = ()
    num_experts: NonNegativeInt = 0
    num_experts_per_tok: NonNegativeInt = 0
    moe_intermediate_size: NonNegativeInt = 0
    num_shared_experts: NonNegativeInt = 0
    shared_expert_intermediate_size: NonNegativeInt = Field(
        default=0, description="of one shared expert, where it differs from the routed ones"
    )
    shared_expert_gate: bool = False
    expert_hidden_size: NonNegativeInt = Field(
        default=0, description="routed experts work on a narrower latent of this width"
    )
    expert_bias: bool = False
    router_bias: bool = False
    num_dense_layers: NonNegativeInt = 0
    num_layers_without_feed_forward: NonNegativeInt = 0
    num_labels: NonNegativeInt = Field(
        default=0,
        description="classes of a head that reads one token of each text: an encoder's, whose "
        "tokens all see each other",
    )
    extra_parameters: NonNegativeInt = Field(
        default=0, description="small parameters that no other field accounts for"
    )
    tower_parameters: NonNegativeInt = Field(
        default=0, description="of the encoders of images and sounds, which no text token uses"
    )
    image_expert_parameters: NonNegativeInt = Field(
        default=0, description="of routed experts that only tokens of images visit"
    )
    uncounted: tuple[str, ...] = Field(
        default=(), description="parts of the checkpoint whose parameters no field counts"
    )
    weight_dtype: Dtype | None = Field(default=None, description="as published")
    group_size: PositiveInt | None = Field(default=None, description="of the published weights")
    group_metadata_bits: NonNegativeFloat | None = Field(
        default=None, description="of a group's scale and zero point, of the published weights"
    )
    weight_block_size: PositiveInt | None = Field(
        default=None, description="rows and columns that share a scale, of FP8 checkpoints"
    )
    part_dtypes: dict[WeightPart, Dtype] = Field(
        default={}, description="parts that the checkpoint stores in another dtype"
    )
    quantization: str | None = Field(default=None, description="of the published checkpoint")
    note: str | None = Field(default=None, description="what was assumed of an unknown family")
    source: str | None = None
    as_of: str | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> "ModelSpec":
        for problem in self._contradictions():
            raise ValueError(problem)
        return self

    def _contradictions(self) -> list[str]:
        """Return the inconsistencies of the fields, each with names and values."""
        problems = [
            f"num_attention_heads is {group.heads} and num_key_value_heads is "
            f"{group.kv_heads}: each key-value head must serve the same number of "
            "attention heads, so the first must be a multiple of the second"
            for group in self.layers_by_attention
            if isinstance(group, AttentionLayers) and group.heads % group.kv_heads
        ]
        layers = sum(g.count for g in self.layers_by_attention if g.kind != "index")
        if layers != self.num_hidden_layers:
            problems.append(
                f"attention_layers count {layers} layers, but num_hidden_layers is "
                f"{self.num_hidden_layers}: the counts must add up to it"
            )
        if self.num_experts_per_tok > self.num_experts:
            problems.append(
                f"num_experts_per_tok is {self.num_experts_per_tok}, but num_experts is "
                f"{self.num_experts}: a token cannot visit more experts than there are"
            )
        if self.num_dense_layers + self.num_layers_without_feed_forward > self.num_hidden_layers:
            problems.append(
                f"num_hidden_layers is {self.num_hidden_layers}, but {self.num_dense_layers} have "
                f"a dense block and {self.num_layers_without_feed_forward} have none: both "
                "together cannot be more"
            )
        return problems

    @property
    def shape(self) -> str:
        """Return layers, width and experts as text, equal for models of one architecture."""
        return f"{self.num_hidden_layers}x{self.hidden_size}x{self.num_experts}"

    @property
    def is_encoder(self) -> bool:
        """Return whether the model is a classifier rather than a language model."""
        return self.num_labels > 0

    @property
    def output_width(self) -> int:
        """Return the outputs per token; a classification head has none."""
        return 0 if self.is_encoder else self.vocab_size

    @property
    def is_moe(self) -> bool:
        """Return whether any layer is a sparse mixture of experts."""
        return self.num_experts > 0

    @property
    def num_feed_forward_layers(self) -> int:
        """Return the number of layers with a dense feed-forward block."""
        if self.is_moe:
            return self.num_dense_layers
        return self.num_hidden_layers - self.num_layers_without_feed_forward

    @property
    def num_moe_layers(self) -> int:
        """Return the number of mixture-of-experts layers."""
        if not self.is_moe:
            return 0
        without = self.num_dense_layers + self.num_layers_without_feed_forward
        return self.num_hidden_layers - without

    @property
    def num_blocks(self) -> int:
        """Return the number of residual blocks: token mixers and feed-forward blocks."""
        mixing = sum(g.count for g in self.layers_by_attention if g.kind not in {"none", "index"})
        return mixing + self.num_feed_forward_layers + self.num_moe_layers

    @property
    def shared_intermediate_size(self) -> int:
        """Return the total feed-forward width of the shared experts."""
        each = self.shared_expert_intermediate_size or self.moe_intermediate_size
        return self.num_shared_experts * each

    @cached_property
    def layers_by_attention(self) -> tuple[LayerGroup, ...]:
        """Return the layer groups with all fields filled; full attention by default."""
        groups = self.attention_layers or (AttentionLayers(count=self.num_hidden_layers),)
        return tuple(self._filled(group) for group in groups)

    def _filled(self, group: LayerGroup) -> LayerGroup:
        if isinstance(group, AttentionLayers):
            dim = group.head_dim or self.head_dim
            own = {
                "num_attention_heads": group.num_attention_heads or self.num_attention_heads,
                "num_key_value_heads": group.num_key_value_heads or self.num_key_value_heads,
                "head_dim": dim,
                "v_head_dim": group.v_head_dim or dim,
            }
            return group.model_copy(update=own)
        if isinstance(group, LatentLayers):
            heads = group.num_attention_heads or self.num_attention_heads
            return group.model_copy(update={"num_attention_heads": heads})
        return group
