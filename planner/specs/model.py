"""The shape of a language model: its layers, in the names of Hugging Face configs."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Tag,
    model_validator,
)

from planner.specs.base import Dtype, SparseSpec

# Groups of layers with the same token mixing: their projections, caches and compute.
#
# The layers of a model are grouped by kind, so that cost functions loop over groups and do not
# depend on model families. Fields absent from an attention group take the model's values.


AttentionKind = Literal["full", "sliding", "chunked"]
OutputGate = Literal["none", "head", "element"]


class AttentionLayers(SparseSpec):
    """Layers with a key-value cache: over the whole context, a window or a chunk.

    ``v_head_dim`` is the width of a value if it differs from that of a key. An ``output_gate``
    scales the attention output per head or per element. ``value_is_key`` layers project no values;
    ``reuses_cache`` layers attend to the cache of an earlier layer; ``q_lora_rank`` is the width
    of queries that all heads share before their own projection.
    """

    kind: AttentionKind = "full"
    count: PositiveInt
    window: PositiveInt | None = None
    num_attention_heads: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    v_head_dim: PositiveInt | None = None
    output_gate: OutputGate = "none"
    sinks: bool = False
    top_k: PositiveInt | None = None
    q_lora_rank: PositiveInt | None = None
    value_is_key: bool = False
    reuses_cache: bool = False

    @model_validator(mode="after")
    def _needs_its_window(self) -> "AttentionLayers":
        if self.kind != "full" and self.window is None:
            raise ValueError(
                f"{self.kind} layers need a window: the number of tokens that they attend to"
            )
        return self

    @property
    def heads(self) -> int:
        """Return the query heads of a group with filled fields."""
        return self.num_attention_heads or 1

    @property
    def kv_heads(self) -> int:
        """Return the key-value heads of a group with filled fields."""
        return self.num_key_value_heads or self.heads

    @property
    def key_dim(self) -> int:
        """Return the width of one key."""
        return self.head_dim or 1

    @property
    def value_dim(self) -> int:
        """Return the width of one value."""
        return self.v_head_dim or self.key_dim


class LatentLayers(SparseSpec):
    """Layers that cache one compressed latent and one rotary key for all heads (MLA).

    ``top_k`` is the number of cached tokens that each query attends to if an index selects them.
    """

    kind: Literal["latent"] = "latent"
    count: PositiveInt
    num_attention_heads: PositiveInt | None = None
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: NonNegativeInt
    v_head_dim: PositiveInt
    top_k: PositiveInt | None = None
    output_gate: OutputGate = "none"

    @property
    def heads(self) -> int:
        """Return the query heads of a group with filled fields."""
        return self.num_attention_heads or 1

    @property
    def key_dim(self) -> int:
        """Return the width of one query or one decompressed key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def value_dim(self) -> int:
        """Return the width of one decompressed value."""
        return self.v_head_dim

    @property
    def latent_dim(self) -> int:
        """Return the cached elements per token: latent and rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class IndexLayers(SparseSpec):
    """Indexers next to attention: light heads that score all cached tokens to select a few.

    They are not separate layers: their count is not part of the model's. One index key covers
    ``ratio`` tokens.
    """

    kind: Literal["index"] = "index"
    count: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt
    linear_parameters: NonNegativeInt = 0
    small_parameters: NonNegativeInt = 0
    ratio: PositiveInt = 1


class CompressedLayers(SparseSpec):
    """Layers that cache a window of tokens and one compressed entry per group of older tokens.

    A single key-value vector of ``head_dim`` serves all heads. ``ratio`` is the number of tokens
    per entry, None without entries; ``top_k`` is the number of entries that a query selects.
    """

    kind: Literal["compressed"] = "compressed"
    count: PositiveInt
    num_attention_heads: PositiveInt
    head_dim: PositiveInt
    window: PositiveInt
    ratio: PositiveInt | None = None
    top_k: PositiveInt | None = None
    split_parameters: PositiveInt
    replicated_parameters: PositiveInt
    small_parameters: NonNegativeInt = 0


class RecurrentLayers(SparseSpec):
    """Layers with a state of constant size: state-space and linear-attention layers.

    The state holds ``num_heads`` matrices of ``key_dim`` by ``value_dim`` in 32 bits, and the last
    ``conv_kernel - 1`` inputs of a short convolution over ``conv_channels``; a layer that is only
    a convolution has matrices of width 0. ``linear_parameters`` counts one layer's projections,
    ``small_parameters`` its norms, convolutions, decays and biases.
    """

    kind: Literal["recurrent"] = "recurrent"
    count: PositiveInt
    num_heads: PositiveInt
    key_dim: NonNegativeInt
    value_dim: NonNegativeInt
    conv_channels: NonNegativeInt = 0
    conv_kernel: PositiveInt = 1
    linear_parameters: PositiveInt
    small_parameters: NonNegativeInt = 0

    @property
    def state_elements(self) -> int:
        """Return the elements of one sequence's state in one layer."""
        return self.num_heads * self.key_dim * self.value_dim

    @property
    def conv_elements(self) -> int:
        """Return the elements of one sequence's convolution state in one layer."""
        return self.conv_channels * (self.conv_kernel - 1)


class NoMixingLayers(SparseSpec):
    """Layers without token mixing: a feed-forward block only."""

    kind: Literal["none"] = "none"
    count: PositiveInt


def _kind_of(value: object) -> str:
    kind = value.get("kind", "full") if isinstance(value, dict) else getattr(value, "kind", "")
    return "attention" if kind in {"full", "sliding", "chunked"} else str(kind)


LayerGroup = Annotated[
    Annotated[AttentionLayers, Tag("attention")]
    | Annotated[LatentLayers, Tag("latent")]
    | Annotated[IndexLayers, Tag("index")]
    | Annotated[CompressedLayers, Tag("compressed")]
    | Annotated[RecurrentLayers, Tag("recurrent")]
    | Annotated[NoMixingLayers, Tag("none")],
    Discriminator(_kind_of),
]


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
    native_dtype: Dtype | None = Field(
        default=None,
        description="weights of the release itself if they are narrower than 16 bits: a loss of "
        "quality is relative to them",
    )
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


def _of_a_shape(value: object) -> object:
    """Return a shape's fields unchanged.

    Clients ignore fields that they do not know: a config.json would lose those by which it differs
    from the shape that its other fields are.
    """
    others = sorted(value.keys() - ModelSpec.model_fields) if isinstance(value, Mapping) else []
    if others:
        raise ValueError(f"{', '.join(others)}: no fields of a model's shape")
    return value


# A catalog id, the fields of a shape, or a config.json.
NamedModel = Annotated[
    str | Annotated[ModelSpec, BeforeValidator(_of_a_shape)] | dict[str, Any],
    Field(union_mode="left_to_right"),
]
