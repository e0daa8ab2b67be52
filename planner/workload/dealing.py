"""Which devices of a cluster work together: replicas, and within them pipeline stages.

All devices stand in the order of the cluster's nodes. Inference deals whole replicas, so that as
few of them as can be reach over two kinds of device; within a replica stages follow each other.
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
class Dealt:
    """Replicas that are alike: how many, and on what each of their stages runs."""

    replicas: int
    places: tuple[StagePlace, ...]

    @property
    def is_uneven(self) -> bool:
        """Return whether the stages of a replica are unlike."""
        return any(place.device != self.places[0].device for place in self.places)

    @property
    def title(self) -> str:
        """Return the devices by name, each kind once."""
        return " + ".join(dict.fromkeys(place.device.id for place in self.places))


def groups_of(cluster: ClusterSpec) -> tuple[NodeGroup, ...]:
    """Return the groups of nodes of a cluster, the first one's own device included."""
    own = NodeGroup(
        device=cluster.device, devices_per_node=cluster.devices_per_node, nodes=cluster.nodes
    )
    return (own, *cluster.other_nodes)


def like_nodes(cluster: ClusterSpec) -> tuple[ClusterSpec, ...]:
    """Return the nodes of each kind as a cluster of their own."""
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
    """Return every device of a cluster, one after the other."""
    cluster = setting.cluster
    found = [setting.device] * (cluster.devices_per_node * cluster.nodes)
    for group in cluster.other_nodes:
        found += [cast("DeviceSpec", group.device)] * group.num_devices
    return found


def weakest(setting: Setting, devices: Sequence[DeviceSpec]) -> DeviceSpec:
    """Return a device as slow and as small as the least of several."""
    dtype = compute_dtype_of(setting)
    slowest = min(devices, key=lambda device: peak_of(device, dtype)[0])
    least = {
        name: min(getattr(device, name) for device in devices)
        for name in ("memory_bytes", "memory_bandwidth_bytes_per_second")
    }
    return slowest.model_copy(update=least)


def mean_device(setting: Setting) -> DeviceSpec:
    """Return the mean of unlike devices, for what is paid and drawn per device."""
    if not setting.cluster.other_nodes:
        return setting.device
    paid = None if setting.cluster.instance else plain_layout(setting.layout).devices
    devices = devices_of(setting)[:paid]
    names = ("tdp_watts", "price_usd_per_hour")
    known = {name: [getattr(device, name) for device in devices] for name in names}
    means = {
        name: None if None in values else float(np.mean(values)) for name, values in known.items()
    }
    return setting.device.model_copy(update=means)


def plain_layout(layout: Layout) -> Layout:
    """Return a layout whose groups of ranks are plain numbers: in a block, one for all rows."""

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


def deal(setting: Setting) -> tuple[Dealt, ...]:
    """Return the replicas of a layout by what they run on, in the order of the cluster."""
    layout = setting.layout
    each = layout.devices // layout.data
    seats = list(_seats(setting))
    found: list[Dealt] = []
    for first in range(0, layout.devices, each):
        places = tuple(_places(setting, seats[first : first + each]))
        known = next((at for at, one in enumerate(found) if one.places == places), None)
        if known is None:
            found.append(Dealt(1, places))
        else:
            found[known] = replace(found[known], replicas=found[known].replicas + 1)
    return tuple(found)


@dataclass(frozen=True)
class _Seat:
    """One device of the line, and the number of its node and the kind of it."""

    device: DeviceSpec
    node: int
    kind: int


def _seats(setting: Setting) -> Iterator[_Seat]:
    groups = groups_of(setting.cluster)
    before = accumulate((group.nodes for group in groups), initial=0)
    devices = iter(devices_of(setting))
    for kind, (group, first) in enumerate(zip(groups, before, strict=False)):
        for rank in range(group.num_devices):
            yield _Seat(next(devices), first + rank // group.devices_per_node, kind)


def _places(setting: Setting, seats: Sequence[_Seat]) -> Iterator[StagePlace]:
    """Yield on what each stage of a replica runs."""
    width = len(seats) // setting.layout.pipeline
    kinds = like_nodes(setting.cluster)
    for first in range(0, len(seats), width):
        own, after = seats[first : first + width], seats[first + width : first + width + 1]
        alike = all(seat.kind == own[0].kind for seat in own)
        device = own[0].device if alike else weakest(setting, [seat.device for seat in own])
        together = own[0].node == own[-1].node
        size = {} if together else {"devices_per_node": 1, "nodes": len(own)}
        cluster = kinds[own[0].kind].model_copy(update={"device": device, **size})
        inside = bool(after) and after[0].node == own[-1].node
        yield StagePlace(device, cluster, inside)
