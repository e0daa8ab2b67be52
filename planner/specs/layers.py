"""Groups of layers with the same token mixing: their projections, caches and compute.

The layers of a model are grouped by kind, so that cost functions loop over groups and do not
depend on model families. Fields absent from an attention group take the model's values.
"""

from typing import Annotated, Literal

from pydantic import Discriminator, NonNegativeInt, PositiveInt, Tag, model_validator

from planner.specs.base import SparseSpec

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
            raise ValueError(f"{self.kind} layers need a window: the tokens that they see")
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
