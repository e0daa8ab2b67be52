"""The request that a technique is held against."""

from dataclasses import dataclass

from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.model import ModelSpec
from planner.specs.workload import Workload

PHASES = {"train": "training", "compress": "compression"}


@dataclass(frozen=True)
class Case:
    """A model, a cluster and a workload, with every name looked up."""

    model: ModelSpec
    device: DeviceSpec
    cluster: ClusterSpec
    workload: Workload

    @property
    def phase(self) -> str:
        """Return the phase that the workload belongs to: inference, training or compression."""
        return PHASES.get(self.workload.kind, "inference")
