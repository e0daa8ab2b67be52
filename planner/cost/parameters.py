"""Parameter counts of a model, by how the parts are split and quantised.

Counts are exact: they equal the number of elements in the published checkpoint; encoders of images
and sounds are within about 1 %. Tied embeddings count once, routers and biases count, rotary
tables do not. Layers for multi-token prediction are left out: engines load them only for
speculation.
"""

from dataclasses import dataclass

from planner.cost.equation import equation
from planner.cost.mixers import MixerCounts, count_mixers
from planner.cost.quantity import Quantity
from planner.specs.model import ModelSpec

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
    def attention(self) -> int:
        """Return the linear weights of attention."""
        return self.query_output + self.key_value + self.replicated

    @property
    def layer_linear(self) -> int:
        """Return the linear weights of the layers, which quantisation applies to."""
        return self.attention + self.feed_forward + self.experts

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
    mixers = count_mixers(model)
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
        head=0 if model.tie_word_embeddings else model.vocab_size * hidden,
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
    sparse = model.num_moe_layers * _small_of_experts(model)
    extra = model.extra_parameters + model.tower_parameters
    return layers + dense + sparse + norm + head_bias + extra


def _block_bias(model: ModelSpec, intermediate: int) -> int:
    if not model.mlp_bias or not intermediate:
        return 0
    return (feed_forward_matrices(model) - 1) * intermediate + model.hidden_size


def _small_of_experts(model: ModelSpec) -> int:
    """Return the router, gates and biases of one layer of experts."""
    hidden, experts = model.hidden_size, model.num_experts
    small = hidden * experts + (experts if model.router_bias else 0)
    small += _block_bias(model, model.shared_intermediate_size)
    if model.shared_expert_gate:
        small += hidden
    return small + experts * _expert_bias(model)


def _expert_bias(model: ModelSpec) -> int:
    """Return the biases of one routed expert."""
    if not model.expert_bias:
        return 0
    into = (feed_forward_matrices(model) - 1) * model.moe_intermediate_size
    return into + (model.expert_hidden_size or model.hidden_size)
