"""Parameter counts of a model, by how the parts are split and quantised."""

from dataclasses import dataclass

from planner.cost.kv_cache import mean_dim
from planner.cost.quantity import Quantity, equation
from planner.specs.model import (
    AttentionLayers,
    CompressedLayers,
    IndexLayers,
    LatentLayers,
    LayerGroup,
    ModelSpec,
    OutputGate,
    RecurrentLayers,
)

# Parameters of token mixers (attention, latent attention, recurrences) by kind of layer.
#
# Tensor parallelism splits weights along heads. Key and value projections are replicated if there
# are more ranks than heads; the low-rank projections of latent attention and its indexers are
# replicated on every rank.


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


GATED_MATRICES = 3
PLAIN_MATRICES = 2


@equation(
    "n_ffn = matrices · h · f",
    unit="parameters",
    symbols={"matrices": "matrices", "hidden_size": "h", "intermediate_size": "f"},
)
def feed_forward_parameters(
    *, matrices: Quantity, hidden_size: Quantity, intermediate_size: Quantity
) -> Quantity:
    """Return the parameters of one feed-forward block: 3 matrices if gated, else 2."""
    return matrices * hidden_size * intermediate_size


@dataclass(frozen=True)
class ParameterCounts:
    """The parameters of a model by part.

    ``query_output``, ``key_value``, ``replicated``, ``feed_forward``, ``experts`` are the linear
    weights of all layers; ``replicated`` ones are whole on every tensor-parallel rank and
    ``feed_forward`` includes shared experts. ``small`` are the norms, biases and routers, and the
    encoders of images and sounds, which are stored in the same dtype; ``embedding`` and ``head``
    are outside the layers. ``inactive_small`` are the biases of inactive experts and the encoders,
    included in ``small``; ``experts_of_images``, included in ``experts``, no text token visits.
    """

    query_output: int
    key_value: int
    feed_forward: int
    experts: int
    experts_active: int
    small: int
    embedding: int
    head: int
    replicated: int = 0
    inactive_small: int = 0
    experts_of_images: int = 0

    @property
    def attention_weights(self) -> int:
        """Return the linear weights of attention."""
        return self.query_output + self.key_value + self.replicated

    @property
    def layer_linear(self) -> int:
        """Return the linear weights of the layers, which quantisation applies to."""
        return self.attention_weights + self.feed_forward + self.experts

    @property
    def total(self) -> int:
        """Return all parameters of the checkpoint."""
        return self.layer_linear + self.small + self.embedding + self.head

    @property
    def active(self) -> int:
        """Return the active parameters per token: all but inactive experts."""
        return self.total - self.experts + self.experts_active - self.inactive_small


def feed_forward_matrices(model: ModelSpec) -> int:
    """Return the number of matrices of a feed-forward block."""
    return GATED_MATRICES if model.gated_mlp else PLAIN_MATRICES


def count_parameters(model: ModelSpec) -> ParameterCounts:
    """Return the exact parameter counts of a model.

    >>> from planner.catalog.models import get_model
    >>> count_parameters(get_model("meta-llama/Llama-3.1-8B")).total
    8030261248
    """
    each = (count_mixer(model, group).times(group.count) for group in model.layers_by_attention)
    mixers = sum(each, start=MixerCounts())
    hidden, moe_layers = model.hidden_size, model.num_moe_layers
    expert = _block(model, model.expert_hidden_size or hidden, model.moe_intermediate_size)
    dense = model.num_feed_forward_layers * _block(model, hidden, model.intermediate_size)
    shared = moe_layers * _block(model, hidden, model.shared_intermediate_size)
    return ParameterCounts(
        query_output=mixers.split,
        key_value=mixers.key_value,
        replicated=mixers.replicated + moe_layers * 2 * hidden * model.expert_hidden_size,
        feed_forward=dense + shared,
        experts=moe_layers * model.num_experts * expert + model.image_expert_parameters,
        experts_active=moe_layers * model.num_experts_per_tok * expert,
        small=_small_parameters(model, mixers),
        embedding=(model.vocab_size + model.learned_positions) * hidden,
        head=0 if model.tie_word_embeddings else model.output_width * hidden,
        inactive_small=model.tower_parameters
        + moe_layers * (model.num_experts - model.num_experts_per_tok) * _expert_bias(model),
        experts_of_images=model.image_expert_parameters,
    )


def _block(model: ModelSpec, hidden: int, intermediate: int) -> int:
    """Return the weights of one feed-forward block."""
    count = feed_forward_parameters(
        matrices=feed_forward_matrices(model),
        hidden_size=hidden,
        intermediate_size=intermediate,
    )
    return int(count)


def _small_parameters(model: ModelSpec, mixers: MixerCounts) -> int:
    """Return the norms, biases, routers and gates of the whole model."""
    hidden = model.hidden_size
    norm = hidden * (2 if model.norm_bias else 1) if model.norms_per_layer else 0
    head_bias = model.vocab_size if model.lm_head_bias else 0
    layers = model.num_hidden_layers * model.norms_per_layer * norm + mixers.small
    dense = model.num_feed_forward_layers * _block_bias(model, model.intermediate_size)
    router = hidden * model.num_experts + (model.num_experts if model.router_bias else 0)
    gate = hidden if model.shared_expert_gate else 0
    biases = _block_bias(model, model.shared_intermediate_size)
    biases += model.num_experts * _expert_bias(model)
    sparse = model.num_moe_layers * (router + gate + biases)
    extra = model.extra_parameters + model.tower_parameters
    return layers + dense + sparse + norm + head_bias + extra


def _block_bias(model: ModelSpec, intermediate: int) -> int:
    if not model.mlp_bias or not intermediate:
        return 0
    return (feed_forward_matrices(model) - 1) * intermediate + model.hidden_size


def _expert_bias(model: ModelSpec) -> int:
    if not model.expert_bias:
        return 0
    into = (feed_forward_matrices(model) - 1) * model.moe_intermediate_size
    return into + (model.expert_hidden_size or model.hidden_size)
