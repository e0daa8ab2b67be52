"""Which link a group of ranks uses: NVLink in its domain, the network, or links between pods.

Ranks are numbered by tensor, then context, and lie node after node, domain after domain, pod after
pod. What follows differs: Megatron-LM places data ranks, then pipeline stages, unless it is given
``--use-tp-pp-dp-mapping``; Llama 3 placed stages, then data ranks. Rings in nodes and NVLink
domains are costed in the first order, with which the fitted steps ran; hand-overs and what crosses
pods in the second. A ring enters and leaves a node, a domain and a pod once, so all its members
there share what leaves it; an all-to-all joins all pairs.

Sources: NCCL 2.x, src/graph (rings, and NVLink domains across nodes); Megatron-LM,
megatron/core/parallel_state.py, initialize_model_parallel (order ``tp-cp-ep-dp-pp``); Llama Team
2024, arXiv:2407.21783, section 3.3 (order TP, CP, PP, DP; pods of 3,072 GPUs, links between them
oversubscribed 1:7).
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from planner.cost.column import single
from planner.cost.quantity import Flag, ceil, either, floor, maximum, minimum, where
from planner.specs.workload import TrainWorkload
from planner.workload.setting import Rates, Setting


def domain_of(setting: Setting) -> int:
    """Return the devices of a node or of its NVLink domain, if the engine uses one across nodes.

    llama.cpp reaches other nodes over sockets alone (its RPC backend).
    """
    cluster = setting.cluster
    return cluster.devices_per_node if setting.engine.ggml_kernels else cluster.domain_devices


def lies_in_domain(setting: Setting, ranks: float) -> Flag:
    """Return whether each group of ``ranks`` neighbours lies in one node or NVLink domain."""
    domain = domain_of(setting)
    if domain == setting.cluster.devices_per_node:
        return ranks <= domain
    return _lies_side_by_side(setting, ranks, domain)


def _lies_side_by_side(setting: Setting, ranks: float, size: float) -> Flag:
    """Return whether each group of ``ranks`` lies in one node, or one domain or pod of ``size``.

    A layout takes as few domains or pods as hold its devices. Groups lie side by side in them: 4
    groups of 16 fit into 72 devices, and a fifth would lie in two.
    """
    devices = setting.layout.devices
    held = ceil(devices / size) * floor(size / ranks) * ranks
    return either(ranks <= setting.cluster.devices_per_node, held >= devices)


def devices_in_domain(setting: Setting) -> float:
    """Return the devices of a layout in each of its nodes or NVLink domains.

    It takes as few domains as hold it, and on average equally many devices of each: 256 devices
    are 64 of each of four of 72.
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


def hand_over_link(setting: Setting, rates: Rates) -> float:
    """Return the bytes/s between the neighbouring stages of a pipeline.

    In plain nodes the context ranks of a stage are left out, as in the fitted steps.
    """
    layout = setting.layout
    stage = layout.tensor * layout.context
    between = chain_link(setting, rates, stage * layout.pipeline, stage)
    in_node = layout.tensor * layout.pipeline <= setting.cluster.devices_per_node
    return where(in_node, rates.link_bytes_per_s, between)


def exchange_link(setting: Setting, rates: Rates, ranks: float) -> float:
    """Return the bytes/s of a device in an all-to-all of ``ranks`` neighbours.

    What leaves a pod crosses its links to others, the rest does not: of a group in two pods at
    most half of its bytes.
    """
    between, pod = rates.inter_node_bytes_per_s, setting.cluster.pod_devices
    if pod is not None:
        leaving = where(ranks > pod, 1.0 - pod / ranks, 0.5)
        leaving = where(_lies_side_by_side(setting, ranks, pod), 0.0, leaving)
        share = between / (setting.cluster.oversubscription_ratio or 1.0)
        between = between * minimum(1.0, share / maximum(leaving * between, share))
    return where(lies_in_domain(setting, ranks), rates.link_bytes_per_s, between)


def ring_link(
    setting: Setting, rates: Rates, span: float, stride: float, stages: float = 1.0
) -> float:
    """Return the bytes/s of a ring over every ``stride``-th of ``span`` devices.

    It enters and leaves a node or NVLink domain once, over the network ports of all its members
    there. Across pods the ``stages`` of a pipeline lie between two members.
    """
    members = maximum(1.0, devices_in_domain(setting) / stride)
    across = minimum(rates.link_bytes_per_s, rates.inter_node_bytes_per_s * members)
    if setting.cluster.pod_devices is not None:
        reach = minimum(span * stages, setting.layout.devices)
        across = minimum(across, _between_pods(setting, rates, reach, stride * stages))
    return where(lies_in_domain(setting, span), rates.link_bytes_per_s, across)


def _between_pods(setting: Setting, rates: Rates, span: float, stride: float) -> float:
    """Return the bytes/s that a ring has between pods, infinite if all such lie in one each.

    Each member has its share of the pod's links to others, and the ring leaves a pod once.
    """
    pod = setting.cluster.pod_devices or math.inf
    share = rates.inter_node_bytes_per_s / (setting.cluster.oversubscription_ratio or 1.0)
    is_inside = _lies_side_by_side(setting, span, pod)
    return where(is_inside, math.inf, share * maximum(1.0, pod / stride))


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
    """Yield what crosses pods, and the share of its bandwidth that it keeps."""
    ratio = setting.cluster.oversubscription_ratio or 1.0
    if single(setting.layout.devices) <= pod:
        yield f"the layout lies in one pod of {pod} devices, whose nodes reach each other in full"
        return
    open_cluster = setting.cluster.model_copy(update={"oversubscription_ratio": None})
    whole, crosses = replace(setting, cluster=open_cluster), False
    for name, ranks in _spans(setting):
        if lies_in_domain(setting, ranks) or _lies_side_by_side(setting, ranks, pod):
            continue
        crosses = True
        share = float(_link(setting, name, ranks) / _link(whole, name, ranks))
        effect = "not slowed" if share >= 1.0 else f"slowed to {share:.0%} of their bandwidth"
        why = _ring_members(setting, pod) if name == RINGS else ""
        yield (
            f"{name} cross pods of {pod} devices over links oversubscribed 1:{ratio:g}: "
            f"they are {effect}{why}"
        )
    if not crosses:
        yield f"no group of ranks crosses pods of {pod} devices"


RINGS, HAND_OVERS = "data-parallel rings", "pipeline hand-overs"


def _spans(setting: Setting) -> Iterator[tuple[str, int]]:
    """Yield what ranks exchange, with the devices that it spans; servers have no data ring."""
    layout = setting.layout
    kinds = {"expert-parallel": "all-to-alls of experts", "context-parallel": "context exchanges"}
    for name, ranks in _groups(setting):
        yield kinds.get(name, "tensor-parallel groups"), ranks
    replica = single(layout.tensor * layout.context * layout.pipeline)
    if layout.pipeline > 1:
        yield HAND_OVERS, replica
    if isinstance(setting.workload, TrainWorkload) and layout.devices > replica:
        yield RINGS, single(layout.devices)


def _link(setting: Setting, name: str, ranks: int) -> float:
    """Return the bytes/s of an exchange of ``_spans``."""
    layout, rates = setting.layout, setting.rates
    if name == HAND_OVERS:
        return hand_over_link(setting, rates)
    if name == RINGS:
        return ring_link(setting, rates, ranks, layout.tensor * layout.context, layout.pipeline)
    if name == "all-to-alls of experts":
        return exchange_link(setting, rates, ranks)
    return chain_link(setting, rates, ranks, layout.tensor if "context" in name else 1.0)


def _ring_members(setting: Setting, pod: int) -> str:
    layout = setting.layout
    members = max(1, pod // single(layout.tensor * layout.context * layout.pipeline))
    return f", since {members} members of each share the links" if members > 1 else ""
