"""TorchAO's casts around the narrow products of a training step, kernel by kernel.

Each product reads its operands in the narrow format: the layer's input, its weight and the
gradient of its output are cast along rows for one product and along columns for another. Products
of one input share its cast (the compiler merges equal operators), each output has a gradient of
its own.

Sources: TorchAO 0.18 (cb76f29), torchao/prototype/moe_training/mxfp8_linear.py and
nvfp4_training/nvfp4_linear.py: which tensors are cast, and by which kernels. Rates are TorchAO's
own microbenchmarks, the largest shape of each table: docs/source/workflows/training.md (MXFP8, a
B200 of 1,000 W) and benchmarks/prototype/nvfp4_training/README.md (Triton kernels, a GB200).
"""

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

from planner.cost.quantity import Ledger
from planner.cost.roofline import memory_seconds
from planner.cost.training import widest_feed_forward
from planner.cost.weights import WIDE
from planner.specs.base import Dtype
from planner.specs.model import ModelSpec
from planner.workload.setting import Setting, compute_dtype_of

GROUP = "train_step"
# Chips whose units multiply formats with a scale per block.
WITH_BLOCK_SCALES = "blackwell"
# Bytes of an element: 16 bits, eight and a scale for 32, four and a scale for 16.
WIDE_BYTES, MXFP8_BYTES, NVFP4_BYTES = 2.0, 1 + 1 / 32, 0.5 + 1 / 16
# Shares of the memory bandwidth that the kernels reach: of a B200's 7.7 and a GB200's 7.93 TB/s.
MXFP8_ROWS, MXFP8_COLUMNS = 5889 / 7700, 5717 / 7700
NVFP4_AMAX, NVFP4_NEAREST, NVFP4_STOCHASTIC = 2550 / 7928, 1564 / 7928, 1101 / 7928
NVFP4_WEIGHT = 790 / 7928


class Cast(NamedTuple):
    """One kernel: what it reads, its runs in a recomputation, bytes, share of the bandwidth.

    The share is zero for a plain reduction, which runs at the bandwidth of any stream.
    """

    name: str
    of: str  # "input", "weight" or "gradient"
    again: int
    element_bytes: float
    share: float


MXFP8 = (
    Cast("inputs, along rows", "input", 1, WIDE_BYTES + MXFP8_BYTES, MXFP8_ROWS),
    Cast("weights, along rows", "weight", 1, WIDE_BYTES + MXFP8_BYTES, MXFP8_ROWS),
    Cast("gradients, along rows", "gradient", 0, WIDE_BYTES + MXFP8_BYTES, MXFP8_ROWS),
    Cast("inputs, along columns", "input", 0, WIDE_BYTES + MXFP8_BYTES, MXFP8_COLUMNS),
    Cast("weights, along columns", "weight", 0, WIDE_BYTES + MXFP8_BYTES, MXFP8_COLUMNS),
    Cast("gradients, along columns", "gradient", 0, WIDE_BYTES + MXFP8_BYTES, MXFP8_COLUMNS),
)
# Both directions are written at once, after a pass that finds the largest value.
NVFP4 = (
    Cast("largest inputs, transformed", "input", 1, WIDE_BYTES, NVFP4_AMAX),
    Cast("inputs, both ways", "input", 1, WIDE_BYTES + 2 * NVFP4_BYTES, NVFP4_NEAREST),
    Cast("largest weights", "weight", 1, WIDE_BYTES, 0.0),
    Cast("weights, both ways", "weight", 1, WIDE_BYTES + 2 * NVFP4_BYTES, NVFP4_WEIGHT),
    Cast("largest gradients, transformed", "gradient", 0, WIDE_BYTES, NVFP4_AMAX),
    Cast(
        "gradients, both ways, rounded at random",
        "gradient",
        0,
        WIDE_BYTES + 2 * NVFP4_BYTES,
        NVFP4_STOCHASTIC,
    ),
)
KERNELS: dict[Dtype, tuple[Cast, ...]] = {"fp8": MXFP8, "nvfp4": NVFP4}


def casts_by_torchao(setting: Setting) -> bool:
    """Return whether the narrow products of a training are TorchAO's, with known kernels."""
    computed = compute_dtype_of(setting)
    has_units = setting.device.architecture == WITH_BLOCK_SCALES
    return setting.engine.casts == "torchao" and computed in KERNELS and has_units


def narrow_share(setting: Setting) -> float:
    """Return the share of the layers whose products run in the narrow format, of all stages.

    Some engines keep the last layers in 16 bits.
    """
    computed = compute_dtype_of(setting)
    layers, tail = setting.model.num_hidden_layers, setting.engine.wide_tail
    return 1 - ceil(layers * tail.get(computed, 0.0)) / layers if computed not in WIDE else 1.0


def keeps_codes(setting: Setting) -> bool:
    """Return whether narrow layers keep the codes of their inputs, and no product's output.

    So do TorchAO's NVFP4 layers under torchtitan's selective recomputation, whose list of products
    (aten.mm, aten.linear and PyTorch's compute-intensive operators) lacks ``scaled_mm``.
    """
    is_four_bit = compute_dtype_of(setting) == "nvfp4"
    return is_four_bit and casts_by_torchao(setting) and setting.keeps_every_second_product


def input_elements(model: ModelSpec, tensor: float = 1.0) -> float:
    """Return the elements per token of one layer's inputs of products, each counted once."""
    queries = model.num_attention_heads * model.head_dim
    return 2 * model.hidden_size + (queries + widest_feed_forward(model)) / tensor


def gradient_elements(model: ModelSpec, tensor: float = 1.0) -> float:
    """Return the elements per token of the gradients of one layer's products."""
    heads = model.num_attention_heads + 2 * model.num_key_value_heads
    wide = (2 if model.gated_mlp else 1) * widest_feed_forward(model)
    return 2 * model.hidden_size + (heads * model.head_dim + wide) / tensor


def recomputed_products(model: ModelSpec) -> float:
    """Return the share of products that a layer without kept outputs computes again: not the last.

    >>> from planner.catalog.models import get_model
    >>> round(recomputed_products(get_model("meta-llama/Meta-Llama-3-8B")), 2)
    0.73
    """
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    wide = widest_feed_forward(model)
    products = 3 if model.gated_mlp else 2
    return 1 - wide / (2 * queries + 2 * keys + products * wide)


def code_elements(model: ModelSpec) -> float:
    """Return what a narrow layer keeps per token, in 16-bit elements, beside its input.

    The output of the attention core, and the codes of every product's input along columns.
    """
    queries = model.num_attention_heads * model.head_dim
    return queries + input_elements(model) * NVFP4_BYTES / WIDE_BYTES


def cast_seconds(
    setting: Setting, ledger: Ledger, tokens: float, weights: float, recomputed: float
) -> float:
    """Return the seconds of the casts of a micro-batch's narrow layers on one device.

    ``tokens`` are those of the micro-batch times the device's narrow layers, ``weights`` the
    elements of their matrices on the device, and ``recomputed`` the share of products that run
    again before their backward pass.
    """
    model, tensor = setting.model, setting.layout.tensor
    elements = {
        "input": tokens * input_elements(model, tensor),
        "gradient": tokens * gradient_elements(model, tensor),
        "weight": weights,
    }
    seconds = 0.0
    for cast, times in _runs(compute_dtype_of(setting), recomputed):
        seconds = seconds + ledger.term(
            memory_seconds,
            setting.line(GROUP, f"Casting {cast.name}", "memory_bandwidth", "torchao_casts"),
            moved_bytes=times * cast.element_bytes * elements[cast.of],
            memory_bytes_per_s=setting.rates.memory_bytes_per_s,
            memory_efficiency=cast.share or setting.rates.stream_efficiency,
        )
    return seconds


def _runs(computed: Dtype, recomputed: float) -> Iterator[tuple[Cast, float]]:
    """Yield the kernels of a format with the times that each runs in a step."""
    for cast in KERNELS[computed]:
        yield cast, 1 + cast.again * recomputed
