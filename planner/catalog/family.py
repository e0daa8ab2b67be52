"""Properties common to the models of one family that their configs do not state."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from planner.catalog.config_reader import ConfigReader
from planner.specs.layers import LayerGroup, OutputGate, RecurrentLayers


@dataclass(frozen=True)
class Family:
    """The structure common to all models of one ``model_type``."""

    gated_mlp: bool = True
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_bias: bool = False
    norms_per_layer: int = 2
    qk_norm: bool = False
    qk_norm_width: Literal["head", "full"] = "head"
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    tied_by_default: bool = False
    # Whether configs state the length after the scaling of rotary positions.
    states_extended_length: bool = False
    learned_positions_offset: int | None = None
    default_ffn_multiple: int | None = None
    sparse: bool = False
    may_be_dense: bool = False
    shared_experts: int = 0
    shared_expert_gate: bool = False
    router_bias: bool = False
    # The config's flag for biases of the router, if it has one.
    router_bias_switch: str | None = None
    expert_bias: bool = False
    output_bias_follows: bool = False
    # The config's flag for norms of queries and keys, if only some models have them.
    qk_norm_switch: str | None = None
    # Small parameters per layer, and vectors of the hidden size outside the layers.
    extra_per_layer: int = 0
    extra_hidden_vectors: int = 0
    output_gate: OutputGate = "none"
    sinks: bool = False
    sliding_sinks: bool = False
    indexed: bool = False
    # Every ``full_every``-th layer has full attention, the others are of ``rest_kind``.
    full_every: int = 0
    rest_kind: Literal["sliding", "chunked", "recurrent"] = "sliding"
    recurrent: Callable[[ConfigReader, int], RecurrentLayers] | None = None
    fused_gate_width: bool = False
    # Reader of fields that the family's configs state in another form, by common name.
    derives: Callable[[ConfigReader], dict[str, Any]] | None = None
    # Readers for families with their own description of layers or fields.
    layers: Callable[[ConfigReader], tuple[LayerGroup, ...]] | None = None
    extras: Callable[[ConfigReader], dict[str, Any]] | None = None
    # A field that marks a feature without a confirmed implementation, and its description.
    unconfirmed: tuple[str, str] = ("", "")
    # Nested objects whose fields count as the model's own.
    nested: tuple[str, ...] = ()
    # Fields to ignore.
    ignores: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    # Defaults of the family's own implementation.
    defaults: dict[str, Any] = field(default_factory=dict)
