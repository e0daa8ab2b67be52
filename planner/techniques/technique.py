"""What a technique is: plain data, and a test of whether it applies to a request."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from planner.specs.base import JsonObject
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.model import ModelSpec
from planner.specs.strategy import Strategy
from planner.specs.workload import Workload

Phase = Literal["inference", "training", "compression"]
APPLIES = ""
INFERENCE: frozenset[Phase] = frozenset({"inference"})
TRAINING: frozenset[Phase] = frozenset({"training"})
COMPRESSION: frozenset[Phase] = frozenset({"compression"})


@dataclass(frozen=True)
class Case:
    """The request that a technique is held against."""

    model: ModelSpec
    device: DeviceSpec
    cluster: ClusterSpec
    workload: Workload

    @property
    def is_training(self) -> bool:
        """Return whether the workload trains."""
        return self.workload.kind == "train"

    @property
    def is_inference(self) -> bool:
        """Return whether the workload serves or generates."""
        return self.workload.kind in {"serve", "generate"}

    @property
    def phase(self) -> Phase:
        """Return the phase that the workload belongs to."""
        if self.is_training:
            return "training"
        return "inference" if self.is_inference else "compression"


@dataclass(frozen=True)
class Technique:
    """One technique.

    ``why_not`` returns the reason why it does not apply to a case, or an empty string;
    ``is_used`` tells whether a strategy uses it; ``settings`` are the strategy fields that turn
    it on, as a worked example.
    """

    key: str
    title: str
    phases: frozenset[Phase]
    effect: str
    source: str
    settings: JsonObject
    why_not: Callable[[Case], str]
    is_used: Callable[[Strategy, Case], bool]
    headline: str = ""

    def reason_against(self, case: Case) -> str:
        """Return why the technique does not apply, by name, or an empty string when it does."""
        if case.phase not in self.phases:
            return f"works on {' and '.join(sorted(self.phases))}: this is {case.phase}"
        return self.why_not(case)

    def to_json(self) -> JsonObject:
        """Return the entry as the command line prints it."""
        return {
            "key": self.key,
            "title": self.title,
            "phases": sorted(self.phases),
            "effect": self.effect,
            "headline": self.headline,
            "settings": self.settings,
            "source": self.source,
        }


def always(case: Case) -> str:
    """Return no reason against: the technique applies wherever its phase does."""
    del case
    return APPLIES


def needs_devices(case: Case) -> str:
    """Return a reason against when there is one device alone."""
    if case.cluster.num_devices > 1:
        return APPLIES
    return "needs at least 2 devices: this cluster has 1"
