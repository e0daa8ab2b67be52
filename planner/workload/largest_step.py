"""The step whose memory an engine sets aside: the current one, or the largest it may run."""

from typing import NamedTuple

from planner.cost.activations import FP32_BYTES, fused_experts_elements
from planner.cost.columns import ceil, maximum, minimum
from planner.specs.workload import ServeWorkload
from planner.workload.setting import Setting

GIB = 1024**3
# vLLM, vllm/engine/arg_utils.py (get_batch_defaults).
LARGE_MEMORY_BYTES, SMALL_STEP_CHIPS = 70 * GIB, frozenset({"a100"})


class Step(NamedTuple):
    """The sizes of a step: tokens, sampled tokens, logits of a sampled token."""

    tokens: float
    sampled: float
    vocabulary: float
    bytes_per_logit: float
    experts_elements: float = 0.0


def largest_step(setting: Setting, tokens: float, sampled: float) -> Step:
    """Return the step that memory is set aside for, at least one of these tokens.

    An engine that profiles a start runs as many tokens and requests as it may take at once. Its
    sampler has the whole vocabulary on each tensor rank.
    """
    model, layout, engine = setting.model, setting.layout, setting.engine
    wide = setting.activation_element_bytes + FP32_BYTES
    if not engine.reserves_largest_step:
        return Step(tokens, sampled, model.vocab_size / layout.tensor, wide)
    tokens = maximum(tokens, layout.batch_tokens)
    return Step(
        tokens,
        maximum(sampled, minimum(tokens, reserved_requests(setting))),
        model.vocab_size,
        engine.bytes_per_logit or wide,
        fused_experts_elements(model, layout.expert_group / layout.expert),
    )


def default_requests(setting: Setting) -> int:
    """Return the most requests of a rank that the engine takes unless told otherwise."""
    device = setting.device
    is_large = device.memory_bytes >= LARGE_MEMORY_BYTES
    is_large = is_large and device.id.split("-")[0] not in SMALL_STEP_CHIPS
    return setting.engine.reserved_requests[is_large]


def reserved_requests(setting: Setting) -> float:
    """Return the most requests of a rank: as many as are stated, else the engine's default."""
    workload, layout = setting.workload, setting.layout
    default = float(default_requests(setting))
    if isinstance(workload, ServeWorkload):
        stated = workload.concurrency
    else:
        stated = getattr(workload, "batch_size", None)
    if stated is None:
        return default
    return minimum(default, ceil(stated / (layout.data * layout.attention_data)))
