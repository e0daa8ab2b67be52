"""Assignment of a cluster's devices to replicas and their pipeline stages.

Devices are in the order of the cluster's nodes. Inference assigns consecutive devices to each
replica, so few replicas span two kinds of device; stages follow each other within a replica.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import numpy as np

from planner.specs.cluster import ClusterSpec, DeviceSpec, NodeGroup
from planner.workload.peaks import peak_of
from planner.workload.ranks import Layout, StagePlace
from planner.workload.setting import Setting, compute_dtype_of


@dataclass(frozen=True)
class ReplicaGroup:
    """Identical replicas: their number and the device of each stage."""

    replicas: int
    places: tuple[StagePlace, ...]

    @property
    def is_uneven(self) -> bool:
        """Return whether the stages of a replica have different devices."""
        return any(place.device != self.places[0].device for place in self.places)

    @property
    def title(self) -> str:
        """Return the device names, each once."""
        return " + ".join(dict.fromkeys(place.device.id for place in self.places))


def groups_of(cluster: ClusterSpec) -> tuple[NodeGroup, ...]:
    """Return all node groups of a cluster, with its main group first."""
    own = NodeGroup(
        device=cluster.device, devices_per_node=cluster.devices_per_node, nodes=cluster.nodes
    )
    return (own, *cluster.other_nodes)


def like_nodes(cluster: ClusterSpec) -> tuple[ClusterSpec, ...]:
    """Return one cluster per kind of node."""
    first = cluster.model_copy(update={"other_nodes": ()})
    others = (
        first.model_copy(
            update={
                "device": group.device,
                "instance": None,
                "devices_per_node": group.devices_per_node,
                "nodes": group.nodes,
            }
        )
        for group in cluster.other_nodes
    )
    return (first, *others)


def devices_of(setting: Setting) -> list[DeviceSpec]:
    """Return the devices of a cluster in the order of its nodes."""
    cluster = setting.cluster
    devices = [setting.device] * (cluster.devices_per_node * cluster.nodes)
    for group in cluster.other_nodes:
        devices += [cast("DeviceSpec", group.device)] * group.num_devices
    return devices


def slowest_device(setting: Setting, devices: Sequence[DeviceSpec]) -> DeviceSpec:
    """Return a device with the lowest speed and smallest memory of several."""
    dtype = compute_dtype_of(setting)
    slowest = min(devices, key=lambda device: peak_of(device, dtype)[0])
    least = {
        name: min(getattr(device, name) for device in devices)
        for name in ("memory_bytes", "memory_bandwidth_bytes_per_second")
    }
    return slowest.model_copy(update=least)


def mean_device(setting: Setting) -> DeviceSpec:
    """Return a device with the mean price and power of the devices in use."""
    if not setting.cluster.other_nodes:
        return setting.device
    paid = None if setting.cluster.instance else plain_layout(setting.layout).devices
    devices = devices_of(setting)[:paid]
    names = ("tdp_watts", "price_usd_per_hour")
    values_by_name = {name: [getattr(device, name) for device in devices] for name in names}
    means = {
        name: None if None in values else float(np.mean(values))
        for name, values in values_by_name.items()
    }
    return setting.device.model_copy(update=means)


def plain_layout(layout: Layout) -> Layout:
    """Return a layout with scalar parallel sizes, the first row of a block."""

    def one(size: object) -> int:
        return int(np.asarray(size).flat[0])

    return replace(
        layout,
        data=one(layout.data),
        tensor=one(layout.tensor),
        pipeline=one(layout.pipeline),
        expert=one(layout.expert),
        context=one(layout.context),
        attention_data=one(layout.attention_data),
    )


def group_replicas(setting: Setting) -> tuple[ReplicaGroup, ...]:
    """Return the replicas of a layout grouped by their devices, in cluster order."""
    layout = setting.layout
    size = layout.devices // layout.data
    slots = list(_slots(setting))
    kinds: list[ReplicaGroup] = []
    for first in range(0, layout.devices, size):
        places = tuple(_places(setting, slots[first : first + size]))
        index = next((at for at, one in enumerate(kinds) if one.places == places), None)
        if index is None:
            kinds.append(ReplicaGroup(1, places))
        else:
            kinds[index] = replace(kinds[index], replicas=kinds[index].replicas + 1)
    return tuple(kinds)


@dataclass(frozen=True)
class _Slot:
    """One device in cluster order, with the index of its node and of its node kind."""

    device: DeviceSpec
    node: int
    kind: int


def _slots(setting: Setting) -> Iterator[_Slot]:
    groups = groups_of(setting.cluster)
    before = accumulate((group.nodes for group in groups), initial=0)
    devices = iter(devices_of(setting))
    for kind, (group, first) in enumerate(zip(groups, before, strict=False)):
        for rank in range(group.num_devices):
            yield _Slot(next(devices), first + rank // group.devices_per_node, kind)


def _places(setting: Setting, slots: Sequence[_Slot]) -> Iterator[StagePlace]:
    """Yield the place of each stage of a replica."""
    width = len(slots) // setting.layout.pipeline
    kinds = like_nodes(setting.cluster)
    for first in range(0, len(slots), width):
        stage, next_slot = slots[first : first + width], slots[first + width : first + width + 1]
        is_uniform = all(slot.kind == stage[0].kind for slot in stage)
        device = (
            stage[0].device
            if is_uniform
            else slowest_device(setting, [slot.device for slot in stage])
        )
        on_one_node = stage[0].node == stage[-1].node
        size = {} if on_one_node else {"devices_per_node": 1, "nodes": len(stage)}
        cluster = kinds[stage[0].kind].model_copy(update={"device": device, **size})
        inside = bool(next_slot) and next_slot[0].node == stage[-1].node
        yield StagePlace(device, cluster, inside)
