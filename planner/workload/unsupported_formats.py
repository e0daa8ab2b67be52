"""Refuse formats that an engine does not run, by the field that the request set.

A request sets few formats; the others follow from them (``planner/workload/resolve.py``). The
refusal names the one that the user can change, and the nearest value that works.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from planner.catalog.engine_limits import Refusal, refusal
from planner.catalog.engines import Engine
from planner.cost.dtypes import ELEMENT_BITS
from planner.errors import NotPossibleError, PlannerError
from planner.specs.cluster import DeviceSpec
from planner.specs.model import ModelSpec
from planner.specs.strategy import Strategy
from planner.workload.named_formats import FORMAT_BY_QUANTIZATION

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
