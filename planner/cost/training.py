"""Gradients, optimiser states and adapters of a training, and the time of its step."""

from planner.cost.quantity import Quantity, equation, minimum, where
from planner.specs.model import ModelSpec

# Gradients, optimiser states and adapters, and how ZeRO shards them over data parallelism.


ZERO = "Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, figure 1"
FP32_BYTES = 4
# Bytes of optimiser state per trained parameter, without the master copy of the weights.
# Factored and fused optimisers keep rows and columns or nothing, which is negligible.
# Sources: Adam 2 moments in fp32; 8-bit Adam (Dettmers et al. 2021) 2 moments in 8 bit; Lion and
# momentum SGD 1 moment; Adafactor a factored second moment; LOMO and AdaLomo none; QFT
# (Li et al. 2023, arXiv:2310.07147) the momentum of Lion in 8 bits.
STATE_BYTES: dict[str, float] = {
    "adamw": 8.0,
    "adamw_8bit": 2.0,
    "lion": 4.0,
    "sgd": 0.0,
    "adafactor": 0.0,
    "lomo": 0.0,
    "adalomo": 0.0,
    "qft": 1.0,
}


@equation(
    "S = n · B / shards",
    unit="B",
    symbols={"parameters": "n", "bytes_per_element": "B", "shards": "shards"},
    source=ZERO,
)
def sharded_state_bytes(
    *, parameters: Quantity, bytes_per_element: Quantity, shards: Quantity
) -> Quantity:
    """Return the bytes of a per-parameter state sharded over ``shards`` ranks."""
    return parameters * bytes_per_element / shards


@equation(
    "C = n · (B_w + B_s) · (p + g)",
    unit="B",
    symbols={
        "parameters": "n",
        "weight_bytes_per_element": "B_w",
        "state_bytes_per_element": "B_s",
        "parts_share": "p",
        "gathered_share": "g",
    },
    source="Mohan et al. 2021 (CheckFreq), FAST, section 4: a snapshot in memory, then written",
)
def checkpoint_copy_bytes(
    *,
    parameters: Quantity,
    weight_bytes_per_element: Quantity,
    state_bytes_per_element: Quantity,
    parts_share: Quantity,
    gathered_share: Quantity,
) -> Quantity:
    """Return the bytes of the copy for a checkpoint: trained weights and their states.

    ``parts_share`` is the share of the ranks' parts in the memory in question;
    ``gathered_share`` is 1 if the first rank also gathers the whole.
    """
    each = weight_bytes_per_element + state_bytes_per_element
    return parameters * each * (parts_share + gathered_share)


@equation(
    "n_lora = L · r · (inputs + outputs)",
    unit="parameters",
    symbols={"num_layers": "L", "rank": "r", "widths": "inputs + outputs"},
    source="Hu et al. 2021 (LoRA), arXiv:2106.09685, section 4.1",
)
def lora_parameters(*, num_layers: Quantity, rank: Quantity, widths: Quantity) -> Quantity:
    """Return the trained parameters of low-rank adapters on every linear weight of a layer."""
    return num_layers * rank * widths


@equation(
    "n_scales = L · outputs",
    unit="parameters",
    symbols={"num_layers": "L", "outputs": "outputs"},
    source="Kwon et al. 2022 (AlphaTuning), arXiv:2210.03858: one scale of each output row",
)
def scale_parameters(*, num_layers: Quantity, outputs: Quantity) -> Quantity:
    """Return the trained parameters if only the scales of quantised rows are trained."""
    return num_layers * outputs


def output_widths(model: ModelSpec) -> int:
    """Return the summed output widths of a layer's linear weights: the rows with a scale."""
    query, key_value = (
        heads * model.head_dim for heads in (model.num_attention_heads, model.num_key_value_heads)
    )
    wide = 2 if model.gated_mlp else 1
    feed_forward = model.intermediate_size or model.moe_intermediate_size
    return query + 2 * key_value + 2 * model.hidden_size + wide * feed_forward


def largest_weight(model: ModelSpec) -> int:
    """Return the elements of the largest weight, whose gradient bounds that of a fused update.

    It is often the embedding. The experts of a layer are one weight, gates and up projections
    side by side, as transformers 5 keeps them. Source: Lv et al. 2023 (LOMO), arXiv:2306.09782,
    section 3.2: gradients take the memory of the largest one.
    """
    inner = max(model.intermediate_size, model.num_attention_heads * model.head_dim)
    widest = max(model.vocab_size, inner) * model.hidden_size
    gates = 2 if model.gated_mlp else 1
    hidden = model.expert_hidden_size or model.hidden_size
    return max(widest, gates * model.num_experts * model.moe_intermediate_size * hidden)


def zero_shards(stage: int, first_sharding_stage: int, data_parallel_size: float) -> float:
    """Return the number of shards of a state: from stage 1 states, 2 gradients, 3 weights."""
    return where(stage >= first_sharding_stage, data_parallel_size, 1.0)


def lora_widths(model: ModelSpec, *, every: bool = True) -> int:
    """Return the summed input and output widths of a layer's adapted weights.

    ``every`` adapts all linear weights, otherwise only queries and values.
    """
    hidden, head_dim = model.hidden_size, model.head_dim
    query, key_value = model.num_attention_heads * head_dim, model.num_key_value_heads * head_dim
    if not every:
        return (hidden + query) + (hidden + key_value)
    attention = 2 * (hidden + query) + 2 * (hidden + key_value)
    matrices = 3 if model.gated_mlp else 2
    return attention + matrices * (hidden + model.intermediate_size)


def pipeline_in_flight(
    schedule: str, stage: int, stages: int, micro_batches: float, chunks: float = 1
) -> float:
    """Return the peak number of micro-batches in flight on a stage with ``chunks`` per stage.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2: an interleaved stage runs
    2 (p-s-1) + (v-1) p chunks ahead, so that even the last one holds nearly p micro-batches; the
    first holds 1 + (p-1)/(p v) times p, as Korthikanti et al. 2022, arXiv:2205.05198, say.
    """
    if schedule == "gpipe":
        return micro_batches
    woven = stages + (stages - 1 - 2 * stage) / chunks
    return minimum(micro_batches, where(chunks > 1, woven, stages - stage))


# The time of a training step: pipeline bubble and exposed communication.


@equation(
    "t_step = (m + (p - 1)/v) · t_micro + exposed + update",
    unit="s",
    symbols={
        "micro_batches": "m",
        "stages": "p",
        "chunks": "v",
        "micro_batch_s": "t_micro",
        "exposed_s": "exposed",
        "update_s": "update",
    },
    source="Narayanan et al. 2021, arXiv:2104.04473, section 2.2 (GPipe, 1F1B, interleaved); "
    "Qi et al. 2023, arXiv:2401.10241 (zero bubble, as chunks that divide the bubble)",
)
def step_seconds(
    *,
    micro_batches: Quantity,
    stages: Quantity,
    micro_batch_s: Quantity,
    exposed_s: Quantity,
    update_s: Quantity,
    chunks: Quantity = 1.0,
) -> Quantity:
    """Return the seconds of one step with a pipeline's fill and drain."""
    return (micro_batches + (stages - 1) / chunks) * micro_batch_s + exposed_s + update_s


@equation(
    "t_tax = kappa · min(t_links, t_window)",
    unit="s",
    symbols={"links_s": "t_links", "window_s": "t_window", "tax_ratio": "kappa"},
    source="Isaev et al. 2023 (Calculon): what overlaps still takes a part of the processors",
)
def tax_seconds(*, links_s: Quantity, window_s: Quantity, tax_ratio: Quantity) -> Quantity:
    """Return the slowdown in seconds of computation that overlaps communication."""
    return tax_ratio * minimum(links_s, window_s)


@equation(
    "t_exposed = max(0, t_links - t_window) + kappa · min(t_links, t_window)",
    unit="s",
    symbols={"links_s": "t_links", "window_s": "t_window", "tax_ratio": "kappa"},
    source="Isaev et al. 2023 (Calculon): what overlaps still takes a part of the processors",
)
def exposed_seconds(*, links_s: Quantity, window_s: Quantity, tax_ratio: Quantity) -> Quantity:
    """Return the exposed seconds of communication that overlaps ``window_s`` of computation."""
    hidden = minimum(links_s, window_s)
    return links_s - hidden + tax_ratio * hidden


@equation(
    "t = t_rounds",
    unit="s",
    symbols={"rounds_s": "t_rounds"},
    source="Thakur et al. 2005: a ring of n ranks passes a bucket on in 2(n-1) steps",
)
def rounds_seconds(*, rounds_s: Quantity) -> Quantity:
    """Return the latency seconds of the ring steps of all buckets."""
    return rounds_s


def zero_bubble_divisor(passes: float, weight_passes: float) -> float:
    """Return the divisor of the 1F1B bubble under ZB-H1, for passes of equal length.

    Weight gradients have no dependents and fill the bubble: it shrinks from ``passes`` to the
    forward and input-gradient passes less the ``weight_passes``.

    Source: Qi et al. 2023, arXiv:2401.10241, table 2: (p-1)(T_F + T_B - T_W).

    >>> zero_bubble_divisor(3, 1)
    3.0
    """
    return passes / (passes - 2 * weight_passes)
