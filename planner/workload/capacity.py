"""How many requests of a served workload memory holds at once."""

from collections.abc import Iterator
from functools import reduce

from planner.cost.columns import floor, maximum, minimum, where
from planner.cost.equation import Unrecorded
from planner.specs.workload import ServeWorkload
from planner.workload.inference_memory import Load, stage_limits, usable_bytes
from planner.workload.setting import Setting
from planner.workload.speculate import held_memory

# Launch scripts of published sweeps fill 0.95 of a device where weights alone take so much of it
# (InferenceX, benchmarks/single_node/fixed_seq_len/dsr1_fp8_b200.sh, 2026-08).
TIGHT_RATIO, RAISED_RATIO = 0.8, 0.95


def max_concurrency(setting: Setting, workload: ServeWorkload) -> float:
    """Return how many full-length requests one replica's memory holds at once."""
    return held_at_once(setting, workload)[0]


def held_at_once(setting: Setting, workload: ServeWorkload) -> tuple[float, float]:
    """Return how many full-length requests memory holds, usually and where weights are tight.

    Where weights leave little room, operators let an engine use more of the memory. A search
    asks twice of each setting: whether anything fits, and then what it costs.
    """
    if workload is not setting.workload:
        return _held(setting, workload)
    return setting.once("held_at_once", lambda: _held(setting, workload))


def _held(setting: Setting, workload: ServeWorkload) -> tuple[float, float]:
    usual, raised = zip(*room_by_stage(setting, workload), strict=True)
    most = maximum(0.0, floor(reduce(minimum, usual)))
    return most, where(most >= 1, floor(reduce(minimum, raised)), most)


def room_by_stage(setting: Setting, workload: ServeWorkload) -> Iterator[tuple[float, float]]:
    """Yield how many full-length requests each stage has room for, usually and where tight."""
    empty = held_memory(setting, Unrecorded(), load_of(setting, workload, 0.0)).stages
    one = held_memory(setting, Unrecorded(), load_of(setting, workload, 1.0)).stages
    alike = [(setting.device.memory_bytes, usable_bytes(setting))] * len(empty)
    limits = stage_limits(setting) or alike
    for without, with_one, (whole, usable) in zip(empty, one, limits, strict=True):
        filled = without.peak_bytes
        each = with_one.peak_bytes - filled
        tight = where(filled > TIGHT_RATIO * whole, maximum(usable, RAISED_RATIO * whole), usable)
        yield (usable - filled) / each, (tight - filled) / each


def places(setting: Setting, workload: ServeWorkload, held: float) -> float:
    """Return how many requests run at once where memory holds so many of full length.

    An engine that takes memory as answers grow holds requests of half an answer in the mean, as
    long as its callers wait for their answers before they call again.
    """
    if setting.engine.reserves_whole_requests:
        return held
    answer = workload.output_tokens
    grown = workload.input_tokens + answer
    return floor(held * grown / (grown - answer / 2))


def load_of(setting: Setting, workload: ServeWorkload, sequences: float) -> Load:
    """Return what a replica holds with so many full-length requests at once."""
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
