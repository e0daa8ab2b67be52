"""Search candidates that offload part of the weights, cache or activations.

They are generated only if the request describes the host of the GPU, and only for weight formats
of which nothing fits on the devices alone: a strategy that fits is faster without offloading.
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
# Engines that offload caches run a block of micro-batches layer by layer.
MICRO = frozenset({"kv_cpu"})
ON_DISK = frozenset({"weights_disk", "kv_disk"})
WEIGHTS_ALONE = ("weights_cpu",)
# Shares that each serving engine can offload; runners stream any of them, block by block.
BY_ENGINE: dict[str, tuple[str, ...]] = {
    "flexgen": SHARES,
    "deepspeed_zero_inference": ("weights_cpu", "weights_disk", "kv_cpu"),
    "vllm": WEIGHTS_ALONE,
    "sglang": WEIGHTS_ALONE,
}


def shares_of(engine: Engine) -> tuple[str, ...]:
    """Return the shares that an engine can offload."""
    if engine.role == "runner":
        return SHARES
    return BY_ENGINE.get(engine.key, WEIGHTS_ALONE if engine.computes_on_host else ())


def offloaded(question: Question, blocks: Sequence[tuple[Block, bool]]) -> Iterator[Strategy]:
    """Yield the best placement of each weight format of which nothing fits on the devices.

    ``blocks`` are pairs of a block and whether any of its strategies fits.
    """
    shares, workload = _offloadable_shares(question), question.request.workload
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
            yield from _placements_of_format(question, shared[key], shares, workload.batch_size)


def _offloadable_shares(question: Question) -> tuple[str, ...]:
    """Return the shares that can move to the described host and disk."""
    cluster, device = question.cluster, question.device
    pinned = question.pinned.get("offload") or question.pinned.get("pipeline_parallel_size", 1) > 1
    if device.kind != "gpu" or not cluster.host_memory_bytes or pinned:
        return ()
    shares = shares_of(get_engine(question.request.engine, question.device.kind))
    return tuple(s for s in shares if s not in ON_DISK or cluster.disk_capacity_bytes)


def _placements_of_format(
    question: Question, shared: JsonObject, shares: tuple[str, ...], batch: int
) -> Iterator[Strategy]:
    """Yield the placement of one format, one replica per device if the batch divides."""
    devices = question.cluster.num_devices
    spread = devices if batch % devices == 0 else 1
    replicas = question.pinned.get("data_parallel_size") or spread
    base = {**shared, **question.pinned, "pipeline_parallel_size": 1}
    strategy = Strategy.model_validate({**base, "data_parallel_size": replicas})
    if set(shares) >= MICRO or strategy.micro_batch_size:
        yield from _placement(question, strategy, shares)
        return
    whole_batch = strategy.model_copy(update={"micro_batch_size": batch // replicas})
    for placed in _placement(question, whole_batch, shares):
        yield placed.model_copy(update={"micro_batch_size": None})  # these engines split no batch


def _placement(
    question: Question, strategy: Strategy, shares: tuple[str, ...]
) -> Iterator[Strategy]:
    placed = placed_strategy(question.estimate_request(strategy), shares)
    if placed is not None:
        yield placed
