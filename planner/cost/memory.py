"""Peak memory of a device by tensor class, and whether it fits."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from planner.cost.columns import largest, where
from planner.specs.estimate import MemoryAnswer

CLASSES = (
    "weights",
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

    def answer(self) -> MemoryAnswer:
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
