"""Memory that a caching allocator reserves beyond its tensors and frees when memory is short.

Reserved memory exceeds the tensors because blocks of earlier shapes stay cached. Near the device's
limit they are freed and reallocated, so a run needs less memory than it usually reserves.
"""

from collections.abc import Mapping
from dataclasses import replace

from planner.catalog.engines import Engine
from planner.cost.columns import maximum, where
from planner.cost.memory import StageMemory
from planner.workload.inference_memory import usable_bytes
from planner.workload.setting import Setting

CONTEXT_BYTES = float(1024**3)
# Host memory of torch's profiler for one training step: 35 MiB for
# an empty step, 35 to 40 for one of six layers and two micro-batches (torch 2.13, 2026-11-23).
MESSAGES_LOOK_BYTES = 38.0 * 1024**2
# The upper bound of each engine field without spare blocks.
BARE = {
    "training_overhead_bytes": CONTEXT_BYTES,
    "unfilled_ratio": 0.0,
    "activation_ratio": 1.0,
    "quantised_activation_ratio": 1.0,
    "loss_ratio": 1.0,
    "quantised_loss_ratio": 1.0,
    "score_ratio": 1.0,
}


def training_overhead(engine: Engine, states_bytes: float) -> float:
    """Return the runtime's memory beyond tensors: context, communicators, unfilled blocks."""
    fitted = engine.training_overhead_bytes
    fixed = engine.runtime_overhead_bytes if fitted is None else fitted
    return fixed + engine.unfilled_ratio * states_bytes


def profiler_bytes(setting: Setting) -> float:
    """Return the profiler memory with which the runner's first rank records collectives.

    Only on CPUs: the profiler allocates host memory, which counts only if the device is a CPU.
    """
    if setting.engine.role != "runner" or setting.device.kind != "cpu":
        return 0.0
    return where(setting.layout.devices > 1, MESSAGES_LOOK_BYTES, 0.0)


def bare_fields(fields: Mapping[str, float]) -> dict[str, float]:
    """Return an engine's fields without memory that its allocator can free.

    >>> bare_fields({"loss_ratio": 3.0, "activation_ratio": 0.8, "update_copies": 1.0})
    {'loss_ratio': 1.0, 'activation_ratio': 0.8, 'update_copies': 1.0}
    """
    return {name: min(value, BARE.get(name, value)) for name, value in fields.items()}


def without_spare(setting: Setting) -> Setting:
    """Return the setting with an engine that holds only its tensors and context."""
    engine = setting.engine
    fields = {name: getattr(engine, name) for name in BARE}
    fitted = {name: value for name, value in fields.items() if value is not None}
    return replace(setting, engine=engine.model_copy(update=bare_fields(fitted)))


def given_back(setting: Setting, shown: StageMemory, bare: StageMemory) -> StageMemory:
    """Return the memory at a moment with spare blocks freed as far as needed."""
    spare = shown.peak_bytes - bare.peak_bytes
    needed = maximum(0.0, shown.peak_bytes - maximum(usable_bytes(setting), bare.peak_bytes))
    share = needed / where(spare > 0, spare, 1.0)
    by_class = {
        name: value + (bare.by_class.get(name, 0.0) - value) * share
        for name, value in shown.by_class.items()
    }
    return StageMemory(by_class)
