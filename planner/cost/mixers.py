"""Parameters of token mixers (attention, latent attention, recurrences) by kind of layer.

Tensor parallelism splits weights along heads. Key and value projections are replicated if there
are more ranks than heads; the low-rank projections of latent attention and its indexers are
replicated on every rank.
"""

from dataclasses import dataclass

from planner.cost.equation import equation
from planner.cost.kv_cache import mean_dim
from planner.cost.quantity import Quantity
from planner.specs.layers import (
    AttentionLayers,
    CompressedLayers,
    IndexLayers,
    LatentLayers,
    LayerGroup,
    OutputGate,
    RecurrentLayers,
)
from planner.specs.model import ModelSpec


@equation(
    "n_qo = 2 · h · a · d",
    unit="parameters",
    symbols={"hidden_size": "h", "num_heads": "a", "head_dim": "d"},
)
def query_output_parameters(
    *, hidden_size: Quantity, num_heads: Quantity, head_dim: Quantity
) -> Quantity:
    """Return the parameters of the query and output projections of one layer."""
    return 2 * hidden_size * num_heads * head_dim


@equation(
    "n_kv = 2 · h · k · d",
    unit="parameters",
    symbols={"hidden_size": "h", "num_kv_heads": "k", "head_dim": "d"},
)
def key_value_parameters(
    *, hidden_size: Quantity, num_kv_heads: Quantity, head_dim: Quantity
) -> Quantity:
    """Return the parameters of the key and value projections of one layer."""
    return 2 * hidden_size * num_kv_heads * head_dim


@equation(
    "n_mla = h · (q + r + d_rope) + q · a · d_k + r · a · (d_nope + d_v) + a · d_v · h",
    unit="parameters",
    symbols={
        "hidden_size": "h",
        "query_rank": "q",
        "kv_lora_rank": "r",
        "rope_dim": "d_rope",
        "num_heads": "a",
        "key_dim": "d_k",
        "value_dim": "d_v",
    },
    source="DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C",
)
def latent_parameters(
    *,
    hidden_size: Quantity,
    query_rank: Quantity,
    kv_lora_rank: Quantity,
    rope_dim: Quantity,
    num_heads: Quantity,
    key_dim: Quantity,
    value_dim: Quantity,
) -> Quantity:
    """Return the linear weights of one layer of latent attention with low-rank queries."""
    down = hidden_size * (query_rank + kv_lora_rank + rope_dim)
    queries = query_rank * num_heads * key_dim
    up = kv_lora_rank * num_heads * (key_dim - rope_dim + value_dim)
    return down + queries + up + num_heads * value_dim * hidden_size


@dataclass(frozen=True)
class MixerCounts:
    """The parameters of mixers by how tensor parallelism stores them."""

    split: int = 0
    key_value: int = 0
    replicated: int = 0
    small: int = 0

    def __add__(self, other: "MixerCounts") -> "MixerCounts":
        """Return the element-wise sum."""
        return MixerCounts(
            self.split + other.split,
            self.key_value + other.key_value,
            self.replicated + other.replicated,
            self.small + other.small,
        )

    def times(self, layers: int) -> "MixerCounts":
        """Return the counts of ``layers`` such layers."""
        return MixerCounts(
            self.split * layers,
            self.key_value * layers,
            self.replicated * layers,
            self.small * layers,
        )


def count_mixers(model: ModelSpec) -> MixerCounts:
    """Return the mixers' parameters over all layers of a model."""
    each = (count_mixer(model, group).times(group.count) for group in model.layers_by_attention)
    return sum(each, start=MixerCounts())


def count_mixer(model: ModelSpec, group: LayerGroup) -> MixerCounts:
    """Return the mixer's parameters in one layer of a group."""
    if isinstance(group, AttentionLayers):
        return _attention(model, group)
    if isinstance(group, LatentLayers):
        return _latent(model, group)
    if isinstance(group, IndexLayers):
        return MixerCounts(replicated=group.linear_parameters, small=group.small_parameters)
    if isinstance(group, CompressedLayers):
        return MixerCounts(
            split=group.split_parameters,
            replicated=group.replicated_parameters,
            small=group.small_parameters,
        )
    if isinstance(group, RecurrentLayers):
        return MixerCounts(split=group.linear_parameters, small=group.small_parameters)
    return MixerCounts()


def _attention(model: ModelSpec, group: AttentionLayers) -> MixerCounts:
    hidden, heads, kv_heads = model.hidden_size, group.heads, group.kv_heads
    rank = group.q_lora_rank
    query_output = query_output_parameters(
        hidden_size=hidden, num_heads=heads, head_dim=mean_dim(group)
    )
    if rank:
        query_output = query_output - (hidden - rank) * heads * group.key_dim
    gate = _gate_columns(group.output_gate, heads, group.value_dim)
    values = 0 if group.value_is_key else group.value_dim
    key_value = key_value_parameters(
        hidden_size=hidden, num_kv_heads=kv_heads, head_dim=(group.key_dim + values) / 2
    )
    return MixerCounts(
        split=int(query_output) + hidden * gate,
        key_value=0 if group.reuses_cache else int(key_value),
        replicated=hidden * (rank or 0),
        small=_small_of_attention(model, group, gate, values),
    )


def _small_of_attention(model: ModelSpec, group: AttentionLayers, gate: int, values: int) -> int:
    """Return the norms, biases and sinks of one layer's attention."""
    key_heads = 0 if group.reuses_cache else group.kv_heads
    small = (group.heads if group.sinks else 0) + (group.q_lora_rank or 0)
    if model.qk_norm and model.qk_norm_width == "full":
        small += (group.heads + key_heads) * group.key_dim
    elif model.qk_norm:
        small += group.key_dim * (2 if key_heads else 1)
    if model.attention_bias:
        small += group.heads * group.key_dim + gate + key_heads * (group.key_dim + values)
    if model.attention_output_bias:
        small += model.hidden_size
    return small


def _gate_columns(gate: OutputGate, heads: int, value_dim: int) -> int:
    return {"none": 0, "head": heads, "element": heads * value_dim}[gate]


def _latent(model: ModelSpec, group: LatentLayers) -> MixerCounts:
    hidden, heads, rank = model.hidden_size, group.heads, group.q_lora_rank
    whole = latent_parameters(
        hidden_size=hidden,
        query_rank=rank or 0,
        kv_lora_rank=group.kv_lora_rank,
        rope_dim=group.qk_rope_head_dim,
        num_heads=heads,
        key_dim=group.key_dim,
        value_dim=group.v_head_dim,
    )
    down = hidden * (group.latent_dim + (rank or 0))
    direct = 0 if rank else hidden * heads * group.key_dim
    gate = hidden * _gate_columns(group.output_gate, heads, group.v_head_dim)
    bias = (rank or 0) + group.latent_dim + hidden if model.attention_bias else 0
    return MixerCounts(
        split=int(whole) - down + direct + gate,
        replicated=down,
        small=(rank or 0) + group.kv_lora_rank + bias,
    )
