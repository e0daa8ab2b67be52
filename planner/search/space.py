"""The formats of weights and activations that an engine runs on a device."""

from planner.catalog.engine_limits import refusal, serving_engine, sixteen_bit_dtype
from planner.catalog.engines import get_engine
from planner.cost.dtypes import SIXTEEN_BIT, WIDE
from planner.search.question import Question
from planner.specs.base import Dtype
from planner.workload.formats import default_activation_dtype

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
# Formats that need units of their own, without which nobody converts a checkpoint to them.
NEEDS_PEAK: frozenset[Dtype] = frozenset({"fp8", "nvfp4"})


def formats(question: Question) -> tuple[tuple[Dtype, Dtype], ...]:
    """Return the (weight, activation) formats that the engine and the devices support."""
    return tuple(pair for pair in candidate_formats(question) if not refused(question, pair))


def refused_formats(question: Question) -> dict[Dtype, str]:
    """Return why the engine refuses formats on these devices, by weight dtype."""
    return {
        pair[0]: reason
        for pair in candidate_formats(question)
        if (reason := refused(question, pair))
    }


def refused(question: Question, pair: tuple[Dtype, Dtype]) -> str | None:
    """Return why the engine refuses a pair of formats on one of the devices, None if it runs."""
    for device in question.devices:
        engine = get_engine(question.request.engine, device.kind)
        found = refusal(engine, device, question.model, (*pair, None))
        if found:
            return found.message
    return None


def candidate_formats(question: Question) -> tuple[tuple[Dtype, Dtype], ...]:
    """Return the formats that an engine of this kind may run, before the devices are asked."""
    device, model = question.device, question.model
    engine = get_engine(question.request.engine, device.kind)
    published = model.weight_dtype
    as_stored = serving_engine(engine.key).starts_as_stored
    if as_stored and published is not None and published not in WIDE:
        return ((published, _activation(published, question)),)
    offered = RUNNER_FORMATS if engine.role == "runner" else SERVING_FORMATS
    half = sixteen_bit_dtype(device, published)
    pairs = [
        (
            half if weight in SIXTEEN_BIT else weight,
            half if activation in SIXTEEN_BIT else activation,
        )
        for weight, activation in offered
        if weight not in NEEDS_PEAK
        or all(weight in each.peak_flops_per_second for each in question.devices)
    ]
    if engine.role == "runner" and device.kind == "cpu":
        pairs = [*FULL_PRECISION_CPU, *pairs]
    if published in NEEDS_PEAK and any(weight == published for weight, _ in pairs):
        return tuple(pair for pair in pairs if pair[0] == published)
    return tuple(pairs)


def _activation(weight: Dtype, question: Question) -> Dtype:
    """Return the activations of a stored format; those of the weakest device."""
    computed: Dtype | None = "int8" if weight == "int8" else None
    wanted = [default_activation_dtype(weight, device, computed) for device in question.devices]
    return next((dtype for dtype in wanted if dtype in WIDE), wanted[0])
