"""The result of costing a workload, before it becomes an estimate."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.cost.columns import is_column
from planner.cost.memory import MemoryUse
from planner.specs.estimate import Performance

BOUND_NAMES = ("compute", "memory_bandwidth", "communication", "overhead")


def performance_of(**figures: float | None) -> Performance:
    """Return a Performance; columns are not validated."""
    if is_column(*figures.values()):
        return Performance.model_construct(**figures)  # type: ignore[arg-type]  # columns are no numbers
    return Performance.model_validate(figures)


@dataclass(frozen=True)
class Outcome:
    """Memory, performance and time breakdown of a workload.

    ``seconds_by_class`` is the main step's time by operator class; ``phases`` the same for each
    phase that a job can measure separately; ``stage_layers`` and ``stage_devices`` are the split
    of an uneven pipeline.
    """

    memory: MemoryUse
    performance: Performance
    seconds_by_class: Mapping[str, float]
    fits: bool
    phases: Mapping[str, Mapping[str, float]]
    energy_tokens_per_second: float | None = None
    warnings: tuple[str, ...] = field(default=())
    stage_layers: tuple[int, ...] = ()
    stage_devices: tuple[str, ...] = ()

    @property
    def bound_by(self) -> str:
        """Return the resource that takes the most time, or memory if it does not fit."""
        if not self.fits:
            return "memory_capacity"
        return max(BOUND_NAMES, key=lambda name: self.seconds_by_class.get(name, 0.0))
