"""Batches that an engine with continuous batching queues, because memory holds a part of them."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from planner.cost.memory import MemoryUse, StageMemory
from planner.cost.quantity import Flag, Ledger, NullLedger, any_of, is_column, negate, where
from planner.specs.estimate import Performance
from planner.specs.workload import GenerateWorkload, ServeWorkload
from planner.workload.generate import batch_load, generate
from planner.workload.inference_memory import inference_memory
from planner.workload.outcome import Outcome
from planner.workload.serve import serve
from planner.workload.setting import Setting


def queues(setting: Setting) -> bool:
    """Return whether the engine schedules steps, so that it queues what memory does not hold.

    Offloaded batches are placed as a whole, and a stated micro-batch cuts the batch itself.
    """
    engine, strategy, workload = setting.engine, setting.strategy, setting.workload
    whole = strategy.offload or strategy.speculative or strategy.micro_batch_size
    whole = whole or (isinstance(workload, GenerateWorkload) and workload.at_once)
    return engine.role == "serving" and engine.max_batch_tokens > 0 and not whole


def answer_batch(setting: Setting, workload: GenerateWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of answering one batch: at once, or as a burst of requests.

    A burst is what such an engine makes of a batch larger than its memory: the first requests
    start, and each of the others follows when one ends.
    """
    if not queues(setting):
        return generate(setting, workload, ledger)
    fits = inference_memory(setting, NullLedger(), batch_load(setting, workload)).fits
    if not any_of(negate(fits)):
        return generate(setting, workload, ledger)
    if not is_column(fits):
        return _burst(setting, workload, ledger)
    return _either(
        fits, generate(setting, workload, ledger), _burst(setting, workload, NullLedger())
    )


def _burst(setting: Setting, workload: GenerateWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of a batch whose requests arrive all at once at a server."""
    size = workload.batch_size
    burst = ServeWorkload(
        input_tokens=workload.input_tokens,
        output_tokens=workload.output_tokens,
        burst_requests=size,
    )
    # The engine is told to take the batch at once.
    told = tuple(max(size, most) for most in setting.engine.default_max_requests)
    engine = setting.engine.model_copy(update={"default_max_requests": told})
    served = serve(replace(setting, workload=burst, engine=engine), burst, ledger)
    figures = served.performance
    rate = cast("float", figures.requests_per_second)
    performance = figures.model_copy(update={"latency_seconds": size / rate})
    queued = (
        f"memory holds {figures.max_concurrency} of the {size} prompts at once: "
        f"{setting.engine.title} queues the rest"
    )
    is_told = not is_column(rate) and served.fits
    return replace(served, performance=performance, warnings=(queued,) if is_told else ())


def _either(first: Flag, one: Outcome, other: Outcome) -> Outcome:
    """Return the figures of one outcome where ``first`` holds, else of another; columns.

    A figure that one of them lacks is NaN in its rows, which meets no limit.
    """

    def chosen(left: float | None, right: float | None) -> float | None:
        if left is None and right is None:
            return None
        return where(
            first, math.nan if left is None else left, math.nan if right is None else right
        )

    def classes(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
        names = {**left, **right}
        return {name: where(first, left.get(name, 0.0), right.get(name, 0.0)) for name in names}

    stages = tuple(
        StageMemory(classes(left.by_class, right.by_class))
        for left, right in zip(one.memory.stages, other.memory.stages, strict=True)
    )
    left, right = one.memory, other.memory
    memory: MemoryUse = replace(
        left,
        stages=stages,
        usable_bytes=where(first, left.usable_bytes, right.usable_bytes),
        host_bytes=where(first, left.host_bytes, right.host_bytes),
        disk_bytes=where(first, left.disk_bytes, right.disk_bytes),
    )
    names = Performance.model_fields
    performance = {
        name: chosen(getattr(one.performance, name, None), getattr(other.performance, name, None))
        for name in names
    }
    return Outcome(
        memory=memory,
        performance=Performance.model_construct(**performance),  # type: ignore[arg-type]  # columns
        seconds_by_class=classes(one.seconds_by_class, other.seconds_by_class),
        fits=where(first, 1.0, other.fits) > 0,
        phases={name: classes(one.phases[name], other.phases[name]) for name in one.phases},
        energy_tokens_per_second=chosen(
            one.energy_tokens_per_second, other.energy_tokens_per_second
        ),
    )
