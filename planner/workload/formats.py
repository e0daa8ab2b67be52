"""Default formats of a strategy: those of the published checkpoint, else of the engine."""

from planner.catalog.engines import Engine
from planner.catalog.packed import packed_format
from planner.cost.dtypes import SIXTEEN_BIT, WIDE, unquantised_dtype
from planner.specs.base import Dtype
from planner.specs.estimate import EstimateRequest
from planner.specs.model import ModelSpec
from planner.specs.workload import TrainWorkload
from planner.workload.named_formats import FORMAT_BY_QUANTIZATION

EIGHT_BIT_FLOATS = {"fp8", "nvfp4"}


def as_published(request: EstimateRequest, model: ModelSpec, *, training: bool) -> EstimateRequest:
    """Return the request with the checkpoint's packed format if it names no format."""
    given, stored = request.strategy, model.quantization or ""
    if training or given.weight_dtype or given.quantization or ":" not in stored:
        return request
    strategy = given.model_copy(update={"quantization": stored})
    return request.model_copy(update={"strategy": strategy})


# Training methods with quantised base weights.
DTYPE_BY_TRAINING: dict[str, Dtype] = {"qlora": "nf4", "alphatuning": "int4", "qft": "int8"}


def default_weight_dtype(request: EstimateRequest, model: ModelSpec, engine: Engine) -> Dtype:
    """Return the default weight dtype: by method, by quantisation, or as published."""
    workload = request.workload
    if isinstance(workload, TrainWorkload):
        if workload.method in DTYPE_BY_TRAINING:
            return DTYPE_BY_TRAINING[workload.method]
        own_runner = engine.role == "runner" and workload.method in {"pretrain", "full"}
        if request.strategy.gradient_dtype in SIXTEEN_BIT:
            return request.strategy.gradient_dtype
        return "fp32" if own_runner else "bf16"
    packed = packed_format(request.strategy.quantization)
    if packed is not None:
        return packed.nominal
    named = FORMAT_BY_QUANTIZATION.get(request.strategy.quantization or "")
    return named[0] if named else model.weight_dtype or "bf16"


def default_activation_dtype(weight: Dtype) -> Dtype:
    """Return the default activation dtype for a weight dtype."""
    if weight in EIGHT_BIT_FLOATS:
        return weight
    return unquantised_dtype(weight)


def default_kv(weight: Dtype, activation: Dtype, engine: Engine) -> Dtype:
    """Return the default KV-cache dtype for weight and activation dtypes."""
    if weight in {"fp8", "nvfp4"} and engine.fp8_kv_cache_with_fp8_weights:
        return "fp8"
    return activation if activation in WIDE else "bf16"
