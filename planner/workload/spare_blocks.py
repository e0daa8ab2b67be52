"""What a caching allocator keeps beyond its tensors, and gives back before it runs out.

Tools that print what the allocator reserved print more than their tensors take: blocks of earlier
shapes stay. Near the device's limit they are freed and asked for anew, so that a run needs less
than it would otherwise show.
"""

from collections.abc import Mapping
from dataclasses import replace

from planner.catalog.engines import Engine
from planner.cost.columns import maximum, where
from planner.cost.memory import StageMemory
from planner.workload.inference_memory import usable_bytes
from planner.workload.setting import Setting

CONTEXT_BYTES = float(1024**3)
# What torch's profiler took of a processor's memory to look at one step of a training: 35 MiB for
# an empty step, 35 to 40 for one of six layers and two micro-batches (torch 2.13, 2026-11-23).
MESSAGES_LOOK_BYTES = 38.0 * 1024**2
# What each figure of an engine is at most where no spare block is left.
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
    """Return what the runtime holds beside tensors: context, communicators, unfilled blocks."""
    fitted = engine.training_overhead_bytes
    fixed = engine.runtime_overhead_bytes if fitted is None else fitted
    return fixed + engine.unfilled_ratio * states_bytes


def messages_look_bytes(setting: Setting) -> float:
    """Return what our runner's first rank takes once to see the messages of a step.

    On processors alone: the profiler's own memory is the host's, and of GPUs only they are full.
    """
    if setting.engine.role != "runner" or setting.device.kind != "cpu":
        return 0.0
    return where(setting.layout.devices > 1, MESSAGES_LOOK_BYTES, 0.0)


def bare_fields(fields: Mapping[str, float]) -> dict[str, float]:
    """Return an engine's fields without what its allocator may give back.

    >>> bare_fields({"loss_ratio": 3.0, "activation_ratio": 0.8, "update_copies": 1.0})
    {'loss_ratio': 1.0, 'activation_ratio': 0.8, 'update_copies': 1.0}
    """
    return {name: min(value, BARE.get(name, value)) for name, value in fields.items()}


def without_spare(setting: Setting) -> Setting:
    """Return the setting with an engine that holds its tensors and its context alone."""
    engine = setting.engine
    told = {name: getattr(engine, name) for name in BARE}
    known = {name: value for name, value in told.items() if value is not None}
    return replace(setting, engine=engine.model_copy(update=bare_fields(known)))


def given_back(setting: Setting, shown: StageMemory, bare: StageMemory) -> StageMemory:
    """Return a moment whose spare blocks are given back as far as the device needs them."""
    spare = shown.peak_bytes - bare.peak_bytes
    needed = maximum(0.0, shown.peak_bytes - maximum(usable_bytes(setting), bare.peak_bytes))
    share = needed / where(spare > 0, spare, 1.0)
    kept = {
        name: value + (bare.by_class.get(name, 0.0) - value) * share
        for name, value in shown.by_class.items()
    }
    return StageMemory(kept)
