"""Bytes of weights in every format, and the time and memory of compressing them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from planner.cost.parameters import count_mixer
from planner.cost.quantity import Quantity, ceil, equation, maximum
from planner.specs.base import Dtype
from planner.specs.cluster import DeviceSpec
from planner.specs.model import AttentionLayers, ModelSpec, WeightPart

# ---------------------------------------------------------------------------
# Bytes of weights: per dtype, per layer's format, per device under each parallelism.
# ---------------------------------------------------------------------------


# Bytes per element of each dtype, with group metadata for quantised formats.


ELEMENT_BITS: dict[Dtype, float] = {
    "fp32": 32,
    "tf32": 32,
    "bf16": 16,
    "fp16": 16,
    "fp8": 8,
    "int8": 8,
    "int4": 4,
    "nvfp4": 4,
    "mxfp4": 4,
    "nf4": 4,
    "ternary": 1.6,
}
# Bits of scale and zero point per group, and the default group size. A group size of 0 is one
# scale per output channel, which is negligible.
# Sources: torchao int4 stores a 16-bit scale and zero per group; the OCP MX and NVFP4 formats
# fix groups of 32 and 16 with 8-bit scales; QLoRA's double quantisation costs 0.127 bit.
# int8 has groups only if a size is given: a 16-bit scale and an 8-bit zero, as in GPTQ.
GROUP_METADATA_BITS: dict[Dtype, float] = {
    "int8": 24,
    "int4": 32,
    "nvfp4": 8,
    "mxfp4": 8,
    "nf4": 8.128,
}
DEFAULT_GROUP: dict[Dtype, int] = {"int4": 128, "nvfp4": 16, "mxfp4": 32, "nf4": 64}
FIXED_GROUP: frozenset[Dtype] = frozenset({"nvfp4", "mxfp4"})
SIXTEEN_BIT: frozenset[Dtype] = frozenset({"bf16", "fp16"})
WIDE: frozenset[Dtype] = frozenset({"fp32", "tf32", "bf16", "fp16"})
BITS_PER_BYTE = 8


def element_bytes(dtype: Dtype) -> float:
    """Return the bytes of one element without any metadata."""
    return ELEMENT_BITS[dtype] / BITS_PER_BYTE


def group_size_of(dtype: Dtype, group_size: int | None) -> int:
    """Return the number of weights per scale; 0 for one scale per channel or none."""
    if dtype in FIXED_GROUP or group_size is None:
        return DEFAULT_GROUP.get(dtype, 0)
    return group_size if dtype in GROUP_METADATA_BITS else 0


def weight_bytes_per_element(
    dtype: Dtype,
    group_size: int | None = None,
    *,
    whole_scales: bool = False,
    group_bits: float | None = None,
) -> float:
    """Return the bytes of one stored weight, with its share of the group's metadata.

    ``whole_scales`` stay in fp32; otherwise NF4 uses double quantisation. ``group_bits`` are those
    of a group's scale and zero point where a checkpoint says them.

    >>> weight_bytes_per_element("int4", 128), weight_bytes_per_element("int4", 32, group_bits=16)
    (0.53125, 0.5625)
    """
    group = group_size_of(dtype, group_size)
    usual = GROUP_METADATA_BITS.get(dtype, 0.0) if group_bits is None else group_bits
    each = ELEMENT_BITS["fp32"] if whole_scales else usual
    metadata = each / group if group else 0.0
    return (ELEMENT_BITS[dtype] + metadata) / BITS_PER_BYTE


def unquantised_dtype(dtype: Dtype) -> Dtype:
    """Return the dtype of norms, embeddings and output head for quantised linear weights."""
    return dtype if dtype in WIDE else "bf16"


# Storage formats of the parts of a checkpoint's layers, such as narrower experts.


WEIGHT_PARTS: tuple[WeightPart, ...] = ("attention", "feed_forward", "experts")


@dataclass(frozen=True)
class WeightFormat:
    """A storage format and the parts of the layers stored in it."""

    dtype: Dtype
    element_bytes: float
    parts: tuple[WeightPart, ...]

    def contains(self, part: WeightPart) -> bool:
        """Return whether a part of the layers is stored in this format."""
        return part in self.parts


def formats_of(
    dtype: Dtype, element_bytes: float, exceptions: dict[WeightPart, Dtype]
) -> tuple[WeightFormat, ...]:
    """Return the formats of all parts, the main one first, then the exceptions.

    >>> [f.parts for f in formats_of("fp8", 1.0, {"attention": "bf16"})]
    [('feed_forward', 'experts'), ('attention',)]
    """
    main = tuple(part for part in WEIGHT_PARTS if part not in exceptions)
    formats = [WeightFormat(dtype, element_bytes, main)]
    for other in sorted(set(exceptions.values())):
        parts = tuple(part for part in WEIGHT_PARTS if exceptions.get(part) == other)
        formats.append(WeightFormat(other, weight_bytes_per_element(other), parts))
    return tuple(formats)


def packed_formats(
    dtype: Dtype, dense_bits: float, expert_bits: float
) -> tuple[WeightFormat, ...]:
    """Return the formats of a packed file, whose experts have a mean of their own.

    >>> [f.parts for f in packed_formats("int4", 4.8, 4.8)]
    [('attention', 'feed_forward', 'experts')]
    """
    dense = dense_bits / BITS_PER_BYTE
    if dense_bits == expert_bits:
        return (WeightFormat(dtype, dense, WEIGHT_PARTS),)
    return (
        WeightFormat(dtype, dense, ("attention", "feed_forward")),
        WeightFormat(dtype, expert_bits / BITS_PER_BYTE, ("experts",)),
    )


def padded_expert_ratio(
    hidden: int, intermediate: int, column_ranks: Quantity, multiples: tuple[int, int]
) -> Quantity:
    """Return loaded over published weights of experts whose widths a kernel rounds up.

    Each rank's share of the intermediate width and the hidden width become whole ``multiples``.

    >>> round(padded_expert_ratio(2880, 2880, 1, (128, 256)), 4)
    1.0904
    """
    inner, outer = multiples
    share = ceil(intermediate / column_ranks / inner) * inner * column_ranks
    return share / intermediate * (ceil(hidden / outer) * outer / hidden)


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


def first_identical_stages(num_layers: int, stages: int) -> tuple[int, ...]:
    """Return for each stage the first stage with an identical share of the model.

    >>> first_identical_stages(30, 4)
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


# Savings of sparse weights, which exist only for 2:4 sparsity in hardware.
#
# With two zeros in every four weights, kernels store the other two with 2-bit indices and sparse
# tensor cores skip the zeros. Serving engines store and multiply all other sparse matrices as
# dense.


SEMI_STRUCTURED_RATIO = 0.5
INDEX_BITS_PER_WEIGHT = 1.0  # two bits for each of the two nonzeros in four
# Measured, not the 2x of the datasheet: a CUTLASS 2:4 product against a dense fp8 one.
# Source: HPC-AI on llm-compressor and vLLM, ainews247.org/story/17670.
GEMM_SPEEDUP = 1.22
# vLLM and TensorRT-LLM load 2:4 checkpoints; torchao has semi-structured tensors for torch.
ENGINES = frozenset({"vllm", "tensorrt_llm", "torch"})


def has_sparse_cores(device: DeviceSpec) -> bool:
    """Return whether the device has 2:4 sparse tensor cores: NVIDIA since Ampere (bf16)."""
    of_nvidia = (device.vendor or "").upper() == "NVIDIA"
    return of_nvidia and device.kind == "gpu" and "bf16" in device.peak_flops_per_second


def runs_sparse(sparsity: float, engine: str, device: DeviceSpec) -> bool:
    """Return whether kernels exploit the sparsity: 0.5, on a supporting engine and device."""
    is_half = sparsity == SEMI_STRUCTURED_RATIO
    return is_half and engine in ENGINES and has_sparse_cores(device)


def stored_bits(element_bits: float) -> float:
    """Return the bits of one weight in the compressed 2:4 format.

    Nine of sixteen bits and five of eight, as in PyTorch's semi-structured tensors
    (torch/sparse/semi_structured.py).

    >>> stored_bits(16.0), stored_bits(8.0)
    (9.0, 5.0)
    """
    return element_bits * SEMI_STRUCTURED_RATIO + INDEX_BITS_PER_WEIGHT


def reason_against(sparsity: float, engine: str, device: DeviceSpec) -> str:
    """Return why sparsity saves nothing here, or '' if it does save."""
    if runs_sparse(sparsity, engine, device):
        return ""
    if sparsity != SEMI_STRUCTURED_RATIO:
        return "kernels skip only two zeros in every four weights (sparsity 0.5)"
    if engine not in ENGINES:
        return f"engine {engine} has no 2:4 kernels"
    return f"device {device.id} has no sparse tensor cores"


# ---------------------------------------------------------------------------
# Work of model compression: calibration passes, Hessians, columns, tuning steps.
#
# Each method is a recipe of these parts. Second-order methods factor one Hessian per matrix and
# process its columns sequentially, so the latency per column adds to the arithmetic.
# ---------------------------------------------------------------------------


GPTQ = "Frantar et al. 2022 (GPTQ), arXiv:2210.17323"
# A column is a dozen small sequential kernels: beyond the arithmetic, the published times of
# OPT-13B and OPT-175B on an A100, 20.9 min and 4.2 h, leave a third of a millisecond per column.
COLUMN_SECONDS = 326e-6
# fp32 products without tensor cores run close to their peak.
FP32_EFFICIENCY = 0.95
# Factoring, inverting and refactoring take as long as three products of the Hessian's size.
SOLVE_PRODUCTS = 3
SAMPLE_TOKENS = 2048
# AutoRound tunes a layer for 200 steps of 8 samples: forward, and backward twice. Each step rounds
# every weight and computes its gradient: about 25 elementwise passes of 4 bytes. Its thousand
# small kernels take 15 ms in a small layer. Source: Cheng et al. 2023, arXiv:2309.05516.
TUNING_STEPS = 200
TUNING_TOKENS = TUNING_STEPS * 8 * SAMPLE_TOKENS
TUNING_BATCH_TOKENS = 8 * SAMPLE_TOKENS
TUNING_STREAM_BYTES = TUNING_STEPS * 100.0
TUNING_STEP_SECONDS = 15e-3
# Per weight: rounding offset, its gradient, rounded copy and the gradient of that.
TUNING_BYTES = 16.0
# LLM-Pruner trains adapters on 50 thousand samples of 256 tokens for two epochs.
# Source: Ma et al. 2023, arXiv:2305.11627, section 4.
RECOVERY_TOKENS = 2 * 50_000 * 256
# AWQ's clipping multiplies 512 tokens with every weight at ten widths, 6 bytes per product.
CLIP_BYTES = 11 * 512 * 6.0


@dataclass(frozen=True)
class Recipe:
    """The parameters of one compression method.

    ``forwards`` are passes over ``calibration_tokens``; ``tuned_tokens`` run ``tuned_passes``
    times through their active weights, in ``layer_steps`` per layer; ``streamed_bytes`` is
    elementwise traffic per weight; ``method_group`` is the group of methods whose published times
    are fitted together.
    """

    dtype: Dtype
    method_group: str
    calibration_tokens: int = 0
    forwards: float = 0.0
    second_order: bool = False
    column_passes: int = 1
    column_seconds: float = COLUMN_SECONDS
    streamed_bytes: float = 0.0
    layer_steps: int = 0
    tuned_tokens: int = 0
    tuned_passes: float = 0.0
    tuned_bytes: float = 0.0
    kept_ratio: float = 1.0
    trained_bytes: float = 0.0  # per weight of the model, in addition to its own 16 bits

    @property
    def is_calibrated(self) -> bool:
        """Return whether the method uses calibration text, which several devices can split."""
        return self.calibration_tokens > 0


SHEARING_TOKENS = 240 * 8 * 512
SAMPLES = 128 * SAMPLE_TOKENS  # the calibration text of the GPTQ paper
# Two forwards: one collects a layer's inputs, one runs the compressed layer. Norm tweaking also
# trains the norms on the text. QuantEase iterates over the columns 25 times with one small kernel
# each (arXiv:2309.01885, section 5). LLM-Pruner computes gradients and keeps four fifths of the
# weights (arXiv:2305.11627, table 3).
SECOND_ORDER = Recipe(
    "int4", "second_order", calibration_tokens=SAMPLES, forwards=2, second_order=True
)
RECIPES: dict[str, Recipe] = {
    "int8_weight_only": Recipe("int8", "rounding"),
    "int8_dynamic": Recipe("int8", "rounding"),
    "fp8": Recipe("fp8", "rounding"),
    "gguf": Recipe("int4", "rounding"),
    "int4_weight_only": Recipe("int4", "rounding"),
    "nf4": Recipe("nf4", "rounding"),
    "finequant": Recipe("int4", "rounding"),
    "gptq": SECOND_ORDER,
    "sparsegpt": replace(SECOND_ORDER, dtype="bf16"),
    "norm_tweaking": replace(SECOND_ORDER, forwards=5),
    "quantease": replace(
        SECOND_ORDER, method_group="quantease", column_passes=25, column_seconds=20e-6
    ),
    "qmoe": replace(SECOND_ORDER, dtype="ternary"),
    "awq": Recipe(
        "int4", "scales", calibration_tokens=128 * 512, forwards=21, streamed_bytes=CLIP_BYTES
    ),
    "fptq": Recipe("int4", "fptq", calibration_tokens=SAMPLES, forwards=2),
    "autoround": Recipe(
        "int4",
        "tuning",
        calibration_tokens=SAMPLES,
        forwards=0,
        streamed_bytes=TUNING_STREAM_BYTES,
        layer_steps=TUNING_STEPS,
        tuned_tokens=TUNING_TOKENS,
        tuned_passes=3,
        tuned_bytes=TUNING_BYTES,
    ),
    "llm_pruner": Recipe(
        "bf16",
        "llm_pruner",
        calibration_tokens=10 * 64,
        forwards=3,
        tuned_tokens=RECOVERY_TOKENS,
        tuned_passes=2,
        kept_ratio=0.8,
    ),
    # Slipway's version is small: 240 steps of 8 sequences of 512 tokens on the whole FP32 model
    # with Adam's states (the paper trains on 50 billion tokens: arXiv:2310.06694, section 3).
    "sheared_llama": Recipe(
        "bf16",
        "llm_pruner",
        calibration_tokens=SHEARING_TOKENS,
        tuned_tokens=SHEARING_TOKENS,
        tuned_passes=2,
        kept_ratio=0.5,
        trained_bytes=2 + 4 + 8,
    ),
}


def matrices(model: ModelSpec) -> Iterator[tuple[int, int, int]]:
    """Yield (inputs, outputs, count) of the linear weights of all layers.

    Other token mixers count as attention with the model's heads.
    """
    hidden, wide = model.hidden_size, 2 if model.gated_mlp else 1
    query = model.num_attention_heads * model.head_dim
    key_value = model.num_key_value_heads * model.head_dim
    layers = model.num_hidden_layers
    yield hidden, query, layers
    yield hidden, key_value, 2 * layers
    yield query, hidden, layers
    sparse = model.num_moe_layers if model.is_moe else 0
    dense = layers - sparse - model.num_layers_without_feed_forward
    shared = model.shared_expert_intermediate_size or model.moe_intermediate_size
    for width, inner, count in (
        (hidden, model.intermediate_size, max(0, dense)),
        (
            model.expert_hidden_size or hidden,
            model.moe_intermediate_size,
            sparse * model.num_experts,
        ),
        (hidden, shared, sparse * model.num_shared_experts),
    ):
        if count and inner:
            yield width, inner, wide * count
            yield inner, width, count


@equation(
    "F = 2 · T · Σ in² + k · Σ in³ + Σ out · in²",
    unit="FLOP",
    symbols={
        "num_tokens": "T",
        "squared_inputs": "Σ in²",
        "solve_products": "k",
        "cubed_inputs": "Σ in³",
        "update_products": "Σ out · in²",
    },
    source=GPTQ + ", section 3; sums over all matrices",
)
def second_order_flops(
    *,
    num_tokens: Quantity,
    squared_inputs: Quantity,
    solve_products: Quantity,
    cubed_inputs: Quantity,
    update_products: Quantity,
) -> Quantity:
    """Return the FLOP of Hessians, their factorisation and the column updates, in 32 bits."""
    return 2 * num_tokens * squared_inputs + solve_products * cubed_inputs + update_products


@equation(
    "t = Σ in · passes · c",
    unit="s",
    symbols={"columns": "Σ in", "passes": "passes", "column_s": "c"},
    source=GPTQ + ", table 2: what the arithmetic leaves of the published times",
)
def column_seconds(*, columns: Quantity, passes: Quantity, column_s: Quantity) -> Quantity:
    """Return the seconds of processing the columns of all matrices sequentially."""
    return columns * passes * column_s


@equation(
    "t = L · steps · c",
    unit="s",
    symbols={"num_layers": "L", "steps": "steps", "step_s": "c"},
    source="Cheng et al. 2023 (AutoRound), arXiv:2309.05516: a layer is tuned step by step",
)
def tuning_seconds(*, num_layers: Quantity, steps: Quantity, step_s: Quantity) -> Quantity:
    """Return the kernel launch seconds of all tuning steps."""
    return num_layers * steps * step_s


@equation(
    "W_out = W_plain + n · B",
    unit="B",
    symbols={"plain_bytes": "W_plain", "parameters": "n", "bytes_per_element": "B"},
)
def written_bytes(
    *, plain_bytes: Quantity, parameters: Quantity, bytes_per_element: Quantity
) -> Quantity:
    """Return the bytes of the compressed checkpoint."""
    return plain_bytes + parameters * bytes_per_element


@equation(
    "H = 4 · (Σ_layer in² + 3 · max in² + max in · out)",
    unit="B",
    symbols={"squared_inputs": "Σ_layer in²", "widest": "max in", "largest": "max in · out"},
    source=GPTQ + ", section 3: a layer's Hessians, three copies while one is solved",
)
def hessian_bytes(*, squared_inputs: Quantity, widest: Quantity, largest: Quantity) -> Quantity:
    """Return the bytes of one layer's Hessians, one factorisation and its matrix, in 32 bits."""
    return 4.0 * (squared_inputs + 3 * widest**2 + largest)
