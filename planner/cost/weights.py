"""Weight bytes per device under tensor, expert and pipeline parallelism.

Quantisation shrinks the linear weights of the layers; embeddings, output head and norms keep
16 bits. Key and value projections are replicated if there are more ranks than KV heads.
"""

from functools import cache

from planner.cost.columns import maximum
from planner.cost.equation import equation
from planner.cost.mixers import count_mixer
from planner.cost.quantity import Quantity
from planner.specs.layers import AttentionLayers
from planner.specs.model import ModelSpec


@equation(
    "n = n_split/t + n_kv · r/k + n_experts/x + n_whole",
    unit="parameters",
    symbols={
        "split": "n_split",
        "key_value": "n_kv",
        "experts": "n_experts",
        "tensor_parallel_size": "t",
        "kv_share": "r/k",
        "expert_ranks": "x",
        "replicated": "n_whole",
    },
    source="Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053",
)
def linear_parameters_per_rank(
    *,
    split: Quantity,
    key_value: Quantity,
    experts: Quantity,
    tensor_parallel_size: Quantity,
    kv_share: Quantity,
    expert_ranks: Quantity,
    replicated: Quantity = 0.0,
) -> Quantity:
    """Return the linear weights of the layers that one rank holds.

    ``split`` are the query, output and dense feed-forward matrices, split by heads or columns;
    ``replicated`` the low-rank projections, which every rank computes.
    """
    cut = split / tensor_parallel_size + key_value * kv_share + experts / expert_ranks
    return cut + replicated


@equation(
    "W = n_linear · B_w + n_small · B_16 + n_vocabulary/t · B_v",
    unit="B",
    symbols={
        "linear": "n_linear",
        "small": "n_small",
        "vocabulary": "n_vocabulary",
        "tensor_parallel_size": "t",
        "weight_bytes_per_element": "B_w",
        "plain_bytes_per_element": "B_16",
        "vocabulary_bytes_per_element": "B_v",
    },
)
def weight_bytes(
    *,
    linear: Quantity,
    small: Quantity,
    vocabulary: Quantity,
    tensor_parallel_size: Quantity,
    weight_bytes_per_element: Quantity,
    plain_bytes_per_element: Quantity,
    vocabulary_bytes_per_element: Quantity,
) -> Quantity:
    """Return the bytes of all weights on one device of one pipeline stage."""
    vocabulary_bytes = vocabulary / tensor_parallel_size * vocabulary_bytes_per_element
    plain_bytes = small * plain_bytes_per_element + vocabulary_bytes
    return linear * weight_bytes_per_element + plain_bytes


@equation(
    "W = n_linear · B_w",
    unit="B",
    symbols={"linear": "n_linear", "weight_bytes_per_element": "B_w"},
)
def linear_bytes(*, linear: Quantity, weight_bytes_per_element: Quantity) -> Quantity:
    """Return the bytes of linear weights stored in another format than the rest."""
    return linear * weight_bytes_per_element


def kv_heads_share(num_kv_heads: Quantity, tensor_parallel_size: Quantity) -> Quantity:
    """Return the share of the KV heads on one rank: at least one whole head."""
    return maximum(num_kv_heads / tensor_parallel_size, 1.0) / num_kv_heads


def key_value_share(model: ModelSpec, tensor_parallel_size: Quantity) -> Quantity:
    """Return the share of all key and value projections on one rank.

    Groups of layers with different KV heads are weighted by their parameters.
    """
    groups = [g for g in model.layers_by_attention if isinstance(g, AttentionLayers)]
    heads = {group.kv_heads for group in groups}
    if len(heads) <= 1:
        return kv_heads_share(next(iter(heads), 1), tensor_parallel_size)
    counts = [group.count * count_mixer(model, group).key_value for group in groups]
    held: Quantity = 0.0
    for group, parameters in zip(groups, counts, strict=True):
        held = held + parameters * kv_heads_share(group.kv_heads, tensor_parallel_size)
    return held / max(1, sum(counts))


@cache
def stage_layers(num_layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers per pipeline stage, the remainder on the middle stages.

    The first and last stages also hold the vocabulary, so they take the smaller share.

    >>> stage_layers(30, 4)
    (7, 8, 8, 7)
    """
    base, extra = divmod(num_layers, stages)
    order = sorted(range(stages), key=lambda stage: (stage in {0, stages - 1}, stage))
    larger_stages = set(order[:extra])
    return tuple(base + (stage in larger_stages) for stage in range(stages))


def alike_stages(num_layers: int, stages: int) -> tuple[int, ...]:
    """Return for each stage the first stage with an identical share of the model.

    >>> alike_stages(30, 4)
    (0, 1, 1, 3)
    """
    shares = stage_layers(num_layers, stages)
    first: dict[tuple[int, bool, bool], int] = {}
    return tuple(
        first.setdefault((share, stage == 0, stage == stages - 1), stage)
        for stage, share in enumerate(shares)
    )


def stage_vocabulary(model: ModelSpec, stage: int, stages: int) -> int:
    """Return the vocabulary parameters on a stage: embedding first, output head last.

    Tied embeddings are stored once on one device, but on both ends of a pipeline.
    """
    hidden = model.hidden_size
    embedding = (model.vocab_size + model.learned_positions) * hidden
    head = model.output_width * hidden
    held = embedding if stage == 0 else 0
    shares_first = model.tie_word_embeddings and stage == 0
    if stage == stages - 1 and not shares_first:
        held += head
    return held
