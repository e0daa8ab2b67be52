"""Groups of layers that mix tokens alike: what they project, keep of the past and compute.

A model's layers are grouped by kind, so that costs loop over groups and never ask for the name
of a family. Fields left out of an attention group are the model's own.
"""

from typing import Annotated, Literal

from pydantic import Discriminator, NonNegativeInt, PositiveInt, Tag, model_validator

from planner.specs.base import SparseSpec

AttentionKind = Literal["full", "sliding", "chunked"]
OutputGate = Literal["none", "head", "element"]


class AttentionLayers(SparseSpec):
    """Layers with keys and values of their own: of all the past, of a window or of a chunk.

    ``v_head_dim`` is the width of a value where it differs from that of a key. An
    ``output_gate`` scales the attention's output by head or by element. ``value_is_key`` layers
    project no values; ``reuses_cache`` layers attend to what an earlier layer has cached.
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
    value_is_key: bool = False
    reuses_cache: bool = False

    @model_validator(mode="after")
    def _needs_its_window(self) -> "AttentionLayers":
        if self.kind != "full" and self.window is None:
            raise ValueError(f"{self.kind} layers need a window: the tokens that they see")
        return self

    @property
    def heads(self) -> int:
        """Return the query heads of a group whose fields are filled in."""
        return self.num_attention_heads or 1

    @property
    def kv_heads(self) -> int:
        """Return the key-value heads of a group whose fields are filled in."""
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

    ``top_k`` is how many cached tokens each query attends to where an index chooses them.
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
        """Return the query heads of a group whose fields are filled in."""
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
        """Return the elements that the cache keeps of one token: latent and rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class IndexLayers(SparseSpec):
    """Indexers beside attention: light heads that score every cached token to choose a few.

    They are no layers of their own: their count is not part of the model's. One index key serves
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
    """Layers that cache a window of tokens, and one compressed entry for every few older ones.

    A single key-value vector of ``head_dim`` serves all heads. ``ratio`` is how many tokens one
    entry stands for, nothing where there are none; ``top_k`` how many entries a query chooses.
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
    """Layers that keep a state of constant size: state-space and linear-attention layers.

    The state is ``num_heads`` matrices of ``key_dim`` by ``value_dim`` in 32 bits, and the last
    ``conv_kernel - 1`` inputs of a short convolution over ``conv_channels``.
    ``linear_parameters`` are one layer's projections, ``small_parameters`` its norms,
    convolutions, decays and biases.
    """

    kind: Literal["recurrent"] = "recurrent"
    count: PositiveInt
    num_heads: PositiveInt
    key_dim: PositiveInt
    value_dim: PositiveInt
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
        """Return the past inputs that the convolution of one layer keeps of one sequence."""
        return self.conv_channels * (self.conv_kernel - 1)


class NoMixingLayers(SparseSpec):
    """Layers without any look at other tokens: a feed-forward block alone."""

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
