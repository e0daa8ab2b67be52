"""Which link a group of ranks uses: NVLink in its domain, the network, or links between pods.

Ranks are numbered as Megatron-LM and NCCL number them: tensor-parallel neighbours first, then
node after node, domain after domain, pod after pod. A ring enters and leaves a node, a domain and
a pod once, so all its members there share what leaves it; an all-to-all joins all pairs.

Sources: NCCL 2.x, src/graph (rings, and NVLink domains across nodes); Llama Team 2024,
arXiv:2407.21783, section 3.3.1 (pods of 3,072 GPUs, links between them oversubscribed 1:7).
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from planner.cost.column import single
from planner.cost.quantity import Flag, ceil, either, floor, maximum, minimum, where
from planner.workload.setting import Rates, Setting


def domain_of(setting: Setting) -> int:
    """Return the devices of a node or of its NVLink domain, if the engine uses one across nodes.

    llama.cpp reaches other nodes over sockets alone (its RPC backend).
    """
    cluster = setting.cluster
    return cluster.devices_per_node if setting.engine.ggml_kernels else cluster.domain_devices


def lies_in_domain(setting: Setting, ranks: float) -> Flag:
    """Return whether each group of ``ranks`` neighbours lies in one node or NVLink domain.

    In a domain across nodes groups lie side by side: 4 groups of 16 fit into 72 devices, and a
    fifth would lie in two domains.
    """
    cluster, domain = setting.cluster, domain_of(setting)
    in_node = ranks <= cluster.devices_per_node
    if domain == cluster.devices_per_node:
        return in_node
    domains = math.ceil(cluster.num_devices / domain)
    groups = domains * floor(cluster.num_devices / domains / ranks)
    return either(in_node, groups * ranks >= setting.layout.devices)


def devices_in_domain(setting: Setting) -> float:
    """Return the devices of a layout in each of its nodes or NVLink domains.

    A cluster takes equally many of each domain: 256 devices are 64 of each of four of 72.
    """
    each, domain = setting.cluster.devices_per_node, domain_of(setting)
    if domain == each:
        return each
    devices = setting.layout.devices
    return maximum(devices / ceil(devices / domain), each)


def chain_link(setting: Setting, rates: Rates, ranks: float, stride: float = 1.0) -> float:
    """Return the bytes/s between neighbours, one of ``stride`` devices each, among ``ranks``."""
    between = rates.inter_node_bytes_per_s
    if setting.cluster.pod_devices is not None:
        between = minimum(between, _between_pods(setting, rates, ranks, stride))
    return where(lies_in_domain(setting, ranks), rates.link_bytes_per_s, between)


def exchange_link(setting: Setting, rates: Rates, ranks: float) -> float:
    """Return the bytes/s of a device in an all-to-all of ``ranks`` neighbours.

    What leaves a pod crosses its links to others, the rest does not.
    """
    between, pod = rates.inter_node_bytes_per_s, setting.cluster.pod_devices
    if pod is not None:
        leaving = maximum(1.0 - pod / ranks, 0.0)
        share = between / (setting.cluster.oversubscription_ratio or 1.0)
        between = between * minimum(1.0, share / maximum(leaving * between, share))
    return where(lies_in_domain(setting, ranks), rates.link_bytes_per_s, between)


def ring_link(setting: Setting, rates: Rates, span: float, stride: float) -> float:
    """Return the bytes/s of a ring over every ``stride``-th of ``span`` devices.

    It enters and leaves a node or NVLink domain once, over the network ports of all its members
    there.
    """
    members = maximum(1.0, devices_in_domain(setting) / stride)
    across = minimum(rates.link_bytes_per_s, rates.inter_node_bytes_per_s * members)
    if setting.cluster.pod_devices is not None:
        apart = stride * setting.layout.pipeline  # stages lie between two members
        across = minimum(across, _between_pods(setting, rates, span, apart))
    return where(lies_in_domain(setting, span), rates.link_bytes_per_s, across)


def _between_pods(setting: Setting, rates: Rates, span: float, stride: float) -> float:
    """Return the bytes/s that a ring has between pods, infinite if it lies in one.

    Each member has its share of the pod's links to others, and the ring leaves a pod once.
    """
    pod = setting.cluster.pod_devices or math.inf
    share = rates.inter_node_bytes_per_s / (setting.cluster.oversubscription_ratio or 1.0)
    return where(span <= pod, math.inf, share * maximum(1.0, pod / stride))


# Which links the groups of a layout use, in words.


def link_reasons(setting: Setting) -> Iterator[str]:
    """Yield which link each group of ranks uses, where the cluster has domains or pods.

    Nothing is said of a cluster whose nodes are its domains and whose network does not block.
    """
    cluster = setting.cluster
    if domain_of(setting) > cluster.devices_per_node:
        for name, ranks in _groups(setting):
            yield _domain_words(setting, name, ranks)
    if cluster.pod_devices is not None:
        yield from _pod_words(setting, cluster.pod_devices)


def straddling_groups(setting: Setting) -> Iterator[tuple[str, int]]:
    """Yield the groups that would fit into an NVLink domain and of which some lie in two."""
    for name, ranks in _groups(setting):
        if ranks <= domain_of(setting) and not lies_in_domain(setting, ranks):
            yield name, ranks


def _groups(setting: Setting) -> Iterator[tuple[str, int]]:
    """Yield the groups that exchange within a layer, by name, with their ranks."""
    layout = setting.layout
    tensor, context = single(layout.tensor), single(layout.context)
    experts = single(layout.expert_group) if setting.model.is_moe else 1
    if tensor > 1:
        yield "tensor-parallel", tensor
    if experts > tensor:
        yield "expert-parallel", experts
    if context > 1:
        yield "context-parallel", tensor * context


def _domain_words(setting: Setting, name: str, ranks: int) -> str:
    cluster, group = setting.cluster, f"{name} groups of {ranks}"
    domain, nodes = domain_of(setting), math.ceil(ranks / cluster.devices_per_node)
    if lies_in_domain(setting, ranks):
        across = f" across {nodes} nodes" if nodes > 1 else ""
        return f"{group} use NVLink{across}: they lie in its domain of {domain} devices"
    if ranks > domain:
        return f"{group} use the network: they exceed the NVLink domain of {domain} devices"
    return (
        f"{group} use the network: a domain of {domain} devices holds {domain // ranks} side by "
        "side, so some lie in two"
    )


def _pod_words(setting: Setting, pod: int) -> Iterator[str]:
    layout, cluster = setting.layout, setting.cluster
    ratio, devices = cluster.oversubscription_ratio or 1.0, single(layout.devices)
    if devices <= pod:
        yield f"the layout lies in one pod of {pod} devices, whose nodes reach each other in full"
        return
    stride = single(layout.tensor) * single(layout.context)
    members = max(1, pod // (stride * single(layout.pipeline)))
    whole = replace(setting, cluster=cluster.model_copy(update={"oversubscription_ratio": None}))
    share = ring_link(setting, setting.rates, devices, stride)
    share = share / ring_link(whole, setting.rates, devices, stride)
    effect = "not slowed" if share >= 1.0 else f"slowed to {share:.0%} of their bandwidth"
    yield (
        f"data-parallel rings cross pods of {pod} devices over links oversubscribed 1:{ratio:g}: "
        f"they are {effect}, since {members} members of each share the links"
    )
