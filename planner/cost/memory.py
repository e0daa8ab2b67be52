"""What a device holds at its peak: the tensor classes of one stage, and whether they fit."""

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
    """The bytes that one pipeline stage's device holds at its peak, by tensor class."""

    by_class: dict[str, float]

    @property
    def peak_bytes(self) -> float:
        """Return the sum of all classes."""
        return sum(self.by_class.values())


def fullest_of(moments: Sequence[StageMemory]) -> StageMemory:
    """Return the moment with the highest peak; of columns, row by row."""
    return reduce(_fuller, moments)


def _fuller(left: StageMemory, right: StageMemory) -> StageMemory:
    fuller = right.peak_bytes > left.peak_bytes
    found = dict(left.by_class)
    for name in {**left.by_class, **right.by_class}:
        ours, theirs = left.by_class.get(name, 0.0), right.by_class.get(name, 0.0)
        if ours is not theirs:  # most classes are the same column at every moment
            found[name] = where(fuller, theirs, ours)
    return StageMemory(found)


@dataclass(frozen=True)
class MemoryUse:
    """All stages of one strategy against the budget of a device.

    ``limits`` are capacity and usable bytes of each stage where devices are unlike.
    """

    stages: tuple[StageMemory, ...]
    capacity_bytes: int
    usable_bytes: float
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    limits: tuple[tuple[int, float], ...] = ()

    @property
    def fullest(self) -> StageMemory:
        """Return the stage with the highest peak, of unlike devices for what it may hold."""
        if self.limits:
            pairs = zip(self.stages, self.limits, strict=True)
            return max(pairs, key=lambda pair: pair[0].peak_bytes / pair[1][1])[0]
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def filled_ratio(self) -> float:
        """Return the share of its usable memory that the fullest stage takes."""
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
        """Return the figures as a document; classes that do not occur are absent."""
        classes = self.fullest.by_class
        tightest = self.stages.index(self.fullest)
        capacity = self.limits[tightest][0] if self.limits else self.capacity_bytes
        return MemoryAnswer(
            per_device_peak_bytes=round(self.peak_bytes),
            capacity_bytes=capacity,
            breakdown_bytes={name: round(classes[name]) for name in CLASSES if classes.get(name)},
            per_stage_capacity_bytes=tuple(room for room, _ in self.limits) or None,
            per_stage_peak_bytes=tuple(round(stage.peak_bytes) for stage in self.stages),
            host_bytes=round(self.host_bytes) or None,
            disk_bytes=round(self.disk_bytes) or None,
        )
