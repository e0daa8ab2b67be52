"""The formats of weights and activations that an engine runs on a device."""

from planner.catalog.engines import get_engine
from planner.search.question import Question
from planner.specs.base import Dtype

MAX_TENSOR_RANKS = 16
FRUGAL = frozenset({"cost", "energy", "memory"})
# (weights, activations) that each kind of engine supports.
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


def formats(question: Question) -> tuple[tuple[Dtype, Dtype], ...]:
    """Return the (weight, activation) formats that the engine and the device support."""
    device = question.device
    role = get_engine(question.request.engine, device.kind).role
    offered = RUNNER_FORMATS if role == "runner" else SERVING_FORMATS
    if role == "runner" and device.kind == "cpu":
        offered = (*FULL_PRECISION_CPU, *offered)
    published = question.model.weight_dtype
    runnable = tuple(
        (weight, activation)
        for weight, activation in offered
        if weight not in NEEDS_PEAK
        or all(weight in each.peak_flops_per_second for each in question.devices)
    )
    if published in NEEDS_PEAK and any(weight == published for weight, _ in runnable):
        runnable = tuple(pair for pair in runnable if pair[0] == published)
    return runnable
