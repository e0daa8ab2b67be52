"""The case that a technique's conditions are checked against."""

from dataclasses import dataclass

from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.model import ModelSpec
from planner.specs.workload import Workload

PHASES = {"train": "training", "compress": "compression"}


@dataclass(frozen=True)
class Case:
    """A model, a cluster and a workload with resolved names."""

    model: ModelSpec
    device: DeviceSpec
    cluster: ClusterSpec
    workload: Workload

    @property
    def phase(self) -> str:
        """Return the phase of the workload: inference, training or compression."""
        return PHASES.get(self.workload.kind, "inference")
