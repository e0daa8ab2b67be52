"""Work of model compression: calibration passes, Hessians, columns, tuning steps.

Each method is a recipe of these parts. Second-order methods factor one Hessian per matrix and
process its columns sequentially, so the latency per column adds to the arithmetic.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.cost.quantity import Quantity, equation
from planner.specs.base import Dtype
from planner.specs.model import ModelSpec

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
    elementwise traffic per weight; ``alike`` is the group of methods whose published times are
    fitted together.
    """

    dtype: Dtype
    alike: str
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
    "quantease": replace(SECOND_ORDER, alike="quantease", column_passes=25, column_seconds=20e-6),
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
