"""Memory and arithmetic of a training step: activations, gradients, optimiser states."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from planner.cost.quantity import Quantity, equation, maximum, minimum, where
from planner.specs.model import (
    AttentionLayers,
    CompressedLayers,
    LatentLayers,
    LayerGroup,
    ModelSpec,
    RecurrentLayers,
)

# ---------------------------------------------------------------------------
# Gradients, optimiser states and adapters of a training, and the time of its step.
# ---------------------------------------------------------------------------


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
    "t_before = m · t_forward",
    unit="s",
    symbols={"micro_batches": "m", "forward_s": "t_forward"},
    source="huggingface/trl 1.16.0, precompute_ref_log_probs: the reference answers each record "
    "once, in batches of the steps' size",
)
def reference_pass_seconds(*, micro_batches: Quantity, forward_s: Quantity) -> Quantity:
    """Return the seconds in which a reference answers the records of one step in advance."""
    return micro_batches * forward_s


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


# ---------------------------------------------------------------------------
# Activation memory of layers: saved for the backward pass, or live in an inference step.
# ---------------------------------------------------------------------------


KORTHIKANTI = "Korthikanti et al. 2022, arXiv:2205.05198, section 4, by element instead of byte"
# Residual-sized tensors saved per norm: input and output; a norm of single operators also saves
# its fp32 input and the normalised value.
NORM_TENSORS = 2
WIDE_NORM_TENSORS = 4
# Feed-forward tensors saved: gate, up, activation and their product, or input and output; the
# last of each is the input of the down projection.
GATED_FFN_TENSORS = 4
PLAIN_FFN_TENSORS = 2
# A step of inference holds two residual streams, one in fp32 for its norm, and the widest tensors
# of one half of a layer: of attention, or of the feed-forward block, whose gate, up and product
# (or input and output) live at once. Between 6k and 31k prompt tokens the peaks of Qwen2.5's speed
# table (0.5B to 72B, validation/memory.csv) grow by these elements per token.
INFERENCE_HIDDEN_TENSORS = 4
INFERENCE_FFN_TENSORS = 3
ROTARY_TABLES = 2
# Logits in the loss: the 16- or 32-bit output, its fp32 copy and the fp32 gradient; a loss of
# single operators also saves the shifted copy and the log-probabilities.
LOSS_FP32_COPIES = 2
UNFUSED_LOSS_FP32_COPIES = 4
# ORPO adds a cross-entropy on the chosen half to the log-probabilities of both halves. In 16 bits:
# the output, log-softmax row by row, and the gradients of both; of the chosen half also a copy,
# its fp32 cast, log-softmax and gradient. Counted in huggingface/trl 1.16.0,
# trl/experimental/orpo/orpo_trainer.py (concatenated_forward): 14 bytes a logit.
ODDS_RATIO_FP32_COPIES = 3
# Scores and probabilities; in fp32 only the softmax result is saved, which the next product reads:
# for 8 layers with 4 heads and 256 tokens, 127.9 MB predicted, 119.2 MB measured.
SCORE_COPIES = 2
FP32_SCORE_COPIES = 1


@equation(
    "A_1 = h_kept/s · B_h + (w_attention + w_ffn)/t · B",
    unit="B",
    symbols={
        "hidden_width": "h_kept",
        "sequence_ranks": "s",
        "hidden_bytes_per_element": "B_h",
        "inner_width": "w_attention + w_ffn",
        "tensor_parallel_size": "t",
        "inner_bytes_per_element": "B",
    },
    source=KORTHIKANTI,
)
def kept_token_bytes(
    *,
    hidden_width: Quantity,
    sequence_ranks: Quantity,
    hidden_bytes_per_element: Quantity,
    inner_width: Quantity,
    tensor_parallel_size: Quantity,
    inner_bytes_per_element: Quantity,
) -> Quantity:
    """Return the bytes that one layer saves per token for its backward pass."""
    residual = hidden_width / sequence_ranks * hidden_bytes_per_element
    return residual + inner_width / tensor_parallel_size * inner_bytes_per_element


@equation(
    "A = T · L · A_1 · in_flight",
    unit="B",
    symbols={
        "num_tokens": "T",
        "num_layers": "L",
        "token_bytes": "A_1",
        "in_flight": "in_flight",
    },
    source=KORTHIKANTI,
)
def kept_activation_bytes(
    *,
    num_tokens: Quantity,
    num_layers: Quantity,
    token_bytes: Quantity,
    in_flight: Quantity = 1.0,
) -> Quantity:
    """Return the saved activation bytes of a stage's micro-batches in flight."""
    return num_tokens * num_layers * token_bytes * in_flight


@equation(
    "A_s = c · a/t · T · s · B",
    unit="B",
    symbols={
        "num_heads": "a",
        "tensor_parallel_size": "t",
        "num_tokens": "T",
        "sequence_length": "s",
        "bytes_per_element": "B",
        "copies": "c",
    },
    source=KORTHIKANTI,
)
def score_bytes(
    *,
    num_heads: Quantity,
    tensor_parallel_size: Quantity,
    num_tokens: Quantity,
    sequence_length: Quantity,
    bytes_per_element: Quantity,
    copies: Quantity = SCORE_COPIES,
) -> Quantity:
    """Return the bytes of saved scores and probabilities of eager attention in one layer."""
    heads = num_heads / tensor_parallel_size
    return copies * heads * num_tokens * sequence_length * bytes_per_element


def score_copies(compute_dtype: str | None) -> int:
    """Return the number of score-sized tensors that eager attention saves per layer."""
    return FP32_SCORE_COPIES if compute_dtype == "fp32" else SCORE_COPIES


@equation(
    "A_v = T · V/t · (B + 4 · c)",
    unit="B",
    symbols={
        "num_tokens": "T",
        "vocab_size": "V",
        "tensor_parallel_size": "t",
        "bytes_per_element": "B",
        "fp32_copies": "c",
    },
    source="the output, and its fp32 copies and gradients in the cross-entropy",
)
def loss_bytes(
    *,
    num_tokens: Quantity,
    vocab_size: Quantity,
    tensor_parallel_size: Quantity,
    bytes_per_element: Quantity,
    fp32_copies: Quantity = LOSS_FP32_COPIES,
) -> Quantity:
    """Return the bytes of the logits and their copies in the loss, on the last stage."""
    per_logit = bytes_per_element + fp32_copies * FP32_BYTES
    return num_tokens * vocab_size / tensor_parallel_size * per_logit


@equation(
    "A_v = min(T, T_c) · min(V/t, V_c) · B + 4 · h · (T + s · V/t)",
    unit="B",
    symbols={
        "num_tokens": "T",
        "vocab_size": "V",
        "tensor_parallel_size": "t",
        "bytes_per_element": "B",
        "hidden_size": "h",
        "tile_tokens": "T_c",
        "tile_width": "V_c",
        "summed_head": "s",
    },
    source="huggingface/trl 1.16.0, trl/kernels/chunked_logprob.py",
)
def tiled_loss_bytes(
    *,
    num_tokens: Quantity,
    vocab_size: Quantity,
    tensor_parallel_size: Quantity,
    bytes_per_element: Quantity,
    hidden_size: Quantity,
    tile_tokens: Quantity,
    tile_width: Quantity,
    summed_head: Quantity,
) -> Quantity:
    """Return the bytes of a loss whose head multiplies tiles of tokens and vocabulary.

    The gradients of the last hidden states, and with ``summed_head`` of the head, are summed in
    fp32 before they are cast.
    """
    width = vocab_size / tensor_parallel_size
    tile = minimum(num_tokens, tile_tokens) * minimum(width, tile_width) * bytes_per_element
    return tile + FP32_BYTES * hidden_size * (num_tokens + summed_head * width)


@equation(
    "A_v = n · B + min(n, n_c) · 4 · c + max(0, n - n_c) · B, with n = T · V/t",
    unit="B",
    symbols={
        "num_tokens": "T",
        "vocab_size": "V",
        "tensor_parallel_size": "t",
        "bytes_per_element": "B",
        "chunk_logits": "n_c",
        "fp32_copies": "c",
    },
    source="the output, the fp32 copies and gradients of one chunk, and the whole gradient",
)
def chunked_loss_bytes(
    *,
    num_tokens: Quantity,
    vocab_size: Quantity,
    tensor_parallel_size: Quantity,
    bytes_per_element: Quantity,
    chunk_logits: Quantity,
    fp32_copies: Quantity = LOSS_FP32_COPIES,
) -> Quantity:
    """Return the bytes of the logits in a loss that takes ``chunk_logits`` of them at once.

    Of a bf16 LoRA step of 8,192 tokens with 128,256 classes, 1.2 B weights and full recomputation,
    9.3 GB with the states; 9.6 GB measured (validation/measured, one H100).
    """
    logits = num_tokens * vocab_size / tensor_parallel_size
    chunk = minimum(logits, chunk_logits) * fp32_copies * FP32_BYTES
    gradient = maximum(0.0, logits - chunk_logits) * bytes_per_element
    return logits * bytes_per_element + chunk + gradient


@equation(
    "A = max(T · e · B, 4 · T · h · B + b · V/t · l)",
    unit="B",
    symbols={
        "num_tokens": "T",
        "elements": "e",
        "hidden_size": "h",
        "bytes_per_element": "B",
        "sampled_tokens": "b",
        "vocab_per_rank": "V/t",
        "bytes_per_logit": "l",
    },
    source="one layer at a time, then the output head: the tensors of a layer are free by then",
)
def inference_activation_bytes(
    *,
    num_tokens: Quantity,
    elements: Quantity,
    hidden_size: Quantity,
    bytes_per_element: Quantity,
    sampled_tokens: Quantity,
    vocab_per_rank: Quantity,
    bytes_per_logit: Quantity,
) -> Quantity:
    """Return the peak activation bytes of one inference step of ``num_tokens`` tokens."""
    logits = sampled_tokens * vocab_per_rank * bytes_per_logit
    streams = INFERENCE_HIDDEN_TENSORS * num_tokens * hidden_size * bytes_per_element
    return maximum(num_tokens * elements * bytes_per_element, streams + logits)


@equation(
    "R = 2 · L · P · d · B",
    unit="B",
    symbols={
        "num_layers": "L",
        "positions": "P",
        "head_dim": "d",
        "bytes_per_element": "B",
    },
    source="sines and cosines of every position the model knows, kept by every layer",
)
def rotary_table_bytes(
    *,
    num_layers: Quantity,
    positions: Quantity,
    head_dim: Quantity,
    bytes_per_element: Quantity,
) -> Quantity:
    """Return the bytes of rotary tables stored per layer."""
    return ROTARY_TABLES * num_layers * positions * head_dim * bytes_per_element


@equation(
    "W = R · h · P · (4 · d + 8)",
    unit="B",
    symbols={
        "num_requests": "R",
        "num_heads": "h",
        "num_partitions": "P",
        "head_dim": "d",
    },
    source="sgl-project/sglang, python/sglang/srt/layers/attention/aiter_backend.py",
)
def split_workspace_bytes(
    *, num_requests: Quantity, num_heads: Quantity, num_partitions: Quantity, head_dim: Quantity
) -> Quantity:
    """Return the bytes of 32-bit partial outputs and softmax statistics of split attention.

    Shapes: outputs [num_requests, num_heads, num_partitions, head_dim], a maximum and a sum each.
    """
    each = FP32_BYTES * head_dim + 2 * FP32_BYTES
    return num_requests * num_heads * num_partitions * each


@equation(
    "G = n · L · b",
    unit="B",
    symbols={"num_graphs": "n", "num_layers": "L", "bytes_per_layer": "b"},
    source="logs of vLLM's starts: issue 7553, pull requests 11349 and 21489",
)
def captured_graph_bytes(
    *, num_graphs: Quantity, num_layers: Quantity, bytes_per_layer: Quantity
) -> Quantity:
    """Return the bytes of CUDA graphs, one for each captured size and mode."""
    return num_graphs * num_layers * bytes_per_layer


def attention_elements_per_token(model: ModelSpec) -> float:
    """Return the elements per token of queries, keys, values and attention output.

    The mean over layers of different kinds.
    """
    return mean_over_layers(model, mixer_elements_per_token)


def eager_attention_elements_per_token(model: ModelSpec) -> float:
    """Return the elements per token that eager attention saves: repeated KV heads, two outputs."""
    return mean_over_layers(model, _eager_mixer_elements_per_token)


def mean_over_layers(model: ModelSpec, width: Callable[[ModelSpec, LayerGroup], int]) -> float:
    """Return the mean of a width over all layers."""
    groups = model.layers_by_attention
    widths = sum(group.count * width(model, group) for group in groups)
    return widths / model.num_hidden_layers


def mixer_elements_per_token(model: ModelSpec, group: LayerGroup) -> int:
    """Return the elements per token of a layer's projections, inputs and outputs of the mixer."""
    if isinstance(group, AttentionLayers):
        return (group.heads + group.kv_heads) * (group.key_dim + group.value_dim)
    if isinstance(group, LatentLayers):
        return 2 * group.heads * (group.key_dim + group.value_dim) + group.latent_dim
    if isinstance(group, CompressedLayers):
        return 2 * (group.num_attention_heads + 1) * group.head_dim
    if isinstance(group, RecurrentLayers):
        return group.linear_parameters // model.hidden_size
    return 0


def _eager_mixer_elements_per_token(model: ModelSpec, group: LayerGroup) -> int:
    if isinstance(group, AttentionLayers):
        return 2 * group.heads * (group.key_dim + group.value_dim) + group.heads * group.value_dim
    return mixer_elements_per_token(model, group)


@dataclass(frozen=True)
class SavedTensors:
    """Engine-dependent saved tensors.

    ``wide_norms`` run as single fp32 operators; with ``inputs``, every matrix saves its input, as
    training it requires. Otherwise only adapters on queries and values save theirs.
    """

    wide_norms: bool = False
    inputs: bool = True


def hidden_tensors(model: ModelSpec, saved: SavedTensors) -> int:
    """Return the number of residual-sized tensors that a layer saves."""
    wide = saved.wide_norms and model.norm == "rmsnorm"
    each = WIDE_NORM_TENSORS if wide else NORM_TENSORS
    if saved.inputs:
        return model.norms_per_layer * each
    return model.norms_per_layer * each // 2 + 1


def feed_forward_elements_per_token(model: ModelSpec, saved: SavedTensors) -> int:
    """Return the saved elements per token of a feed-forward block, over its active experts."""
    tensors = GATED_FFN_TENSORS if model.gated_mlp else PLAIN_FFN_TENSORS
    return (tensors if saved.inputs else tensors - 1) * widest_feed_forward(model)


def residuals_of_every_second_product(model: ModelSpec) -> int:
    """Return the residual tensors of a layer that ``every_second_product_elements`` leaves out.

    The input, and of gated blocks the output of the down projection, which is an odd product.
    """
    return 2 if model.gated_mlp else 1


def every_second_product_elements(model: ModelSpec) -> float:
    """Return the elements per token kept where every second matrix product is computed again.

    Of query, key, value, output, gate, up and down the odd ones are kept, with the output of the
    attention core. Source: torchtitan, distributed/activation_checkpoint.py, ``SelectiveAC``.
    """
    keys = model.num_key_value_heads * model.head_dim
    return attention_elements_per_token(model) - keys + widest_feed_forward(model)


def every_second_product_share(model: ModelSpec) -> float:
    """Return the share of a layer's products that are computed again: key, output, and up or down.

    >>> from planner.catalog.models import get_model
    >>> round(every_second_product_share(get_model("meta-llama/Meta-Llama-3-8B")), 2)
    0.37
    """
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    wide = widest_feed_forward(model)
    products = 3 if model.gated_mlp else 2
    return (keys + queries + wide) / (2 * queries + 2 * keys + products * wide)


def operand_elements_per_token(model: ModelSpec, tensor_parallel_size: Quantity) -> Quantity:
    """Return the operand elements per token of one layer's matrix products on one rank."""
    tensors = GATED_FFN_TENSORS - 1 if model.gated_mlp else PLAIN_FFN_TENSORS
    split = attention_elements_per_token(model) + tensors * widest_feed_forward(model)
    return NORM_TENSORS * 2 * model.hidden_size + split / tensor_parallel_size


def inference_elements(model: ModelSpec, tensor_parallel_size: float) -> float:
    """Return the peak live elements per token during a forward pass of one layer."""
    widest = max(mixer_elements_per_token(model, group) for group in model.layers_by_attention)
    tensors = INFERENCE_FFN_TENSORS if model.gated_mlp else PLAIN_FFN_TENSORS
    wide = max(widest, tensors * widest_feed_forward(model))
    return INFERENCE_HIDDEN_TENSORS * model.hidden_size + wide / tensor_parallel_size


def fused_experts_elements(model: ModelSpec, column_ranks: float) -> float:
    """Return the elements per token that a fused kernel of routed experts allocates.

    One buffer has the gates and values of all chosen experts, then their outputs, and another the
    activated values. Source: vLLM, fused_moe/fused_marlin_moe.py (intermediate_cache13 and 2).
    """
    if not model.is_moe:
        return 0.0
    width = model.moe_intermediate_size / column_ranks
    hidden = model.expert_hidden_size or model.hidden_size
    experts = model.num_experts_per_tok * (maximum(2 * width, hidden) + width)
    return INFERENCE_HIDDEN_TENSORS * model.hidden_size + experts


def widest_feed_forward(model: ModelSpec) -> int:
    """Return the active feed-forward width per token in the widest layer."""
    routed = model.moe_intermediate_size * model.num_experts_per_tok
    dense = model.intermediate_size if model.num_feed_forward_layers else 0
    return max(dense, routed + model.shared_intermediate_size)


# Saved tensors of a layer of native PyTorch operators, counted by operator.
#
# A product saves its inputs, a norm its fp32 input and the normalised value, a gate both factors,
# a softmax its result. With autocast or adapters, each matrix saves its own copy of the input. The
# counts are measured on real ranks: see the docs page training-memory.


AdapterTargets = Literal["all", "query_value"]
QUERY_KEY_VALUE, QUERY_VALUE, OUT_AND_DOWN = 3, 2, 2
# Bytes per score: the fp32 result of the softmax, and the 16-bit copy for the product.
FP32_SCORE_BYTES, NARROW_SCORE_BYTES = 4, 2
# Gradients of probabilities and of scores, both in fp32 around the softmax.
SCORE_GRADIENT_BYTES = 8


@dataclass(frozen=True)
class Operators:
    """The element sizes and trained matrices of a layer.

    ``residual_bytes`` and ``product_bytes`` are those of an element of the residual and of an
    operand. ``adapted`` are the frozen matrices with adapters of this ``rank``; None if the
    matrices themselves are trained.
    """

    residual_bytes: float
    product_bytes: float
    adapted: AdapterTargets | None = None
    rank: int = 0
    writes_scores: bool = True

    @property
    def trains_every_matrix(self) -> bool:
        """Return whether every matrix or its adapter is trained and saves its input."""
        return self.adapted != "query_value"

    @property
    def narrow(self) -> float:
        """Return the size of an operand element relative to a residual element."""
        return self.product_bytes / self.residual_bytes


@equation(
    "A_w = T · A_r + A_s + max(T · G_1, G_s - T · F_1)",
    unit="B",
    symbols={
        "num_tokens": "T",
        "rebuilt_bytes": "A_r",
        "scores": "A_s",
        "gradient_bytes": "G_1",
        "score_gradients": "G_s",
        "feed_forward_bytes": "F_1",
    },
    source=f"{KORTHIKANTI}; gradients on their way as counted on real ranks",
)
def layer_at_work_bytes(
    *,
    num_tokens: Quantity,
    rebuilt_bytes: Quantity,
    scores: Quantity,
    gradient_bytes: Quantity,
    score_gradients: Quantity,
    feed_forward_bytes: Quantity,
) -> Quantity:
    """Return the extra bytes of the layer in its backward pass: recomputed tensors and gradients.

    The feed-forward block is first: its tensors are freed before the gradients of the scores.
    """
    rebuilt = num_tokens * rebuilt_bytes + scores
    later = score_gradients - num_tokens * feed_forward_bytes
    return rebuilt + maximum(num_tokens * gradient_bytes, later)


def saved_residual_tensors(model: ModelSpec, how: Operators) -> float:
    """Return the saved residual-wide tensors of a layer, in units of the residual's bytes."""
    wide = FP32_BYTES / how.residual_bytes
    scaled = 1.0 if model.norm == "rmsnorm" and how.adapted is None else 0.0
    return model.norms_per_layer * (wide + scaled) + _saved_norm_outputs(model, how) * how.narrow


def _saved_norm_outputs(model: ModelSpec, how: Operators) -> int:
    """Return the number of saved copies of the norms' outputs."""
    if not how.trains_every_matrix:
        return QUERY_VALUE
    # Each matrix saves its own copy.
    copies = how.adapted is not None or how.product_bytes < how.residual_bytes
    return QUERY_KEY_VALUE + _gates(model) if copies else model.norms_per_layer


def saved_operand_elements_per_token(model: ModelSpec, how: Operators) -> float:
    """Return the other saved elements per token of a layer, in the operand format."""
    operands = mean_over_layers(model, partial(_operands, how))
    return operands + feed_forward_elements_without_input(model, how) + _adapter_ranks(model, how)


def feed_forward_elements_without_input(model: ModelSpec, how: Operators) -> float:
    """Return the saved elements per token of the feed-forward block without its input."""
    tensors = GATED_FFN_TENSORS if model.gated_mlp else PLAIN_FFN_TENSORS
    return (tensors if how.trains_every_matrix else tensors - 1) * widest_feed_forward(model)


def product_residuals(how: Operators) -> float:
    """Return the residual-wide tensors if only products are saved: input and two outputs."""
    outputs = OUT_AND_DOWN * (2 if how.adapted == "all" else 1)
    return 1 + outputs * how.narrow


def product_output_elements_per_token(model: ModelSpec, how: Operators) -> float:
    """Return the other saved outputs per token of products, fused attention and adapters."""
    projected = mean_over_layers(model, _projected)
    feed_forward = _gates(model) * widest_feed_forward(model)
    adapters = 0.0
    if how.adapted is not None:
        every = how.adapted == "all"
        adapters = mean_over_layers(model, partial(_projected, keys=every)) + (
            feed_forward if every else 0.0
        )
    fused = 0.0 if how.writes_scores else mean_over_layers(model, _attention_output)
    return projected + feed_forward + adapters + fused + _adapter_ranks(model, how)


def gradient_elements_per_token(model: ModelSpec) -> float:
    """Return the live gradient elements per token of the feed-forward block.

    The gradients of both factors of a gate exist together with that of their product.
    """
    return (PLAIN_FFN_TENSORS + (1 if model.gated_mlp else 0)) * widest_feed_forward(model)


def score_element_bytes(product_bytes: float) -> float:
    """Return the saved bytes per score of eager attention."""
    narrow = product_bytes < FP32_BYTES
    return FP32_SCORE_BYTES + (NARROW_SCORE_BYTES if narrow else 0)


def _gates(model: ModelSpec) -> int:
    return 2 if model.gated_mlp else 1


def _adapter_ranks(model: ModelSpec, how: Operators) -> int:
    """Return the sum of the ranks of a layer's adapters."""
    if how.adapted is None:
        return 0
    every = QUERY_KEY_VALUE + _gates(model) + OUT_AND_DOWN
    return how.rank * (every if how.adapted == "all" else QUERY_VALUE)


def _operands(how: Operators, model: ModelSpec, group: LayerGroup) -> int:
    """Return the saved operands per token of attention and of its output projection."""
    if not isinstance(group, AttentionLayers):
        return mixer_elements_per_token(model, group)
    values = group.heads * group.value_dim
    if how.writes_scores:
        return 2 * group.heads * group.key_dim + values * (2 if how.trains_every_matrix else 1)
    copies_result = how.adapted == "all"  # an own copy in addition to the kernel's result
    return _projected(model, group) + values * (2 if copies_result else 1)


def _projected(model: ModelSpec, group: LayerGroup, *, keys: bool = True) -> int:
    """Return the width of queries, keys and values, or of queries and values only."""
    if not isinstance(group, AttentionLayers):
        return mixer_elements_per_token(model, group)
    key = group.kv_heads * group.key_dim if keys else 0
    return group.heads * group.key_dim + key + group.kv_heads * group.value_dim


def _attention_output(_model: ModelSpec, group: LayerGroup) -> int:
    return group.heads * group.value_dim if isinstance(group, AttentionLayers) else 0
