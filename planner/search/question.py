"""A plan request with its names looked up, on one of its clusters."""

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
from planner.workload.dealing import like_nodes
from planner.workload.resolve import resolve_cluster, resolve_device, resolve_model


@dataclass(frozen=True)
class Question:
    """A plan request with its names looked up, on one of its clusters.

    ``shown`` is the cluster as it was asked for: a catalog id stays an id.
    """

    request: PlanRequest
    model: ModelSpec
    device: DeviceSpec
    cluster: ClusterSpec
    shown: ClusterSpec

    @property
    def hardware(self) -> tuple[str, str]:
        """Return the device and the offer that the question is about."""
        others = (cast("DeviceSpec", group.device).id for group in self.cluster.other_nodes)
        return " + ".join((self.device.id, *others)), self.cluster.instance or ""

    @property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """Return the kinds of device that there are."""
        others = (cast("DeviceSpec", group.device) for group in self.cluster.other_nodes)
        return (self.device, *others)

    @property
    def case(self) -> Case:
        """Return what techniques are held against."""
        return Case(self.model, self.device, self.cluster, self.request.workload)

    @cached_property
    def pinned(self) -> JsonObject:
        """Return the strategy fields that the request holds fixed."""
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
    """Return the clusters that a request may choose: its options, or else its only one."""
    return request.hardware_options or (request.cluster,)


def memory_of(cluster: ClusterSpec) -> int:
    """Return the bytes of memory that all devices of a cluster have.

    Raises:
        PlannerError: a name is unknown.
    """
    found = resolve_cluster(cluster)
    own = resolve_device(found.device).memory_bytes * found.devices_per_node * found.nodes
    others = found.other_nodes
    return own + sum(resolve_device(one.device).memory_bytes * one.num_devices for one in others)


def questions(request: PlanRequest) -> Iterator[Question]:
    """Yield the question for each cluster that the request may choose.

    Unlike nodes may also serve as if the nodes of one kind were alone.

    Raises:
        PlannerError: a name is unknown.
    """
    model = resolve_model(request.model)
    apart = isinstance(request.workload, ServeWorkload | GenerateWorkload)
    for whole in clusters_of(request):
        yield _question(request, model, whole)
        for part in like_nodes(whole) if apart and whole.other_nodes else ():
            yield _question(request, model, part)


def _question(request: PlanRequest, model: ModelSpec, asked: ClusterSpec) -> Question:
    cluster = resolve_cluster(asked)
    device = resolve_device(cluster.device)
    rented = cluster.model_copy(update={"device": device.id})
    shown = asked if asked.instance is None else rented
    return Question(request, model, device, cluster, shown)
