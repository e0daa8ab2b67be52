"""The trained parameters, optimiser and state sizes of each training method."""

from planner.cost.training import (
    STATE_BYTES,
    largest_weight,
    lora_parameters,
    lora_widths,
    output_widths,
    scale_parameters,
)
from planner.cost.weights import SIXTEEN_BIT, element_bytes
from planner.specs.workload import TrainWorkload
from planner.workload.setting import Setting

DEFAULT_LORA_RANK = 16
MASTER_BYTES = 4.0
ADAPTER_METHODS = frozenset({"lora", "qlora", "alphatuning"})
FUSED_METHODS = frozenset({"lomo", "adalomo"})
OWN_STATES = FUSED_METHODS | {"qft"}


def optimizer_of(workload: TrainWorkload) -> str:
    """Return the optimiser in use: the method's own, the requested one, or AdamW."""
    if workload.method in OWN_STATES:
        return workload.method
    return workload.optimizer or "adamw"


def adapts_every_matrix(setting: Setting, workload: TrainWorkload) -> bool:
    """Return whether all linear weights have adapters, not only queries and values."""
    return (workload.lora_targets or setting.engine.lora_targets) == "all"


def trained_parameters(setting: Setting, workload: TrainWorkload) -> float:
    """Return the number of trained parameters: all, or those of the adapters."""
    if workload.method not in ADAPTER_METHODS:
        return float(setting.counts.total)
    if workload.method == "alphatuning":
        scales = scale_parameters(
            num_layers=setting.model.num_hidden_layers, outputs=output_widths(setting.model)
        )
        return float(scales)
    rank = workload.lora_rank or DEFAULT_LORA_RANK
    widths = lora_widths(setting.model, every=adapts_every_matrix(setting, workload))
    return float(
        lora_parameters(num_layers=setting.model.num_hidden_layers, rank=rank, widths=widths)
    )


def filled_ratio(setting: Setting, workload: TrainWorkload) -> float:
    """Return the rows of a batch per padded row; packed rows have no padding."""
    return workload.text_ratio if setting.strategy.packed else 1.0


def gradient_bytes_each(setting: Setting, workload: TrainWorkload, layers: float) -> float:
    """Return the gradient bytes per trained parameter of a stage with ``layers`` layers.

    Fused optimisers hold the gradient of one weight at a time, at most the largest. QFT stores
    all gradients in 8 bits; some engines fuse its update too. Some engines keep 16-bit gradients
    in addition to the fp32 ones that accumulate them.
    """
    given = setting.strategy.gradient_dtype or "bf16"
    dtype = setting.engine.adapter_dtype if workload.method in ADAPTER_METHODS else given
    keeps_narrow = dtype == "fp32" and setting.engine.narrow_gradients_beside
    each = element_bytes(dtype) + (element_bytes("bf16") if keeps_narrow else 0.0)
    is_fused = workload.method in FUSED_METHODS or setting.has_integer_vocabulary
    if not is_fused:
        return each
    portion = layers / setting.model.num_hidden_layers
    return each * largest_weight(setting.model) / (setting.counts.total * portion)


def moment_bytes(setting: Setting) -> float:
    """Return the bytes of one optimiser moment per trained parameter."""
    return element_bytes(setting.strategy.optimizer_dtype or "fp32")


def state_bytes_each(setting: Setting, workload: TrainWorkload) -> float:
    """Return the bytes of moments and fp32 master weights per trained parameter."""
    optimizer = optimizer_of(workload)
    scale = element_bytes(setting.strategy.optimizer_dtype or "fp32") / element_bytes("fp32")
    bytes_each = STATE_BYTES[optimizer] * (scale if optimizer != "adamw_8bit" else 1.0)
    sixteen = workload.method in ADAPTER_METHODS or setting.weight_dtype in SIXTEEN_BIT
    if sixteen and setting.engine.master_weights and optimizer not in FUSED_METHODS:
        bytes_each += MASTER_BYTES
    return bytes_each + setting.engine.extra_state_bytes
