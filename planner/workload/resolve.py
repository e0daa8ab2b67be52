"""Resolve a request: model, cluster, and the formats of weights, cache and activations."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from planner.catalog.engines import (
    DEFAULT_ENGINE,
    PREFERENCE_ENGINE,
    UNITS_FROM,
    Engine,
    Refusal,
    get_engine,
    has_units,
    refusal,
    serving_engine,
    sixteen_bit_dtype,
    training_engine,
)
from planner.catalog.gguf import packed_format
from planner.catalog.models import get_model, model_from_config
from planner.catalog.reading import nearest_names
from planner.cost.column import single
from planner.cost.parameters import count_parameters
from planner.cost.weights import ELEMENT_BITS, SIXTEEN_BIT, WIDE, reason_against, unquantised_dtype
from planner.specs.base import (
    BadRequestError,
    Dtype,
    NotCoveredError,
    NotPossibleError,
    PlannerError,
)
from planner.specs.cluster import DeviceSpec
from planner.specs.estimate import EstimateRequest
from planner.specs.model import ModelSpec
from planner.specs.workload import (
    CompressWorkload,
    OffloadSpec,
    Strategy,
    TrainWorkload,
    Workload,
)
from planner.workload.cluster import cluster_warnings, resolve_cluster, resolve_device
from planner.workload.layouts import (
    Layout,
    attention_rules,
    batch_rules,
    check_rules,
    layout_of,
    shard_width_rules,
    training_rules,
    weight_blocks,
)
from planner.workload.option_rules import option_rules
from planner.workload.preference import as_trained
from planner.workload.rollouts import refuse_unsupported_rollout, rollout_warnings, with_rollout
from planner.workload.setting import Setting, compute_dtype_of, emulates_narrow_products
from planner.workload.teacher import refuse_unlike_teacher
from planner.workload.training_memory import optimizer_of

# ---------------------------------------------------------------------------
# Formats of a strategy: named, default, and those that an engine does not run.
# ---------------------------------------------------------------------------


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


def with_published_format(
    request: EstimateRequest, model: ModelSpec, *, training: bool
) -> EstimateRequest:
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
    if isinstance(request.workload, TrainWorkload):
        return _default_training_dtype(request, request.workload, model, engine, device)
    packed = packed_format(request.strategy.quantization)
    if packed is not None:
        return packed.nominal
    named = FORMAT_BY_QUANTIZATION.get(request.strategy.quantization or "")
    if named:
        return named[0]
    published = model.weight_dtype or "bf16"
    return sixteen_bit_dtype(device, published) if published in SIXTEEN_BIT else published


def _default_training_dtype(
    request: EstimateRequest,
    workload: TrainWorkload,
    model: ModelSpec,
    engine: Engine,
    device: DeviceSpec,
) -> Dtype:
    """Return the default dtype of trained weights, or of the frozen ones beside adapters."""
    if workload.method in DTYPE_BY_TRAINING:
        return DTYPE_BY_TRAINING[workload.method]
    if request.strategy.gradient_dtype in SIXTEEN_BIT:
        return request.strategy.gradient_dtype
    trains_all = engine.role == "runner" and workload.method in {"pretrain", "full"}
    stored = model.weight_dtype or "bf16"
    if trains_all and engine.loads_as_stored and workload.method == "full" and stored != "fp32":
        return sixteen_bit_dtype(device, stored)
    return "fp32" if trains_all else sixteen_bit_dtype(device)


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
    refusal = _refusal(engine, model, kinds, request, request.filled)
    if refusal is None:
        return
    name = refusal.field.rpartition(".")[2]
    if request.training and name == "activation_dtype":
        name = "compute_dtype"  # of whose operands the products of a training step are
    fields = (name, *FOLLOWS_FROM.get(name, ()))
    stated = (field for field in fields if getattr(request.given, field, None) is not None)
    chosen = next(stated, None)
    if chosen is None or chosen not in CANDIDATES:
        raise NotPossibleError(refusal.message, refusal.field)
    value = str(getattr(request.given, chosen))
    nearest = None
    if value in CANDIDATES[chosen] and not serving_engine(engine.key).loads_gguf_alone:
        nearest = _nearest_format(engine, model, kinds, request, chosen)
    subject = f"{chosen} is {value}"
    if chosen != name and value != refusal.value:
        subject += f", so that {name} is {refusal.value}"
    way_out = f"the nearest that works is {nearest}" if nearest else refusal.instead
    raise NotPossibleError(
        f"{subject}, {refusal.by}: {refusal.reason}; {way_out}", f"strategy.{chosen}"
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


def _nearest_format(
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


# ---------------------------------------------------------------------------
# Resolve a request to a setting: look up names, fill defaults, reject contradictions.
# ---------------------------------------------------------------------------


# The share of memory that a serving engine is started with.


# Widths of integers that published checkpoints of a method have beside its usual one.
OTHER_WIDTHS: dict[str, frozenset[Dtype]] = {
    "gptq": frozenset({"int8"}),
    "awq": frozenset({"int8"}),
    "nf4": frozenset({"int4"}),
    "bnb.nf4": frozenset({"int4"}),
}


def refuse_contradicting_formats(strategy: Strategy) -> None:
    """Reject stored weights that are not those of the named quantisation.

    Raises:
        NotPossibleError: names both fields, and the dtype that the quantisation stores.
    """
    name, weight = strategy.quantization or "", strategy.weight_dtype
    if weight is None or name not in FORMAT_BY_QUANTIZATION:
        return
    stored = FORMAT_BY_QUANTIZATION[name][0]
    if weight != stored and weight not in OTHER_WIDTHS.get(name, frozenset()):
        raise NotPossibleError(
            f"weight_dtype is {weight}, but quantization is {name}, whose weights are {stored}: "
            "leave one of them out; a dtype of 16 bits beside a quantization is that of its "
            "activations",
            "strategy.weight_dtype",
        )


def refuse_unused_quantization(
    strategy: Strategy, workload: TrainWorkload, model: ModelSpec
) -> None:
    """Reject a quantisation of a training whose method keeps wide weights.

    The model's own is its checkpoint's; ``qat`` rounds wide weights in each step.

    Raises:
        NotPossibleError: names the quantisation, the method, and those that train over codes.
    """
    name = strategy.quantization
    if workload.method in DTYPE_BY_TRAINING or name in {None, "qat", model.quantization}:
        return
    raise NotPossibleError(
        f"quantization is {name}, and the method {workload.method} trains over weights of 16 or "
        "32 bits, so that it would change nothing: leave it out, or choose a method that trains "
        f"over quantised ones ({', '.join(DTYPE_BY_TRAINING)}); compute_dtype is the format of "
        "the products",
        "strategy.quantization",
    )


def refuse_memory_share(strategy: Strategy, engine: Engine) -> None:
    """Reject a share of memory for an engine that takes what it needs.

    Raises:
        NotCoveredError: the engine has no such option.
    """
    share = strategy.gpu_memory_utilization
    if share is not None and engine.memory_utilisation >= 1:
        raise NotCoveredError(
            f"gpu_memory_utilization is {share:g}: {engine.title} has no such option, it "
            "allocates what it needs; leave it out",
            "strategy.gpu_memory_utilization",
        )


def refuse_recv_interval(strategy: Strategy, engine: Engine) -> None:
    """Reject an interval of looks for new requests for an engine that looks before each step.

    Raises:
        NotCoveredError: the engine has no such option.
    """
    interval = strategy.scheduler_recv_interval
    if interval is not None and not engine.has_recv_interval:
        raise NotCoveredError(
            f"scheduler_recv_interval is {interval}: {engine.title} has no such option, it looks "
            "for new requests before every step; leave it out, or choose engine sglang",
            "strategy.scheduler_recv_interval",
        )


# Strategy fields that only serving supports.
REQUESTS_ONLY = {
    "speculative": "speculative decoding",
    "disaggregated": "prefill and decode on different devices",
}
# Strategy fields that only one kind of workload supports, with what they set.
SERVING_ONLY = {
    "sparsity": "sparse weights, which inference and compression use",
    "attention_data_parallel_size": "data-parallel attention, which inference uses",
    "gpu_memory_utilization": "the memory of a serving engine",
    "scheduler_recv_interval": "when a serving engine looks for new requests",
}
TRAINING_ONLY = {
    "virtual_pipeline_size": "interleaved pipelines, which training uses",
    "zero_shard_size": "sharded states, which training uses",
    "checkpoint_writing": "checkpoints, which training writes",
}
# Engines count ranks differently: the resolved layout replaces the requested values.
LAYOUT_FIELDS = ("data_parallel_size", "tensor_parallel_size", "attention_data_parallel_size")
BF16_FROM = 8.0  # CUDA compute capability
SOLVER_ROUNDING = 1e-9


INFERENCE_OFFLOAD = {"kv_cpu": 0.0, "kv_disk": 0.0, "weights_active_ratio": None}
TRAINING_OFFLOAD = {"optimizer": "none"}
# The same tensors on disk; activations have no place there.
ON_DISK = {
    "weights_cpu": "offload.weights_disk",
    "kv_cpu": "offload.kv_disk",
    "optimizer": "offload.optimizer to nvme",
}
HOST_OFFLOAD = ("weights_cpu", "kv_cpu", "optimizer", "activations_cpu")


def resolve_model(model: str | ModelSpec | dict[str, Any]) -> ModelSpec:
    """Return the model of a request, given by catalog id, explicit fields or config.

    Raises:
        UnknownModelError: the catalog has no such id.
        BadConfigError: the config lacks a field, or its family is unknown.
    """
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, str):
        return get_model(model)
    return model_from_config(model, str(model.get("_name_or_path") or "custom"))


def _refuse_encoder(model: ModelSpec, *, training: bool) -> None:
    """Reject serving, generation and compression of an encoder model.

    Raises:
        BadRequestError: the model is an encoder and the workload is not training.
    """
    if model.is_encoder and not training:
        raise BadRequestError(
            f"{model.id} is an encoder with a head for {model.num_labels} classes "
            f"(model_type {model.model_type}), which is trained and predicts no text: choose to "
            "fine-tune it, or a decoder",
            "model",
        )


def _refuse_objective(workload: TrainWorkload, given: Strategy, engine: Engine) -> None:
    """Reject an objective that the engine has no trainer for, and rows that its trainer has not.

    Raises:
        NotPossibleError: names the field and what works.
    """
    if not workload.compares:
        return
    runs = engine.trains_on_policy if workload.generates else engine.compares_answers
    runs = engine.distils if workload.is_distilled else runs
    if not runs:
        known = ["supervised"]
        known += ["dpo", "kto", "orpo", "reward"] if engine.compares_answers else []
        known += ["grpo"] if engine.trains_on_policy else []
        raise NotPossibleError(
            f"objective is {workload.objective}: {engine.title.partition(',')[0]} trains "
            f"{' and '.join(known)} alone; set engine to {PREFERENCE_ENGINE}, or leave it out",
            "engine",
        )
    if given.packed:
        raise NotPossibleError(
            f"packed is true: {engine.title} gives each answer of {workload.objective} a row of "
            "its own; leave it out",
            "strategy.packed",
        )


def resolve(request: EstimateRequest, *, leaves_layout_open: bool = False) -> Setting:
    """Return the setting of a request: names resolved, defaults filled in.

    With ``leaves_layout_open`` the options that an engine ties to its layout are not checked: a
    search has them as rules of the layouts that it tries.

    Raises:
        PlannerError: a name is unknown, or the strategy contradicts the model or the cluster.
    """
    cluster = resolve_cluster(request.cluster)
    request = request.model_copy(update={"cluster": cluster})
    device = resolve_device(cluster.device)
    training = isinstance(request.workload, TrainWorkload)
    compares = isinstance(request.workload, TrainWorkload) and request.workload.compares
    named = training_engine(request.engine, compares=compares)
    engine = get_engine(named, device.kind, training=training)
    engine = with_device_overhead(engine, device, training=training)
    if isinstance(request.workload, TrainWorkload):
        _refuse_objective(request.workload, request.strategy, engine)
    model = as_trained(_in_engine(resolve_model(request.model), engine), request.workload)
    _refuse_encoder(model, training=training)
    if isinstance(request.workload, TrainWorkload):
        refuse_unlike_teacher(model, request.workload)
    request = with_rollout(request, device)
    refuse_unsupported_rollout(request, engine)
    given = request.strategy
    request = with_published_format(request, model, training=training)
    refuse_unmodelled_fields(request.strategy, training=training)
    _refuse_serving_only(request)
    refuse_memory_share(request.strategy, engine)
    refuse_recv_interval(request.strategy, engine)
    if isinstance(request.workload, TrainWorkload):
        refuse_unused_quantization(request.strategy, request.workload, model)
    else:
        refuse_contradicting_formats(request.strategy)
    layout = layout_of(request, model, engine)
    strategy = _filled_strategy(request, model, engine, layout)
    devices = (device, *(resolve_device(group.device) for group in cluster.other_nodes))
    if strategy.offload is not None:
        _refuse_offload(strategy.offload, request.workload, engine, devices)

    def fill(changed: Strategy) -> Strategy:
        published = with_published_format(
            request.model_copy(update={"strategy": changed}), model, training=training
        )
        return _filled_strategy(published, model, engine, layout)

    refuse_unsupported(engine, model, devices, RequestedFormats(given, strategy, fill, training))
    if not training:
        blocks = weight_blocks(model, strategy)
        check_rules(shard_width_rules(model, engine, layout, blocks, device))
    refuse_beyond_context(request, model, engine)
    layout = filled_layout(layout, strategy)
    if isinstance(request.workload, TrainWorkload):
        schedule = strategy.pipeline_schedule
        check_rules(training_rules(model, request.workload, layout, schedule))
    check_rules(attention_rules(strategy.attention, engine, device, layout, training=training))
    if not leaves_layout_open:
        check_rules(option_rules(model, request.workload, engine, strategy, layout))
    setting = Setting(
        model=model,
        counts=count_parameters(model),
        device=device,
        cluster=cluster,
        workload=request.workload,
        engine=engine,
        strategy=strategy,
        layout=layout,
        host_calibration=request.host_calibration,
    )
    _warn(setting, request)
    return setting


def _in_engine(model: ModelSpec, engine: Engine) -> ModelSpec:
    """Return the model as the engine stores it; some engines untie the output head.

    GGUF files hold the language model: the encoders are a file of their own (mmproj).
    """
    if serving_engine(engine.key).loads_gguf_alone and model.tower_parameters:
        note = "the GGUF file of its encoders (mmproj) is not counted"
        note = f"{model.note}; {note}" if model.note else note
        return model.model_copy(update={"tower_parameters": 0, "note": note})
    if engine.unties_embeddings and model.tie_word_embeddings:
        return model.model_copy(update={"tie_word_embeddings": False})
    return model


def with_device_overhead(engine: Engine, device: DeviceSpec, *, training: bool) -> Engine:
    """Return the engine with the device's measured overhead in place of the default."""
    if device.architecture in engine.fp8_kv_cache_architectures:
        engine = engine.model_copy(update={"fp8_kv_cache_with_fp8_weights": True})
    overhead_bytes = device.runtime_overhead_bytes
    if overhead_bytes is None or engine.role != "runner":
        return engine
    if training:
        overhead_bytes += device.training_overhead_bytes or 0
    return engine.model_copy(update={"runtime_overhead_bytes": overhead_bytes})


def check_offload_shares(offload: OffloadSpec) -> None:
    """Reject offload shares of one tensor class that sum to more than 1.

    Raises:
        NotPossibleError: names the shares.
    """
    for cpu, disk in (("weights_cpu", "weights_disk"), ("kv_cpu", "kv_disk")):
        both = getattr(offload, cpu) + getattr(offload, disk)
        if both > 1 + SOLVER_ROUNDING:
            raise NotPossibleError(
                f"{cpu} and {disk} sum to {both:g}: the shares of one class are at most 1",
                f"strategy.offload.{disk}",
            )


BIT_WIDTHS = re.compile(r"w\d+(a\d+)?")  # formats that exist, whether there is a formula or not


def refuse_unmodelled_fields(strategy: Strategy, *, training: bool = False) -> None:
    """Reject strategy fields that the planner has no formula for.

    Raises:
        NotCoveredError: names the field.
        BadRequestError: the quantisation is unknown.
    """
    for name, title in (SERVING_ONLY if training else TRAINING_ONLY).items():
        if _is_set(strategy, name):
            raise NotCoveredError(
                f"{name} is {getattr(strategy, name)!r}: it sets {title}; leave it out",
                f"strategy.{name}",
            )
    supported = {None, *FORMAT_BY_QUANTIZATION}
    named = strategy.quantization
    if named not in supported and packed_format(named) is None:
        names = nearest_names(named or "", FORMAT_BY_QUANTIZATION)
        nearest = f" (nearest: {names[0]})" if names else ""
        choices = (
            f"choose among {', '.join(FORMAT_BY_QUANTIZATION)}, gguf:q4_k_m and its like, or give "
            "weight_dtype"
        )
        kind = NotCoveredError if BIT_WIDTHS.fullmatch(named or "") else BadRequestError
        raise kind(
            f"quantization {named!r} cannot be costed yet{nearest}: {choices}",
            "strategy.quantization",
        )
    if strategy.offload is not None:
        check_offload_shares(strategy.offload)
        _refuse_other_offload(strategy.offload, training=training)


def _refuse_other_offload(offload: OffloadSpec, *, training: bool) -> None:
    """Reject offload fields without effect on this kind of workload."""
    for name, default in (INFERENCE_OFFLOAD if training else TRAINING_OFFLOAD).items():
        if getattr(offload, name) != default:
            where = "when training, which has no cache and reads all weights"
            where = where if training else "without training"
            reset = "" if default is None else f"set it to {default!r}, or "
            raise NotCoveredError(
                f"offload.{name} is {getattr(offload, name)!r}: it is not costed {where}; "
                f"{reset}leave it out",
                f"strategy.offload.{name}",
            )


def _refuse_offload(
    offload: OffloadSpec, workload: Workload, engine: Engine, devices: Iterable[DeviceSpec]
) -> None:
    """Reject offload to a place, or of states, that the devices or the trainer do not have.

    Raises:
        NotPossibleError: names the field, its value and what works.
    """
    to_host = {
        name: getattr(offload, name)
        for name in HOST_OFFLOAD
        if getattr(offload, name) not in (0.0, "none", "nvme")
    }
    processor = next((device for device in devices if device.kind == "cpu"), None)
    if to_host and processor is not None:
        name, value = next(iter(to_host.items()))
        elsewhere = f"set {ON_DISK[name]}, or " if name in ON_DISK else ""
        raise NotPossibleError(
            f"offload.{name} is {value!r}: {processor.name} is a CPU, which computes from the "
            f"host's memory already; {elsewhere}leave it out",
            f"strategy.offload.{name}",
        )
    if engine.key != DEFAULT_ENGINE or not isinstance(workload, TrainWorkload):
        return
    if offload.optimizer != "none" and optimizer_of(workload) != "adamw":
        raise NotPossibleError(
            f"offload.optimizer is {offload.optimizer!r}: Slipway's trainer moves the two moments "
            f"of adamw, and the optimizer is {optimizer_of(workload)}; choose adamw, or leave it "
            "out",
            "strategy.offload.optimizer",
        )


def _refuse_serving_only(request: EstimateRequest) -> None:
    kind = request.workload.kind
    for name, title in REQUESTS_ONLY.items():
        if kind != "serve" and _is_set(request.strategy, name):
            raise NotCoveredError(
                f"{name}: {title} is costed for workload.kind serve, this is {kind}; leave it out",
                f"strategy.{name}",
            )


def _is_set(strategy: Strategy, name: str) -> bool:
    """Return whether a field differs from its neutral values."""
    return getattr(strategy, name) not in (None, 1, 0.0)


def filled_layout(layout: Layout, strategy: Strategy) -> Layout:
    """Return the layout with the batching and sharding fields of the filled strategy."""
    return replace(
        layout,
        micro_batch=strategy.micro_batch_size or 1,
        micro_batches=strategy.gradient_accumulation_steps or 1,
        chunks=strategy.virtual_pipeline_size or 1,
        zero_stage=strategy.zero_stage or 0,
        sequence_parallel=bool(strategy.sequence_parallel),
        shard=strategy.zero_shard_size or 0,
        batch_tokens=strategy.max_batch_tokens or 0,
        chunked=bool(strategy.chunked_prefill),
    )


def _filled_strategy(
    request: EstimateRequest, model: ModelSpec, engine: Engine, layout: Layout
) -> Strategy:
    given = request.strategy
    training = isinstance(request.workload, TrainWorkload)
    device = resolve_device(request.cluster.device)
    weight = given.weight_dtype or default_weight_dtype(request, model, engine, device)
    _, computed = FORMAT_BY_QUANTIZATION.get(given.quantization or "", (None, None))
    activation = given.activation_dtype or default_activation_dtype(weight, device, computed)
    fields: dict[str, object] = {
        "weight_dtype": weight,
        "activation_dtype": activation,
        "group_size": given.group_size or default_group(given, model, weight, engine),
        "data_parallel_size": layout.data,
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
    }
    if model.is_moe:
        fields["expert_parallel_size"] = layout.expert
    if layout.attention_data > 1:
        fields["attention_data_parallel_size"] = layout.attention_data
    if training:
        fields |= _training_defaults(request, engine, layout, weight)
    elif not isinstance(request.workload, CompressWorkload):
        fields["kv_cache_dtype"] = given.kv_cache_dtype or default_kv(
            weight, activation, engine, device
        )
        fields["max_batch_tokens"] = given.max_batch_tokens or engine.max_batch_tokens or None
        fields["attention"] = given.attention or "flash"
    explicit = given.stated
    explicit |= {name: size for name, size in fields.items() if name in LAYOUT_FIELDS}
    return Strategy.model_validate({**fields, **explicit})


def refuse_beyond_context(request: EstimateRequest, model: ModelSpec, engine: Engine) -> None:
    """Reject requests beyond the model's context if the engine refuses to start with them.

    Raises:
        NotPossibleError: names the tokens, the context and a way out.
    """
    longest, context = request.workload.longest_tokens, model.max_position_embeddings
    is_training = isinstance(request.workload, TrainWorkload)
    is_bound = serving_engine(engine.key).bound_to_context
    if is_training or longest <= context or not is_bound:
        return
    raise NotPossibleError(
        f"{longest} tokens of one request exceed the context of {context} that the config of "
        f"{model.id} gives, and {engine.title} refuses to start with more: shorten the request, "
        "or stretch the context with rope_scaling",
        "workload.input_tokens",
    )


def default_zero_stage(strategy: Strategy) -> int:
    """Return the default ZeRO stage: offloaded states must be sharded."""
    offload = strategy.offload or OffloadSpec()
    if offload.weights_cpu or offload.weights_disk:
        return 3
    return 2 if offload.optimizer != "none" else 0


def _training_defaults(
    request: EstimateRequest, engine: Engine, layout: Layout, weight: Dtype
) -> dict[str, object]:
    workload, given = request.workload, request.strategy
    if not isinstance(workload, TrainWorkload):
        raise BadRequestError("training defaults are for workload.kind train", "workload.kind")
    per_rank = workload.global_batch_size // layout.data
    accumulation = given.gradient_accumulation_steps
    default_micro = per_rank if engine.role == "runner" else 1
    micro = given.micro_batch_size or (per_rank // accumulation if accumulation else default_micro)
    check_rules(batch_rules(workload, layout.data, micro))
    steps = per_rank // micro
    if accumulation and accumulation != steps:
        raise NotPossibleError(
            f"gradient_accumulation_steps is {accumulation}, but {per_rank} sequences a "
            f"rank at micro_batch_size {micro} make {steps}: set global_batch_size to "
            f"{micro * accumulation * layout.data}, or leave gradient_accumulation_steps out",
            "strategy.gradient_accumulation_steps",
        )
    half = sixteen_bit_dtype(resolve_device(request.cluster.device))
    plain_dtype = weight if weight in WIDE else half
    return {
        "compute_dtype": given.compute_dtype
        or (half if weight != "fp32" or engine.autocasts else "fp32"),
        "activation_dtype": given.activation_dtype or given.compute_dtype or plain_dtype,
        "zero_stage": (default_zero_stage(given) or engine.zero_stage)
        if given.zero_stage is None
        else given.zero_stage,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": steps,
        "pipeline_schedule": given.pipeline_schedule or ("1f1b" if layout.pipeline > 1 else None),
        "activation_recomputation": given.activation_recomputation or engine.recomputation,
        "attention": given.attention or "flash",
        "fused_norms": not (engine.wide_norms or engine.ops_per_layer),
        "sequence_parallel": engine.sequence_parallel and layout.tensor > 1,
        "optimizer_dtype": given.optimizer_dtype or "fp32",
        "gradient_dtype": given.gradient_dtype
        or ("int8" if workload.method == "qft" else engine.gradient_dtype or plain_dtype),
    }


def _kernel_warnings(setting: Setting) -> Iterator[str]:
    """Yield warnings about the kernels of a training job."""
    computed = compute_dtype_of(setting)
    if emulates_narrow_products(setting.engine, setting.device, computed):
        yield (
            f"products in {computed} are emulated: {setting.device.name or setting.device.id} has "
            "no units for them, so that operands are rounded and multiplied in fp32, which is "
            "slower than bf16"
        )
    capability = setting.device.compute_capability
    if computed == "bf16" and capability is not None and capability < BF16_FROM:
        yield (
            f"products in bf16 are emulated: {setting.device.name or setting.device.id} has no "
            "units for them; set compute_dtype to fp16 or fp32, which its units compute"
        )
    if setting.strategy.attention == "flex":
        yield (
            "attention is flex (FlexAttention), which no machine of ours has been measured with: "
            "the blocks that it computes are costed at the rate of flash kernels"
        )


def _warn(setting: Setting, request: EstimateRequest) -> None:
    add = setting.warnings.append
    setting.warnings.extend(cluster_warnings(setting))
    if setting.engine.is_generic:
        add(
            f"engine {setting.engine.key} has no figures of its own: the generic figures of "
            f"{setting.engine.role} engines are used, with wider intervals"
        )
    sparsity = request.strategy.sparsity
    reason = reason_against(sparsity, setting.engine.key, setting.device) if sparsity else ""
    if reason:
        add(f"sparsity {sparsity:g} saves neither time nor memory here: {reason}")
    setting.warnings.extend(_kernel_warnings(setting))
    setting.warnings.extend(rollout_warnings(setting))
    offload = request.strategy.offload
    if offload is not None and setting.offload != offload:
        add(
            f"{setting.device.name or setting.device.id} has the host's own memory: nothing moves "
            "by offloading to it; offload to disk, or leave strategy.offload out"
        )
    if setting.model.note:
        add(setting.model.note)
    unused = request.cluster.num_devices - single(setting.devices_in_use)
    if unused:
        add(f"{unused} of {request.cluster.num_devices} devices stay unused")
    if request.engine and not request.strategy.kv_cache_dtype and setting.strategy.kv_cache_dtype:
        add(
            f"engine flags unknown: the defaults of {setting.engine.title} are assumed, "
            f"KV cache in {setting.strategy.kv_cache_dtype}"
        )
    longest = request.workload.longest_tokens
    if longest > setting.model.max_position_embeddings:
        add(
            f"{longest} tokens exceed the model's context of "
            f"{setting.model.max_position_embeddings}"
        )
