"""The number of concurrent requests of a serving workload that fit in memory."""

from collections.abc import Iterator
from functools import reduce

from planner.cost.columns import floor, maximum, minimum, where
from planner.cost.equation import Unrecorded
from planner.specs.workload import ServeWorkload
from planner.workload.inference_memory import Load, stage_limits, usable_bytes
from planner.workload.setting import Setting
from planner.workload.speculate import held_memory

# Launch scripts of published sweeps fill 0.95 of a device if weights alone exceed TIGHT_RATIO
# (InferenceX, benchmarks/single_node/fixed_seq_len/dsr1_fp8_b200.sh, 2026-08).
TIGHT_RATIO, RAISED_RATIO = 0.8, 0.95


def max_concurrency(setting: Setting, workload: ServeWorkload) -> float:
    """Return the number of full-length requests that fit in one replica's memory."""
    return held_at_once(setting, workload)[0]


def held_at_once(setting: Setting, workload: ServeWorkload) -> tuple[float, float]:
    """Return the full-length requests that fit, usually and with a raised memory limit.

    The limit is raised if weights leave little memory. The result is cached, because a search
    needs it twice per setting: to check the fit and to cost it.
    """
    if workload is not setting.workload:
        return _held(setting, workload)
    return setting.once("held_at_once", lambda: _held(setting, workload))


def _held(setting: Setting, workload: ServeWorkload) -> tuple[float, float]:
    usual, raised = zip(*room_by_stage(setting, workload), strict=True)
    most = maximum(0.0, floor(reduce(minimum, usual)))
    return most, where(most >= 1, floor(reduce(minimum, raised)), most)


def room_by_stage(setting: Setting, workload: ServeWorkload) -> Iterator[tuple[float, float]]:
    """Yield the full-length requests that fit on each stage, usually and with a raised limit."""
    empty = held_memory(setting, Unrecorded(), load_of(setting, workload, 0.0)).stages
    one = held_memory(setting, Unrecorded(), load_of(setting, workload, 1.0)).stages
    uniform = [(setting.device.memory_bytes, usable_bytes(setting))] * len(empty)
    limits = stage_limits(setting) or uniform
    for without, with_one, (whole, usable) in zip(empty, one, limits, strict=True):
        filled = without.peak_bytes
        request_bytes = with_one.peak_bytes - filled
        tight = where(filled > TIGHT_RATIO * whole, maximum(usable, RAISED_RATIO * whole), usable)
        yield (usable - filled) / request_bytes, (tight - filled) / request_bytes


def places(setting: Setting, workload: ServeWorkload, held: float) -> float:
    """Return the concurrency where ``held`` full-length requests fit in memory.

    In a closed loop, an engine that allocates KV cache as outputs grow holds half an output per
    request on average.
    """
    if setting.engine.reserves_whole_requests:
        return held
    answer = workload.output_tokens
    full_tokens = workload.input_tokens + answer
    return floor(held * full_tokens / (full_tokens - answer / 2))


def load_of(setting: Setting, workload: ServeWorkload, sequences: float) -> Load:
    """Return the memory load of a replica with ``sequences`` full-length requests."""
    prompt = workload.input_tokens
    budget = where(setting.layout.batch_tokens > 0, setting.layout.batch_tokens, prompt)
    sequences = sequences / setting.layout.attention_data
    return Load(
        sequences=sequences,
        tokens_per_sequence=prompt + workload.output_tokens,
        step_tokens=minimum(budget, maximum(prompt, sequences)),
        sampled_tokens=maximum(1.0, sequences),
        paged=setting.engine.role == "serving",
        shared_tokens=prompt * workload.prefix_share_ratio,
    )
