"""The cluster of a request: devices, instance and topology looked up, and what it warns of."""

import math
from collections.abc import Iterator

from planner.catalog.devices import get_device, get_instance, largest_offer
from planner.catalog.topologies import get_topology, list_topologies
from planner.specs.base import BadRequestError
from planner.specs.cluster import ClusterSpec, DeviceSpec, NodeGroup
from planner.workload.setting import Setting
from planner.workload.topology import domain_of, straddling_groups

SERVER_DEVICES = 8  # of the usual largest server, also where the cluster does not say
RACK = "nvl"  # in the id of a device whose rack is one domain of its fast link


def resolve_device(device: str | DeviceSpec) -> DeviceSpec:
    """Return the device of a request, looked up in the catalog if it is an id."""
    return get_device(device) if isinstance(device, str) else device


def resolve_cluster(cluster: ClusterSpec) -> ClusterSpec:
    """Return a cluster with its device resolved; an instance sets count, memory and price.

    Raises:
        UnknownNameError: a catalog has no such device, instance or topology.
        BadRequestError: the instance's GPU is not in the device catalog, or the topology does not
            fit the nodes.
    """
    resolved = _with_topology(_with_devices(cluster))
    _check_topology(resolved)
    return resolved


def _with_topology(cluster: ClusterSpec) -> ClusterSpec:
    """Return a cluster with what its topology sets and was not given.

    Raises:
        UnknownNameError: the catalog has no such topology.
        BadRequestError: the topology is of another device.
    """
    if cluster.topology is None:
        return cluster
    topology, device = get_topology(cluster.topology), resolve_device(cluster.device)
    if topology.device and topology.device != device.id:
        raise BadRequestError(
            f"topology {topology.id} is of {topology.device}, and the device is {device.id}: "
            "leave topology out, or state nvlink_domain_devices, nodes_per_pod and "
            "oversubscription_ratio",
            "cluster.topology",
        )
    missing = {
        name: value
        for name, value in topology.cluster_fields.items()
        if name not in cluster.model_fields_set
    }
    return cluster.model_copy(update={"topology": topology.id, **missing})


def _check_topology(cluster: ClusterSpec) -> None:
    """Reject NVLink domains that nodes do not fill, and a ratio without pods.

    Raises:
        BadRequestError: names the field and what works.
    """
    groups: tuple[ClusterSpec | NodeGroup, ...] = (cluster, *cluster.other_nodes)
    for at, group in enumerate(groups):
        domain, each = group.nvlink_domain_devices, group.devices_per_node
        if domain is not None and group.nodes > 1 and domain % each:
            fitting = max(domain // each, 1) * each
            raise BadRequestError(
                f"nvlink_domain_devices is {domain}, no multiple of devices_per_node, {each}: a "
                f"domain is made of whole nodes; choose {fitting}, or other nodes",
                f"cluster.{f'other_nodes.{at - 1}.' if at else ''}nvlink_domain_devices",
            )
    ratio = cluster.oversubscription_ratio
    if ratio is not None and ratio > 1 and cluster.nodes_per_pod is None:
        raise BadRequestError(
            f"oversubscription_ratio is {ratio:g}, and nodes_per_pod, the nodes that reach each "
            "other at full bandwidth, is not given: state it, or leave the ratio out",
            "cluster.nodes_per_pod",
        )


def _with_devices(cluster: ClusterSpec) -> ClusterSpec:
    """Return a cluster with its devices resolved, and what its instance sets.

    Raises:
        UnknownNameError: a catalog has no such device or instance.
        BadRequestError: the instance's GPU is not in the device catalog.
    """
    if cluster.other_nodes:
        others = tuple(
            group.model_copy(update={"device": resolve_device(group.device)})
            for group in cluster.other_nodes
        )
        cluster = cluster.model_copy(update={"other_nodes": others})
    if cluster.instance is None:
        device = resolve_device(cluster.device)
        is_resolved = device is cluster.device
        return cluster if is_resolved else cluster.model_copy(update={"device": device})
    offer = get_instance(cluster.instance)
    if offer.device is None:
        raise BadRequestError(
            f"instance {offer.id} has a {offer.gpu}, which the device catalog does not have: give "
            "the device as an object instead",
            "cluster.instance",
        )
    hourly = {"price_usd_per_hour": offer.price_usd_per_device_hour}
    priced = {**hourly, "price_source": offer.price_source}
    instance_fields = {
        "devices_per_node": offer.devices,
        "host_memory_bytes": offer.host_memory_bytes,
    }
    given = cluster.model_fields_set
    device = get_device(offer.device).model_copy(update=priced)
    missing = {name: value for name, value in instance_fields.items() if name not in given}
    return cluster.model_copy(update={"device": device, "instance": offer.id, **missing})


def cluster_warnings(setting: Setting) -> Iterator[str]:
    """Yield what the planner assumes of servers, and what a layout loses by NVLink domains."""
    yield from _server_warnings(setting)
    yield from _topology_warnings(setting)


def _server_warnings(setting: Setting) -> Iterator[str]:
    """Yield a warning for each kind of server that holds more devices than any that is known.

    Racks that name the size of their link, such as NVL72, are one server to the planner.
    """
    cluster = setting.cluster
    groups: tuple[ClusterSpec | NodeGroup, ...] = (cluster, *cluster.other_nodes)
    for group in groups:
        device, inside = resolve_device(group.device), group.devices_per_node
        offer = largest_offer(device.id)
        if offer is None or RACK in device.id or inside <= max(SERVER_DEVICES, offer.devices):
            continue
        each = max(SERVER_DEVICES, offer.devices)
        servers = math.ceil(inside * group.nodes / each)
        yield (
            f"{inside} {device.name or device.id} are taken as one server with its fast links: "
            f"the largest in the catalog has {offer.devices} ({offer.id}); "
            f"{servers}x{each}x{device.id} means servers of {each}"
        )


def _topology_warnings(setting: Setting) -> Iterator[str]:
    """Yield what a layout loses by its NVLink domains, and those that are not stated."""
    cluster, device, domain = setting.cluster, setting.device, domain_of(setting)
    for name, ranks in straddling_groups(setting):
        whole = math.lcm(ranks, cluster.devices_per_node)  # groups, and nodes, of a domain
        used = domain // whole * whole
        fewer = f"take {used} devices of each domain (nvlink_domain_devices={used}), or "
        yield (
            f"some {name} groups of {ranks} lie in two NVLink domains of {domain} and use the "
            f"network: {fewer if used else ''}choose a size that divides {domain}"
        )
    if setting.engine.ggml_kernels:  # it reaches other nodes over sockets alone
        return
    known = next((each for each in list_topologies() if each.device == device.id), None)
    if known is None or not known.nvlink_domain_devices or cluster.nvlink_domain_devices:
        return
    if cluster.nodes > 1 and domain <= SERVER_DEVICES:
        yield (
            f"the {cluster.nodes} nodes of {cluster.devices_per_node} {device.name or device.id} "
            f"are joined by the network alone: topology={known.id} joins "
            f"{known.nvlink_domain_devices} devices by NVLink"
        )
