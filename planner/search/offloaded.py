"""Candidates of the search whose weights, cache or activations lie partly off the device.

They are offered where a request describes the host beside the card, and where nothing of a weight
format fits on the devices alone: what fits there is faster there.
"""

from collections.abc import Iterator, Sequence

from planner.catalog.engines import Engine, get_engine
from planner.search.block import Block
from planner.search.placement import SHARES, placed_strategy
from planner.search.question import Question
from planner.specs.base import JsonObject
from planner.specs.strategy import Strategy
from planner.specs.workload import GenerateWorkload

FORMAT = ("weight_dtype", "activation_dtype", "quantization", "kv_cache_dtype")
# Engines that keep caches off the device run a block of micro-batches layer by layer.
MICRO = frozenset({"kv_cpu"})
ON_DISK = frozenset({"weights_disk", "kv_disk"})
WEIGHTS_ALONE = ("weights_cpu",)
# What each serving engine can keep off the device; runners stream anything, block by block.
BY_ENGINE: dict[str, tuple[str, ...]] = {
    "flexgen": SHARES,
    "deepspeed_zero_inference": ("weights_cpu", "weights_disk", "kv_cpu"),
    "vllm": WEIGHTS_ALONE,
    "sglang": WEIGHTS_ALONE,
}


def shares_of(engine: Engine) -> tuple[str, ...]:
    """Return what an engine can keep off the device."""
    if engine.role == "runner":
        return SHARES
    return BY_ENGINE.get(engine.key, WEIGHTS_ALONE if engine.computes_on_host else ())


def offloaded(question: Question, blocks: Sequence[tuple[Block, bool]]) -> Iterator[Strategy]:
    """Yield the best placement of each weight format of which nothing fits on the devices.

    ``blocks`` come with whether any of their strategies fits.
    """
    shares, workload = _possible(question), question.request.workload
    if not shares or not isinstance(workload, GenerateWorkload):
        return
    fits: dict[tuple[object, ...], bool] = {}
    shared: dict[tuple[object, ...], JsonObject] = {}
    for block, fitting in blocks:
        key = tuple(block.shared.get(name) for name in FORMAT)
        fits[key] = fits.get(key, False) or fitting
        shared.setdefault(key, block.shared)
    for key, fitting in fits.items():
        if not fitting:
            yield from _placed(question, shared[key], shares, workload.batch_size)


def _possible(question: Question) -> tuple[str, ...]:
    """Return the shares that may leave: to a host and to a disk that the request describes."""
    cluster, device = question.cluster, question.device
    pinned = question.pinned.get("offload") or question.pinned.get("pipeline_parallel_size", 1) > 1
    if device.kind != "gpu" or not cluster.host_memory_bytes or pinned:
        return ()
    shares = shares_of(get_engine(question.request.engine, question.device.kind))
    return tuple(s for s in shares if s not in ON_DISK or cluster.disk_capacity_bytes)


def _placed(
    question: Question, shared: JsonObject, shares: tuple[str, ...], batch: int
) -> Iterator[Strategy]:
    """Yield the placement of one format, a replica on every device where the batch allows."""
    devices = question.cluster.num_devices
    spread = devices if batch % devices == 0 else 1
    replicas = question.pinned.get("data_parallel_size") or spread
    base = {**shared, **question.pinned, "pipeline_parallel_size": 1}
    strategy = Strategy.model_validate({**base, "data_parallel_size": replicas})
    if set(shares) >= MICRO or strategy.micro_batch_size:
        yield from _found(question, strategy, shares)
        return
    whole = strategy.model_copy(update={"micro_batch_size": batch // replicas})
    for placed in _found(question, whole, shares):
        yield placed.model_copy(update={"micro_batch_size": None})  # these split no batch


def _found(question: Question, strategy: Strategy, shares: tuple[str, ...]) -> Iterator[Strategy]:
    found = placed_strategy(question.estimate_request(strategy), shares)
    if found is not None:
        yield found
