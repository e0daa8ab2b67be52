"""A plan request with resolved names, on one of its clusters."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from planner.specs.base import JsonObject
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import EstimateRequest
from planner.specs.model import ModelSpec
from planner.specs.plan import PlanRequest
from planner.specs.strategy import Strategy
from planner.specs.workload import GenerateWorkload, ServeWorkload
from planner.techniques.case import Case
from planner.workload.device_groups import like_nodes
from planner.workload.resolve import resolve_cluster, resolve_device, resolve_model


@dataclass(frozen=True)
class Question:
    """A plan request with resolved names, on one of its clusters.

    ``shown`` is the cluster as requested: a catalog id remains an id.
    """

    request: PlanRequest
    model: ModelSpec
    device: DeviceSpec
    cluster: ClusterSpec
    shown: ClusterSpec

    @property
    def hardware(self) -> tuple[str, str]:
        """Return the device ids and the cloud offer of the question."""
        others = (cast("DeviceSpec", group.device).id for group in self.cluster.other_nodes)
        return " + ".join((self.device.id, *others)), self.cluster.instance or ""

    @property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """Return all kinds of device in the cluster."""
        others = (cast("DeviceSpec", group.device) for group in self.cluster.other_nodes)
        return (self.device, *others)

    @property
    def case(self) -> Case:
        """Return the case that technique conditions are checked against."""
        return Case(self.model, self.device, self.cluster, self.request.workload)

    @cached_property
    def pinned(self) -> JsonObject:
        """Return the pinned strategy fields."""
        return {name: value for name, value in self.request.pins if value is not None}

    def estimate_request(self, strategy: Strategy) -> EstimateRequest:
        """Return the request that costs one strategy of this question."""
        request = self.request
        return EstimateRequest.model_construct(
            id=request.id,
            model=self.model,
            cluster=self.cluster,
            workload=request.workload,
            strategy=strategy,
            engine=request.engine,
            host_calibration=request.host_calibration,
        )


def clusters_of(request: PlanRequest) -> tuple[ClusterSpec, ...]:
    """Return the candidate clusters of a request: its options, or its only cluster."""
    return request.hardware_options or (request.cluster,)


def memory_of(cluster: ClusterSpec) -> int:
    """Return the device memory of a whole cluster, in bytes.

    Raises:
        PlannerError: a name is unknown.
    """
    resolved = resolve_cluster(cluster)
    own = resolve_device(resolved.device).memory_bytes * resolved.devices_per_node * resolved.nodes
    others = resolved.other_nodes
    return own + sum(
        resolve_device(group.device).memory_bytes * group.num_devices for group in others
    )


def questions(request: PlanRequest) -> Iterator[Question]:
    """Yield one question per candidate cluster.

    For serving and generation on mixed nodes, also yield the nodes of each kind alone.

    Raises:
        PlannerError: a name is unknown.
    """
    model = resolve_model(request.model)
    can_split = isinstance(request.workload, ServeWorkload | GenerateWorkload)
    for cluster in clusters_of(request):
        yield _question(request, model, cluster)
        for part in like_nodes(cluster) if can_split and cluster.other_nodes else ():
            yield _question(request, model, part)


def _question(request: PlanRequest, model: ModelSpec, requested_cluster: ClusterSpec) -> Question:
    cluster = resolve_cluster(requested_cluster)
    device = resolve_device(cluster.device)
    rented = cluster.model_copy(update={"device": device.id})
    shown = requested_cluster if requested_cluster.instance is None else rented
    return Question(request, model, device, cluster, shown)
