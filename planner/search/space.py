"""Every strategy worth costing for a request: what applies, within what is pinned."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from planner.catalog.engines import get_engine
from planner.specs.base import Dtype, JsonObject
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.model import ModelSpec
from planner.specs.plan import PlanRequest
from planner.specs.strategy import Strategy
from planner.specs.workload import CompressWorkload, TrainWorkload
from planner.techniques.case import Case
from planner.techniques.registry import get

MAX_TENSOR_RANKS = 16
MAX_MICRO_BATCH = 16
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


@dataclass(frozen=True)
class Question:
    """A plan request with its names looked up, on one of its clusters."""

    request: PlanRequest
    model: ModelSpec
    device: DeviceSpec
    cluster: ClusterSpec

    @property
    def case(self) -> Case:
        """Return what techniques are held against."""
        return Case(self.model, self.device, self.cluster, self.request.workload)


def candidates(question: Question) -> Iterator[Strategy]:
    """Yield every strategy to cost; pinned fields keep their pinned value."""
    workload = question.request.workload
    if isinstance(workload, TrainWorkload):
        fields = _training(question, workload)
    elif isinstance(workload, CompressWorkload):
        fields = iter(({},))
    else:
        fields = _inference(question)
    pinned = {name: value for name, value in question.request.pins if value is not None}
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
    training = isinstance(question.request.workload, TrainWorkload)
    if question.request.objective in FRUGAL and not training:
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


def _training(question: Question, workload: TrainWorkload) -> Iterator[JsonObject]:
    for layout in layouts(question):
        data = layout["data_parallel_size"]
        if workload.global_batch_size % data or not _stages_fit(question, layout):
            continue
        per_rank = workload.global_batch_size // data
        micros = [size for size in _powers_of_two(MAX_MICRO_BATCH) if per_rank % size == 0]
        for options in product(
            _zero_stages(layout), ("none", "full"), micros, _compute_dtypes(question)
        ):
            zero_stage, recomputation, micro, compute = options
            yield {
                **layout,
                "zero_stage": zero_stage,
                "activation_recomputation": recomputation,
                "micro_batch_size": micro,
                "compute_dtype": compute,
                "sequence_parallel": _sequence_parallel(question, layout),
            }


def _zero_stages(layout: JsonObject) -> tuple[int, ...]:
    if layout["data_parallel_size"] == 1:
        return (0,)
    # Sharded gradients and weights are gathered per micro-batch, which a pipeline multiplies.
    return (0, 1) if layout["pipeline_parallel_size"] > 1 else (0, 1, 2, 3)


def _compute_dtypes(question: Question) -> tuple[Dtype, ...]:
    has_bf16 = "bf16" in question.device.peak_flops_per_second
    if question.device.kind == "cpu":
        return ("fp32", "bf16") if has_bf16 else ("fp32",)
    return ("bf16",)


def _sequence_parallel(question: Question, layout: JsonObject) -> bool:
    applies = not get("sequence_parallel").reason_against(question.case)
    return applies and int(layout["tensor_parallel_size"]) > 1
