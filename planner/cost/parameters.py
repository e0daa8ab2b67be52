"""How many parameters a model has, by the part that decides how they are split and quantised.

Counts are exact: they equal the number of elements in the published checkpoint. Tied embeddings
count once, routers and biases count, rotary tables do not.
"""

from dataclasses import dataclass

from planner.cost.equation import equation
from planner.cost.quantity import Quantity
from planner.specs.model import ModelSpec

GATED_MATRICES = 3
PLAIN_MATRICES = 2


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
    "n_ffn = matrices · h · f",
    unit="parameters",
    symbols={"matrices": "matrices", "hidden_size": "h", "intermediate_size": "f"},
)
def feed_forward_parameters(
    *, matrices: Quantity, hidden_size: Quantity, intermediate_size: Quantity
) -> Quantity:
    """Return the parameters of one feed-forward block: three matrices when gated, else two."""
    return matrices * hidden_size * intermediate_size


@dataclass(frozen=True)
class ParameterCounts:
    """Where the parameters are.

    ``query_output``, ``key_value``, ``feed_forward``, ``experts`` are the linear weights of all
    layers; ``small`` are the norms, biases and routers; ``embedding`` and ``head`` lie outside
    the layers.
    """

    query_output: int
    key_value: int
    feed_forward: int
    experts: int
    experts_active: int
    small: int
    embedding: int
    head: int

    @property
    def layer_linear(self) -> int:
        """Return the linear weights inside the layers: what quantisation makes smaller."""
        return self.query_output + self.key_value + self.feed_forward + self.experts

    @property
    def total(self) -> int:
        """Return all parameters: what the checkpoint holds."""
        return self.layer_linear + self.small + self.embedding + self.head

    @property
    def active(self) -> int:
        """Return the parameters that one token visits: all but the experts it skips."""
        return self.total - self.experts + self.experts_active


def feed_forward_matrices(model: ModelSpec) -> int:
    """Return how many matrices a feed-forward block has."""
    return GATED_MATRICES if model.gated_mlp else PLAIN_MATRICES


def count_parameters(model: ModelSpec) -> ParameterCounts:
    """Return the exact parameter counts of a model.

    >>> from planner.catalog.models import get_model
    >>> count_parameters(get_model("meta-llama/Llama-3.1-8B")).total
    8030261248
    """
    hidden, layers = model.hidden_size, model.num_hidden_layers
    dense_layers = model.num_dense_layers if model.is_moe else layers
    moe_layers = layers - dense_layers
    matrices = feed_forward_matrices(model)
    expert = int(
        feed_forward_parameters(
            matrices=matrices,
            hidden_size=hidden,
            intermediate_size=model.moe_intermediate_size,
        )
    )
    shared = model.num_shared_experts
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    tied = model.tie_word_embeddings
    return ParameterCounts(
        query_output=layers
        * int(
            query_output_parameters(hidden_size=hidden, num_heads=heads, head_dim=model.head_dim)
        ),
        key_value=layers
        * int(
            key_value_parameters(
                hidden_size=hidden, num_kv_heads=kv_heads, head_dim=model.head_dim
            )
        ),
        feed_forward=dense_layers
        * int(
            feed_forward_parameters(
                matrices=matrices,
                hidden_size=hidden,
                intermediate_size=model.intermediate_size,
            )
        ),
        experts=moe_layers * (model.num_experts + shared) * expert,
        experts_active=moe_layers * (model.num_experts_per_tok + shared) * expert,
        small=_small_parameters(model, dense_layers, moe_layers),
        embedding=(model.vocab_size + model.learned_positions) * hidden,
        head=0 if tied else model.vocab_size * hidden,
    )


def _small_parameters(model: ModelSpec, dense_layers: int, moe_layers: int) -> int:
    hidden, head_dim = model.hidden_size, model.head_dim
    norm = hidden * (2 if model.norm_bias else 1)
    layer = model.norms_per_layer * norm
    if model.qk_norm:
        layer += 2 * head_dim
    if model.attention_bias:
        layer += (model.num_attention_heads + 2 * model.num_key_value_heads) * head_dim
    if model.attention_output_bias:
        layer += hidden
    ffn_bias = 0
    if model.mlp_bias:
        ffn_bias = (2 if model.gated_mlp else 1) * model.intermediate_size + hidden
    routers = moe_layers * hidden * model.num_experts
    head_bias = model.vocab_size if model.lm_head_bias else 0
    return model.num_hidden_layers * layer + dense_layers * ffn_bias + routers + norm + head_bias
