"""Make the weights smaller: read, quantise or prune layer by layer, write the result.

Rounding methods only stream the weights. Second-order methods (GPTQ, SparseGPT) also run
calibration text through the model, factor one Hessian per input width and update every column;
AWQ runs a grid of scales instead of the Hessian.
"""

from planner.cost.communication import transfer_seconds
from planner.cost.compute import matmul_flops
from planner.cost.dtypes import weight_bytes_per_element
from planner.cost.equation import Ledger, equation
from planner.cost.memory import MemoryUse, StageMemory
from planner.cost.quantity import Quantity
from planner.cost.roofline import compute_seconds, memory_seconds
from planner.errors import BadRequestError, NotPossibleError
from planner.specs.base import Dtype
from planner.specs.estimate import Performance
from planner.specs.model import ModelSpec
from planner.specs.workload import CompressWorkload
from planner.workload.inference_memory import usable_bytes
from planner.workload.outcome import Outcome
from planner.workload.setting import Setting, rates_of

GROUP = "compress"
SECOND_ORDER = frozenset({"gptq", "sparsegpt", "norm_tweaking", "quantease", "qmoe"})
CALIBRATED = SECOND_ORDER | {"awq", "fptq", "llm_pruner"}
DEFAULT_CALIBRATION_TOKENS = 128 * 2048
AWQ_GRID = 20
CALIBRATION_FORWARDS = 2  # once to collect inputs, once with the compressed layer
# Methods whose calibration runs another number of passes. Norm tweaking also trains the norms on
# the text once (forward and twice backward); LLM-Pruner takes gradients of it.
FORWARDS: dict[str, int] = {"awq": AWQ_GRID, "norm_tweaking": 5, "llm_pruner": 3}
# Coordinate descent goes over the columns again and again. Source: arXiv:2309.01885, section 5.
COLUMN_PASSES: dict[str, int] = {"quantease": 25}
# What structural pruning leaves. Source: arXiv:2305.11627, table 3.
KEPT_RATIO: dict[str, float] = {"llm_pruner": 0.8}
# Entropy-coded ternary experts; attention stays as it was. Source: arXiv:2310.16795, section 4.
QMOE_BYTES_PER_ELEMENT = 0.8 / 8
DTYPE_BY_METHOD: dict[str, Dtype] = {
    "int8_weight_only": "int8",
    "int4_weight_only": "int4",
    "nf4": "nf4",
    "gptq": "int4",
    "awq": "int4",
    "sparsegpt": "bf16",
    "fptq": "int4",
    "norm_tweaking": "int4",
    "finequant": "int4",
    "quantease": "int4",
    "qmoe": "ternary",
    "llm_pruner": "bf16",
}
DTYPE_BY_BITS: dict[int, Dtype] = {4: "int4", 8: "int8", 16: "bf16"}


@equation(
    "F = L · (2 · T · Σ in² + Σ in³ + Σ out · in²)",
    unit="FLOP",
    symbols={
        "num_layers": "L",
        "num_tokens": "T",
        "squared_inputs": "Σ in²",
        "cubed_inputs": "Σ in³",
        "update_products": "Σ out · in²",
    },
    source="Frantar et al. 2022 (GPTQ), arXiv:2210.17323, section 3",
)
def second_order_flops(
    *,
    num_layers: Quantity,
    num_tokens: Quantity,
    squared_inputs: Quantity,
    cubed_inputs: Quantity,
    update_products: Quantity,
) -> Quantity:
    """Return the FLOP of Hessians, their factorisation and the column updates."""
    return num_layers * (2 * num_tokens * squared_inputs + cubed_inputs + update_products)


@equation(
    "W_out = W_plain + n · B",
    unit="B",
    symbols={"plain_bytes": "W_plain", "parameters": "n", "bytes_per_element": "B"},
)
def written_bytes(
    *, plain_bytes: Quantity, parameters: Quantity, bytes_per_element: Quantity
) -> Quantity:
    """Return the bytes of the checkpoint that a compression writes."""
    return plain_bytes + parameters * bytes_per_element


def _untouched(setting: Setting, workload: CompressWorkload) -> float:
    """Return the linear weights that a method leaves as they are: all but experts for QMoE."""
    counts = setting.counts
    if workload.method != "qmoe":
        return 0.0
    if not setting.model.is_moe:
        raise NotPossibleError(
            f"method qmoe needs a sparse mixture-of-experts model: {setting.model.id} is dense",
            "workload.method",
        )
    return float(counts.layer_linear - counts.experts)


def target_dtype(workload: CompressWorkload) -> Dtype:
    """Return the dtype that the linear weights get.

    Raises:
        BadRequestError: no format has that many bits.
    """
    if workload.bits is None:
        return DTYPE_BY_METHOD[workload.method]
    if workload.bits not in DTYPE_BY_BITS:
        raise BadRequestError(
            f"bits is {workload.bits}: 4, 8 or 16 can be costed", "workload.bits"
        )
    return DTYPE_BY_BITS[workload.bits]


def matrices(model: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Return (inputs, outputs) of every linear weight of a dense layer."""
    hidden, ffn = model.hidden_size, model.intermediate_size or model.moe_intermediate_size
    query = model.num_attention_heads * model.head_dim
    key_value = model.num_key_value_heads * model.head_dim
    into_ffn = ((hidden, ffn),) * (2 if model.gated_mlp else 1)
    attention = ((hidden, query), (hidden, key_value), (hidden, key_value), (query, hidden))
    return (*attention, *into_ffn, (ffn, hidden))


def compress(setting: Setting, workload: CompressWorkload, ledger: Ledger) -> Outcome:
    """Return what compressing the model on one device costs."""
    counts, model = setting.counts, setting.model
    dtype = target_dtype(workload)
    group = workload.group_size or setting.strategy.group_size
    source = counts.total * setting.plain_element_bytes
    plain = (counts.total - counts.layer_linear) * setting.plain_element_bytes
    rest = _untouched(setting, workload)
    qmoe = workload.method == "qmoe"
    target = ledger.term(
        written_bytes,
        setting.line(GROUP, "Compressed checkpoint"),
        plain_bytes=plain + rest * setting.plain_element_bytes,
        parameters=(counts.layer_linear - rest) * KEPT_RATIO.get(workload.method, 1.0),
        bytes_per_element=QMOE_BYTES_PER_ELEMENT
        if qmoe
        else weight_bytes_per_element(dtype, group),
    )
    seconds = _times(setting, workload, ledger, source + target)
    total = sum(seconds.values())
    widest = max(inputs for inputs, _ in matrices(model))
    layer = counts.layer_linear / model.num_hidden_layers
    hessian = 4.0 * widest**2 if workload.method in SECOND_ORDER else 0.0
    tokens = _calibration_tokens(workload)
    kept = 2 * tokens * model.hidden_size * setting.activation_element_bytes
    memory = MemoryUse(
        stages=(
            StageMemory(
                {
                    "weights": source,
                    "activations": kept,
                    "buffers": hessian + layer * setting.plain_element_bytes,
                    "runtime_overhead": setting.engine.runtime_overhead_bytes
                    * setting.factor("memory"),
                }
            ),
        ),
        capacity_bytes=setting.device.memory_bytes,
        usable_bytes=usable_bytes(setting),
        disk_bytes=source + target,
    )
    return Outcome(
        memory=memory,
        fits=memory.fits,
        seconds_by_class=seconds,
        phases={GROUP: seconds},
        performance=Performance(duration_seconds=total),
    )


def _calibration_tokens(workload: CompressWorkload) -> int:
    if workload.method not in CALIBRATED:
        return 0
    return workload.calibration_tokens or DEFAULT_CALIBRATION_TOKENS


def _times(
    setting: Setting, workload: CompressWorkload, ledger: Ledger, moved: float
) -> dict[str, float]:
    rates = rates_of(setting)
    stream = ledger.term(
        memory_seconds,
        setting.line(GROUP, "Reading and writing weights", "memory_bandwidth", "stream"),
        moved_bytes=moved,
        memory_bytes_per_s=rates.memory_bytes_per_s,
        memory_efficiency=rates.stream_efficiency,
    )
    disk = ledger.term(
        transfer_seconds,
        setting.line(GROUP, "Disk", key="disk"),
        payload_bytes=moved,
        link_bytes_per_s=setting.disk_bytes_per_s,
    )
    compute = 0.0
    if workload.method in CALIBRATED:
        compute = ledger.term(
            compute_seconds,
            setting.line(GROUP, "Calibration and updates", "compute", "calibration"),
            work_flops=_work_flops(setting, workload, ledger),
            peak_flops_per_s=rates.peak_flops_per_s,
            compute_efficiency=rates.compute_efficiency,
        )
    return {"compute": compute, "memory_bandwidth": stream, "overhead": disk}


def _work_flops(setting: Setting, workload: CompressWorkload, ledger: Ledger) -> float:
    tokens = _calibration_tokens(workload)
    forwards = FORWARDS.get(workload.method, CALIBRATION_FORWARDS)
    work = forwards * ledger.term(
        matmul_flops,
        setting.line(GROUP, "One forward of the calibration text", key="forward_flops"),
        parameters=setting.counts.layer_linear,
        num_tokens=tokens,
    )
    if workload.method not in SECOND_ORDER:
        return work
    shapes = matrices(setting.model)
    return work + ledger.term(
        second_order_flops,
        setting.line(GROUP, "Hessians and column updates"),
        num_layers=setting.model.num_hidden_layers,
        num_tokens=tokens,
        squared_inputs=sum(inputs**2 for inputs in {i for i, _ in shapes}),
        cubed_inputs=sum(inputs**3 for inputs in {i for i, _ in shapes}),
        update_products=COLUMN_PASSES.get(workload.method, 1)
        * sum(outputs * inputs**2 for inputs, outputs in shapes),
    )
