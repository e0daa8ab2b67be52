"""Every way to serve or generate that is worth costing, within what is pinned."""

from collections.abc import Iterator
from itertools import product

from planner.catalog.engines import get_engine
from planner.search.question import Question
from planner.specs.base import Dtype, JsonObject
from planner.specs.strategy import Strategy
from planner.specs.workload import CompressWorkload
from planner.techniques.registry import get

MAX_TENSOR_RANKS = 16
FRUGAL = frozenset({"cost", "energy", "memory"})
# (weights, activations) that each kind of engine really runs.
RUNNER_FORMATS: tuple[tuple[Dtype, Dtype], ...] = (
    ("bf16", "bf16"),
    ("int8", "bf16"),
    ("int4", "bf16"),
)
SERVING_FORMATS: tuple[tuple[Dtype, Dtype], ...] = (
    ("bf16", "bf16"),
    ("fp8", "fp8"),
    ("int8", "int8"),
    ("int4", "bf16"),
    ("nvfp4", "nvfp4"),
)
FULL_PRECISION_CPU: tuple[tuple[Dtype, Dtype], ...] = (("fp32", "fp32"),)
NEEDS_PEAK: frozenset[Dtype] = frozenset({"fp8", "nvfp4"})


def candidates(question: Question) -> Iterator[Strategy]:
    """Yield every strategy to cost; pinned fields keep their pinned value."""
    if isinstance(question.request.workload, CompressWorkload):
        fields: Iterator[JsonObject] = iter(({},))
    else:
        fields = _inference(question)
    pinned = question.pinned
    seen = set()
    for chosen in fields:
        strategy = Strategy.model_validate({**chosen, **pinned})
        identity = strategy.model_dump_json()
        if identity not in seen and _keeps_pins(chosen, pinned):
            seen.add(identity)
            yield strategy


def _keeps_pins(chosen: JsonObject, pinned: JsonObject) -> bool:
    """Return whether the layout still multiplies up when some of its sizes are pinned."""
    sizes = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    return all(chosen.get(size) == pinned[size] for size in sizes if size in pinned)


def formats(question: Question) -> tuple[tuple[Dtype, Dtype], ...]:
    """Return the weight and activation formats that the engine and the device can run."""
    device = question.device
    role = get_engine(question.request.engine, device.kind).role
    offered = RUNNER_FORMATS if role == "runner" else SERVING_FORMATS
    if role == "runner" and device.kind == "cpu":
        offered = (*FULL_PRECISION_CPU, *offered)
    published = question.model.weight_dtype
    runnable = tuple(
        (weight, activation)
        for weight, activation in offered
        if weight not in NEEDS_PEAK or weight in device.peak_flops_per_second
    )
    if published in NEEDS_PEAK and any(weight == published for weight, _ in runnable):
        runnable = tuple(pair for pair in runnable if pair[0] == published)
    return runnable


def layouts(question: Question) -> Iterator[JsonObject]:
    """Yield the data, tensor and pipeline sizes that use the cluster's devices."""
    devices = question.cluster.num_devices
    counts = {devices}
    if question.request.objective in FRUGAL:
        counts |= set(_powers_of_two(devices))
    for used in sorted(counts, reverse=True):
        for tensor, pipeline in product(_tensor_sizes(question), _divisors(used)):
            if used % (tensor * pipeline) == 0:
                yield {
                    "data_parallel_size": used // (tensor * pipeline),
                    "tensor_parallel_size": tensor,
                    "pipeline_parallel_size": pipeline,
                }


def _powers_of_two(limit: int) -> Iterator[int]:
    size = 1
    while size <= limit:
        yield size
        size *= 2


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, min(number, 64) + 1) if number % size == 0]


def _tensor_sizes(question: Question) -> list[int]:
    if get("tensor_parallel").reason_against(question.case):
        return [1]
    model, node = question.model, question.cluster.devices_per_node
    return [
        size
        for size in range(1, min(node, MAX_TENSOR_RANKS) + 1)
        if model.num_attention_heads % size == 0
        and max(model.num_key_value_heads, size) % min(model.num_key_value_heads, size) == 0
    ]


def _inference(question: Question) -> Iterator[JsonObject]:
    serving = get_engine(question.request.engine, question.device.kind).role == "serving"
    for (weight, activation), layout in product(formats(question), layouts(question)):
        if not _stages_fit(question, layout):
            continue
        base = {"weight_dtype": weight, "activation_dtype": activation, **layout}
        if question.model.is_moe and layout["tensor_parallel_size"] > 1:
            base["expert_parallel_size"] = layout["tensor_parallel_size"]
        yield base
        if serving and "fp8" in question.device.peak_flops_per_second:
            yield {**base, "kv_cache_dtype": "fp8"}


def _stages_fit(question: Question, layout: JsonObject) -> bool:
    stages = layout["pipeline_parallel_size"]
    if stages == 1:
        return True
    too_many = stages > question.model.num_hidden_layers
    return not (too_many or get("pipeline_parallel").reason_against(question.case))
