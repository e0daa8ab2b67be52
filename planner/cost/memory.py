"""Peak memory of a device by tensor class, and the costs of offload."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from planner.cost.quantity import (
    Flag,
    Ledger,
    Line,
    Quantity,
    equation,
    largest,
    maximum,
    minimum,
    where,
)
from planner.specs.estimate import MemoryAnswer

CLASSES = (
    "weights",
    "reference_weights",
    "kv_cache",
    "activations",
    "gradients",
    "optimizer_states",
    "adapters",
    "buffers",
    "runtime_overhead",
)


@dataclass(frozen=True)
class StageMemory:
    """The peak bytes of a device of one pipeline stage, by tensor class."""

    by_class: dict[str, float]

    @property
    def peak_bytes(self) -> float:
        """Return the sum of all classes."""
        return sum(self.by_class.values())


def fullest_of(moments: Sequence[StageMemory]) -> StageMemory:
    """Return the moment with the highest peak, per row for columns."""
    return reduce(_fuller, moments)


def _fuller(left: StageMemory, right: StageMemory) -> StageMemory:
    fuller = right.peak_bytes > left.peak_bytes
    by_class = dict(left.by_class)
    for name in {**left.by_class, **right.by_class}:
        ours, theirs = left.by_class.get(name, 0.0), right.by_class.get(name, 0.0)
        if ours is not theirs:  # most classes are the same column at every moment
            by_class[name] = where(fuller, theirs, ours)
    return StageMemory(by_class)


@dataclass(frozen=True)
class MemoryUse:
    """The memory of all stages of a strategy and the limits of their devices.

    ``limits`` are the capacity and usable bytes of each stage if devices differ.
    """

    stages: tuple[StageMemory, ...]
    capacity_bytes: int
    usable_bytes: float
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    checkpoint_bytes: float = 0.0
    limits: tuple[tuple[int, float], ...] = ()

    @property
    def fullest(self) -> StageMemory:
        """Return the stage with the highest peak, relative to its limit if devices differ."""
        if self.limits:
            pairs = zip(self.stages, self.limits, strict=True)
            return max(pairs, key=lambda pair: pair[0].peak_bytes / pair[1][1])[0]
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def filled_ratio(self) -> float:
        """Return the peak of the fullest stage as a share of its usable memory."""
        if self.limits:
            pairs = zip(self.stages, self.limits, strict=True)
            return largest(stage.peak_bytes / usable for stage, (_, usable) in pairs)
        return self.peak_bytes / self.usable_bytes

    @property
    def peak_bytes(self) -> float:
        """Return the highest peak of any device."""
        if self.limits:
            most, peak = self.filled_ratio, 0.0
            for stage, (_, usable) in zip(self.stages, self.limits, strict=True):
                peak = where(stage.peak_bytes / usable >= most, stage.peak_bytes, peak)
            return peak
        return largest(stage.peak_bytes for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Return whether the fullest device stays within its usable memory."""
        if self.limits:
            return self.filled_ratio <= 1
        return self.peak_bytes <= self.usable_bytes

    def to_result(self) -> MemoryAnswer:
        """Return the figures for an estimate, without empty classes."""
        classes = self.fullest.by_class
        tightest = self.stages.index(self.fullest)
        capacity = self.limits[tightest][0] if self.limits else self.capacity_bytes
        return MemoryAnswer(
            per_device_peak_bytes=round(self.peak_bytes),
            capacity_bytes=capacity,
            breakdown_bytes={name: round(classes[name]) for name in CLASSES if classes.get(name)},
            per_stage_capacity_bytes=tuple(
                capacity_of_stage for capacity_of_stage, _ in self.limits
            )
            or None,
            per_stage_peak_bytes=tuple(round(stage.peak_bytes) for stage in self.stages),
            host_bytes=round(self.host_bytes) or None,
            disk_bytes=round(self.disk_bytes) or None,
            checkpoint_bytes=round(self.checkpoint_bytes) or None,
        )


# The cache while requests wait for memory: it has no room for another one.

ROUNDING = 1e-9  # of sums of bytes that must stay within a limit


@equation(
    "M_queue = r · M_cache",
    unit="B",
    symbols={"cache_bytes": "M_cache", "free_ratio": "r"},
    source="vllm-project/vllm, vllm/v1/core/sched/scheduler.py: waiting requests are scheduled "
    "until no block of the cache is free",
)
def queue_cache_bytes(*, cache_bytes: Quantity, free_ratio: Quantity) -> Quantity:
    """Return the cache that the next requests of a queue fill, beside that of whole requests.

    ``free_ratio`` is the memory that whole requests leave free on the fullest device, relative to
    their cache.
    """
    return cache_bytes * free_ratio


def with_queue(use: MemoryUse, waits: Flag, ledger: Ledger, line: Line) -> MemoryUse:
    """Return the memory with a cache that requests fill, where some ``waits`` for memory.

    Without this, a queue of longer requests would take less memory, because fewer whole ones fit.
    """
    usable = [limit for _, limit in use.limits] or [use.usable_bytes] * len(use.stages)
    free_ratio: float = 0.0  # or a column
    for at, (stage, limit) in enumerate(zip(use.stages, usable, strict=True)):
        cache = stage.by_class["kv_cache"]
        room = maximum(0.0, limit * (1 - ROUNDING) - stage.peak_bytes)
        ratio = where(cache > 0, room / where(cache > 0, cache, 1.0), 0.0)
        free_ratio = minimum(free_ratio, ratio) if at else ratio
    free_ratio = where(waits, free_ratio, 0.0)
    if ledger.records:
        cache = use.fullest.by_class["kv_cache"]
        ledger.term(queue_cache_bytes, line, cache_bytes=cache, free_ratio=free_ratio)
    stages = tuple(
        StageMemory({**each.by_class, "kv_cache": each.by_class["kv_cache"] * (1 + free_ratio)})
        for each in use.stages
    )
    return replace(use, stages=stages)


# Offload costs: overlap of memory tiers, expert cache hits, streaming buffers, host updates.
#
# Shares are of a tensor class's bytes; the rest is in device memory.


FLEXGEN = "Sheng et al. 2023 (FlexGen), arXiv:2303.06865, section 4"
MOE_CACHE = "Eliseev and Mazur 2023, arXiv:2312.17238, section 3"
ZERO_OFFLOAD = "Ren et al. 2021 (ZeRO-Offload), arXiv:2101.06840"
ZERO_INFINITY = "Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv:2104.07857"


@equation(
    "t = max(t_work, t_load, t_store, t_disk)",
    unit="s",
    symbols={
        "work_s": "t_work",
        "load_s": "t_load",
        "store_s": "t_store",
        "disk_s": "t_disk",
    },
    source=FLEXGEN,
)
def overlapped_seconds(
    *, work_s: Quantity, load_s: Quantity, store_s: Quantity, disk_s: Quantity
) -> Quantity:
    """Return the seconds of a pass whose computation overlaps with loads and stores."""
    return largest((work_s, load_s, store_s, disk_s))


@equation(
    "Q = D · a_d + E · a_e · (1 - h)",
    unit="B",
    symbols={
        "dense_bytes": "D",
        "dense_share": "a_d",
        "expert_bytes": "E",
        "expert_share": "a_e",
        "hit_ratio": "h",
    },
    source=MOE_CACHE,
)
def fetched_weight_bytes(
    *,
    dense_bytes: Quantity,
    dense_share: Quantity,
    expert_bytes: Quantity,
    expert_share: Quantity,
    hit_ratio: Quantity,
) -> Quantity:
    """Return the weight bytes that one pass fetches: dense weights and uncached experts.

    ``expert_bytes`` are those of the pass's routed experts; ``expert_share`` is 0 if all experts
    are on the device, else 1.
    """
    return dense_bytes * dense_share + expert_bytes * expert_share * (1 - hit_ratio)


@equation(
    "h = c^(1 - z)",
    unit="",
    symbols={"cached_share": "c", "skew_ratio": "z"},
    source=MOE_CACHE + "; cached experts are the most visited of a power law of skew z",
)
def expert_hit_ratio(*, cached_share: Quantity, skew_ratio: Quantity) -> Quantity:
    """Return the hit ratio of a device cache that holds a share of all experts.

    Without skew it equals the share; it rises with the skew of expert popularity.
    """
    return cached_share ** (1 - skew_ratio)


@equation(
    "a_e = min(1, a · (D + E) / E), a_d = (a · (D + E) - a_e · E) / D",
    unit="",
    symbols={"away_share": "a", "dense_bytes": "D", "expert_bytes": "E"},
    source="experts leave the device first: a token visits few of them",
)
def offloaded_dense_share(
    *, away_share: Quantity, dense_bytes: Quantity, expert_bytes: Quantity
) -> Quantity:
    """Return the offloaded share of the dense weights, after all experts are offloaded."""
    offloaded = away_share * (dense_bytes + expert_bytes)
    return maximum(0.0, offloaded - expert_bytes) / dense_bytes


@equation(
    "B = 2 · W / (2 · L) · a",
    unit="B",
    symbols={"weight_bytes": "W", "num_layers": "L", "away_share": "a"},
    source=FLEXGEN
    + ": half a layer, attention or feed-forward, works while the next half is loaded",
)
def double_buffer_bytes(
    *, weight_bytes: Quantity, num_layers: Quantity, away_share: Quantity
) -> Quantity:
    """Return the bytes of the device double buffer for streamed layers."""
    return 2 * weight_bytes / (2 * num_layers) * away_share


@equation(
    "t = k · t_batch",
    unit="s",
    symbols={"batches": "k", "batch_s": "t_batch"},
    source=FLEXGEN + ": a layer serves every batch of the block before the next is loaded",
)
def block_seconds(*, batches: Quantity, batch_s: Quantity) -> Quantity:
    """Return the seconds of all micro-batches per load of the weights."""
    return batches * batch_s


@equation(
    "t = n · B · r / (BW · e)",
    unit="s",
    symbols={
        "parameters": "n",
        "bytes_per_element": "B",
        "sharers": "r",
        "tier_bytes_per_s": "BW",
        "efficiency": "e",
    },
    source=ZERO_OFFLOAD + ", section 5: an update streams gradient, weight and states once",
)
def update_seconds(
    *,
    parameters: Quantity,
    bytes_per_element: Quantity,
    sharers: Quantity,
    tier_bytes_per_s: Quantity,
    efficiency: Quantity = 1.0,
) -> Quantity:
    """Return the seconds of an optimiser update in a memory tier shared by a node's ranks."""
    return parameters * bytes_per_element * sharers / (tier_bytes_per_s * efficiency)


@equation(
    "BW_link = min(BW_pcie, BW_host / r)",
    unit="B/s",
    symbols={"link_bytes_per_s": "BW_pcie", "tier_bytes_per_s": "BW_host", "sharers": "r"},
    source=ZERO_INFINITY + ", section 6: every rank fetches its own shard over its own link",
)
def shared_link_rate(
    *, link_bytes_per_s: Quantity, tier_bytes_per_s: Quantity, sharers: Quantity
) -> Quantity:
    """Return the bandwidth of one rank's host link while all ranks of the node use theirs."""
    return minimum(link_bytes_per_s, tier_bytes_per_s / sharers)


@equation(
    "A_dev = A · (1 - a) + a · 2 · A / L",
    unit="B",
    symbols={"kept_bytes": "A", "away_share": "a", "num_layers": "L"},
    source="one layer's activations leave while the next ones are made: two stay on the device",
)
def kept_on_device_bytes(
    *, kept_bytes: Quantity, away_share: Quantity, num_layers: Quantity
) -> Quantity:
    """Return the saved activation bytes on the device with a share of them offloaded."""
    return minimum(
        kept_bytes, kept_bytes * (1 - away_share) + away_share * 2 * kept_bytes / num_layers
    )


@equation(
    "G_dev = min(G, bucket)",
    unit="B",
    symbols={"gradient_bytes": "G", "bucket_bytes": "bucket"},
    source=ZERO_OFFLOAD + ", section 4: gradients leave bucket by bucket as they are made",
)
def gradient_bucket_bytes(*, gradient_bytes: Quantity, bucket_bytes: Quantity) -> Quantity:
    """Return the gradient bytes on the device when gradients are offloaded by bucket."""
    return minimum(gradient_bytes, bucket_bytes)
