"""Formats of a strategy: named, default, and those that an engine does not run."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from planner.catalog.engine_limits import (
    UNITS_FROM,
    Refusal,
    has_units,
    refusal,
    sixteen_bit_dtype,
)
from planner.catalog.engines import Engine
from planner.catalog.gguf import packed_format
from planner.cost.weights import ELEMENT_BITS, SIXTEEN_BIT, WIDE, unquantised_dtype
from planner.errors import NotPossibleError, PlannerError
from planner.specs.base import Dtype
from planner.specs.cluster import DeviceSpec
from planner.specs.estimate import EstimateRequest
from planner.specs.model import ModelSpec
from planner.specs.workload import Strategy, TrainWorkload

# Storage and compute formats and group sizes of named quantisations.


RUNNER_INT4_GROUP = 64
USUAL_GROUP = 128
# Default storage and compute dtypes by quantisation.
FORMAT_BY_QUANTIZATION: dict[str, tuple[Dtype, Dtype]] = {
    "gptq": ("int4", "bf16"),
    "awq": ("int4", "bf16"),
    "nf4": ("nf4", "bf16"),
    "bnb.nf4": ("nf4", "bf16"),
    "w4a16": ("int4", "bf16"),
    "w4a8": ("int4", "int8"),
    "fptq": ("int4", "int8"),
    "finequant": ("int4", "bf16"),
    "quantease": ("int4", "bf16"),
    "qat": ("int4", "bf16"),
    "w8a16": ("int8", "bf16"),
    "w8a8": ("int8", "int8"),
    "fp8": ("fp8", "fp8"),
    "nvfp4": ("nvfp4", "nvfp4"),
}
# Published checkpoints of these methods have groups of 128 on every engine.
GROUPS_OF_128 = frozenset({"gptq", "awq"})


def default_group(given: Strategy, model: ModelSpec, weight: Dtype, engine: Engine) -> int | None:
    """Return the default group size: the number of weights per scale."""
    if model.group_size and weight == model.weight_dtype:
        return model.group_size
    if given.quantization in GROUPS_OF_128 and weight in {"int4", "int8"}:
        return USUAL_GROUP
    if weight in {"int4", "nf4"}:
        runner = engine.role == "runner" or weight == "nf4"
        return RUNNER_INT4_GROUP if runner else USUAL_GROUP
    return None


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


# Refuse formats that an engine does not run, by the field that the request set.
#
# A request sets few formats; the others follow from them (``planner/workload/resolve.py``). The
# refusal names the one that the user can change, and the nearest value that works.


# Fields that a format follows from if the request does not set it, the nearest first.
FOLLOWS_FROM = {
    "activation_dtype": ("quantization", "weight_dtype"),
    "compute_dtype": ("weight_dtype",),
    "weight_dtype": ("quantization",),
    "kv_cache_dtype": ("activation_dtype", "quantization", "weight_dtype"),
}
SIXTEEN_BITS_UP = ("bf16", "fp16", "fp32")
# What a field can be set to; activations and caches are 16-bit wherever all else is refused.
CANDIDATES: dict[str, tuple[str, ...]] = {
    "weight_dtype": (*SIXTEEN_BITS_UP, "fp8", "int8", "int4", "nvfp4", "mxfp4", "nf4"),
    "activation_dtype": SIXTEEN_BITS_UP,
    "compute_dtype": SIXTEEN_BITS_UP,
    "kv_cache_dtype": SIXTEEN_BITS_UP,
    "quantization": tuple(FORMAT_BY_QUANTIZATION),
}


class RequestedFormats(NamedTuple):
    """The formats as a request gives them, all of them, and how the others follow from some."""

    given: Strategy
    filled: Strategy
    fill: Callable[[Strategy], Strategy]
    training: bool = False


def refuse_unsupported(
    engine: Engine, model: ModelSpec, devices: Iterable[DeviceSpec], request: RequestedFormats
) -> None:
    """Reject formats that the engine refuses on any of the devices.

    Raises:
        NotPossibleError: names the field that the request set, its value, the engine, the device
            and the nearest value that works.
    """
    kinds = tuple(devices)
    found = _refusal(engine, model, kinds, request, request.filled)
    if found is None:
        return
    name = found.field.rpartition(".")[2]
    if request.training and name == "activation_dtype":
        name = "compute_dtype"  # of whose operands the products of a training step are
    chosen = _chosen(request.given, name)
    if chosen is None or chosen not in CANDIDATES:
        raise NotPossibleError(found.message, found.field)
    value = str(getattr(request.given, chosen))
    nearest = None
    if value in CANDIDATES[chosen]:
        nearest = _nearest(engine, model, kinds, request, chosen)
    subject = f"{chosen} is {value}"
    if chosen != name and value != found.value:
        subject += f", so that {name} is {found.value}"
    way_out = f"the nearest that works is {nearest}" if nearest else found.instead
    raise NotPossibleError(
        f"{subject}, {found.by}: {found.reason}; {way_out}", f"strategy.{chosen}"
    )


def _refusal(
    engine: Engine,
    model: ModelSpec,
    devices: Iterable[DeviceSpec],
    request: RequestedFormats,
    strategy: Strategy,
) -> Refusal | None:
    activation = strategy.compute_dtype if request.training else strategy.activation_dtype
    formats = (strategy.weight_dtype or "bf16", activation or "bf16", strategy.kv_cache_dtype)
    own = strategy.quantization == model.quantization
    named = None if own else strategy.quantization
    refusals = (refusal(engine, device, model, formats, named) for device in devices)
    return next((found for found in refusals if found is not None), None)


def _chosen(given: Strategy, name: str) -> str | None:
    """Return the field of the request that decides a format, None if it sets none."""
    fields = (name, *FOLLOWS_FROM.get(name, ()))
    return next((field for field in fields if getattr(given, field, None) is not None), None)


def _nearest(
    engine: Engine,
    model: ModelSpec,
    devices: Iterable[DeviceSpec],
    request: RequestedFormats,
    field: str,
) -> str | None:
    """Return the value nearest in bits with which the engine takes the request, None if none."""
    value = str(getattr(request.given, field))

    def works(other: str) -> bool:
        changed = request.given.model_copy(update={field: other})
        try:
            return _refusal(engine, model, devices, request, request.fill(changed)) is None
        except PlannerError:
            return False

    others = (other for other in CANDIDATES[field] if other != value)
    ordered = sorted(others, key=lambda other: abs(_bits(other) - _bits(value)))
    return next(filter(works, ordered), None)


def _bits(name: str) -> float:
    """Return the bits of a weight in a dtype or a named quantisation, 16 if it is not known."""
    dtype = FORMAT_BY_QUANTIZATION[name][0] if name in FORMAT_BY_QUANTIZATION else name
    return next((bits for known, bits in ELEMENT_BITS.items() if known == dtype), 16.0)
