"""Default formats of a strategy: those of the published checkpoint, else of the engine."""

from planner.catalog.engine_limits import UNITS_FROM, has_units, sixteen_bit_dtype
from planner.catalog.engines import Engine
from planner.catalog.packed import packed_format
from planner.cost.dtypes import SIXTEEN_BIT, WIDE, unquantised_dtype
from planner.specs.base import Dtype
from planner.specs.cluster import DeviceSpec
from planner.specs.estimate import EstimateRequest
from planner.specs.model import ModelSpec
from planner.specs.workload import TrainWorkload
from planner.workload.named_formats import FORMAT_BY_QUANTIZATION

EIGHT_BIT_FLOATS = frozenset(UNITS_FROM)


def as_published(request: EstimateRequest, model: ModelSpec, *, training: bool) -> EstimateRequest:
    """Return the request with the checkpoint's packed format if it names no format."""
    given, stored = request.strategy, model.quantization or ""
    if training or given.weight_dtype or given.quantization or ":" not in stored:
        return request
    strategy = given.model_copy(update={"quantization": stored})
    return request.model_copy(update={"strategy": strategy})


# Training methods with quantised base weights.
DTYPE_BY_TRAINING: dict[str, Dtype] = {"qlora": "nf4", "alphatuning": "int4", "qft": "int8"}


def is_stored_as(model: ModelSpec, weight: Dtype | None) -> bool:
    """Return whether a checkpoint is stored in a weight format; 16-bit formats are alike."""
    published = model.weight_dtype or "bf16"
    return weight == published or (weight in SIXTEEN_BIT and published in WIDE)


def default_weight_dtype(
    request: EstimateRequest, model: ModelSpec, engine: Engine, device: DeviceSpec
) -> Dtype:
    """Return the default weight dtype: by method, by quantisation, or as published.

    16-bit weights are loaded in the 16-bit dtype that the device has.
    """
    workload = request.workload
    if isinstance(workload, TrainWorkload):
        if workload.method in DTYPE_BY_TRAINING:
            return DTYPE_BY_TRAINING[workload.method]
        own_runner = engine.role == "runner" and workload.method in {"pretrain", "full"}
        if request.strategy.gradient_dtype in SIXTEEN_BIT:
            return request.strategy.gradient_dtype
        return "fp32" if own_runner else sixteen_bit_dtype(device)
    packed = packed_format(request.strategy.quantization)
    if packed is not None:
        return packed.nominal
    named = FORMAT_BY_QUANTIZATION.get(request.strategy.quantization or "")
    if named:
        return named[0]
    published = model.weight_dtype or "bf16"
    return sixteen_bit_dtype(device, published) if published in SIXTEEN_BIT else published


def default_activation_dtype(
    weight: Dtype, device: DeviceSpec, computed: Dtype | None = None
) -> Dtype:
    """Return the default activation dtype for a weight dtype on a device.

    ``computed`` is the dtype of the products that a named quantisation implies. 8-bit and 4-bit
    floats are computed in 16 bits by a GPU without their units.
    """
    plain = unquantised_dtype(weight)
    if plain in SIXTEEN_BIT and weight not in WIDE:
        plain = sixteen_bit_dtype(device)
    dtype = computed or (weight if weight in EIGHT_BIT_FLOATS else plain)
    if dtype in EIGHT_BIT_FLOATS and not has_units(dtype, device):
        return plain
    return plain if dtype in SIXTEEN_BIT else dtype


def default_kv(weight: Dtype, activation: Dtype, engine: Engine, device: DeviceSpec) -> Dtype:
    """Return the default KV-cache dtype for weight and activation dtypes."""
    if weight in EIGHT_BIT_FLOATS and engine.fp8_kv_cache_with_fp8_weights:
        return "fp8"
    return activation if activation in WIDE else sixteen_bit_dtype(device)
