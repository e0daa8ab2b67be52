"""Plans over several devices or hosts: available pools, and supported splits."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from django.db.models import Prefetch, Q

from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import PlannedStrategy
from planner.specs.workload import Strategy
from runners.jobspec import ArtefactModel, DataParallel, ModelRef
from runners.jobspec.generate import ExpertSplit, PipelineSplit, TensorSplit
from runners.plans.document import HardwareChoice
from runners.plans.refusals import DraftProblem
from runners.plans.workloads import TRAINING_GOALS
from webapp.accounts.models import Team
from webapp.hosts.machines import cluster_for_host
from webapp.hosts.models import DOCUMENTS, Host, HostState, Pool
from webapp.plans.training import layout_of

# Layout of multi-host jobs by default: full replicas with averaged gradients.
WHOLE_COPIES = Strategy(tensor_parallel_size=1, pipeline_parallel_size=1, zero_stage=0)
SPLITS = {
    "tensor_parallel_size": "tensor parallel",
    "pipeline_parallel_size": "pipeline parallel",
    "context_parallel_size": "context parallel",
    "expert_parallel_size": "expert parallel",
}

SHARED_EXPERTS = {SPLITS["tensor_parallel_size"], SPLITS["expert_parallel_size"]}


def shared_processor(cluster: ClusterSpec, hardware: HardwareChoice) -> ClusterSpec:
    """Return a CPU as several equal devices, if ranks share it."""
    ranks, device = hardware.ranks_per_host or 1, cluster.device
    if ranks == 1 or not isinstance(device, DeviceSpec) or device.kind != "cpu":
        return cluster
    speed, flops = device.memory_bandwidth_bytes_per_second, device.peak_flops_per_second
    share = device.model_copy(
        update={
            "memory_bytes": device.memory_bytes // ranks,
            "memory_bandwidth_bytes_per_second": speed / ranks,
            "peak_flops_per_second": {name: each / ranks for name, each in flops.items()},
        }
    )
    return cluster.model_copy(update={"device": share, "devices_per_node": ranks})


def processes_of(best: PlannedStrategy, hardware: HardwareChoice) -> int:
    """Return the number of ranks per CPU host in a plan."""
    device = best.cluster.device
    is_shared = isinstance(device, DeviceSpec) and device.kind == "cpu"
    return hardware.ranks_per_host or 1 if is_shared else 1


class Spread(NamedTuple):
    """The number of hosts of a job, and of devices per host."""

    num_hosts: int = 1
    devices_per_host: int = 1


def reachable_hosts(team: Team, *, has_documents: bool = True) -> list[Host]:
    """Return the team's hosts and those of pools shared with it, planned ones last.

    Without documents only identifying fields are loaded; others are loaded on access.
    """
    shared = Pool.objects.filter(shared_with=team).values("pk")
    hosts = Host.objects.filter(Q(team=team) | Q(pool__in=shared))
    hosts = hosts if has_documents else hosts.defer(*DOCUMENTS)
    # Pools repeat across hosts: prefetching reads each once.
    pools = Prefetch("pool", queryset=Pool.objects.select_related("team"))
    return list(hosts.order_by("kind", "created_at").prefetch_related(pools))


def pools_among(hosts: Iterable[Host], team: Team) -> list[tuple[Pool, list[Host]]]:
    """Return the pools to launch in, each with its ready hosts.

    The team's own pools need two ready hosts, as each host can also be chosen directly; for
    another team's shared pool one is enough.
    """
    together: dict[Pool, list[Host]] = defaultdict(list)
    for host in hosts:
        if host.kind == "agent" and host.state == HostState.READY:
            together[host.pool].append(host)
    return [
        (pool, ready)
        for pool, ready in together.items()
        if len(ready) > 1 or pool.team_id != team.pk
    ]


def pool_words(pool: Pool, team: Team) -> str:
    """Return a pool's name, with its team's name if that is another team."""
    return pool.name if pool.team_id == team.pk else f"{pool.name} of {pool.team.name}"


def pool_of(team: Team, pool_id: str) -> tuple[Pool, list[Host]]:
    """Return the pool that a draft chose, with its hosts.

    Raises:
        DraftProblem: the team may not launch there any more, or too few of its hosts are ready.
    """
    for pool, hosts in pools_among(reachable_hosts(team), team):
        if pool.pk == pool_id:
            return pool, hosts
    raise DraftProblem(
        "This pool has too few ready hosts for your team. Choose one host, or wait "
        "until another is ready.",
        "choice",
    )


def cluster_for_pool(hosts: list[Host], goal: str, team: Team, pins: Strategy) -> ClusterSpec:
    """Return the pool's hosts as nodes equal to the first; one node unless training.

    A generation uses as many nodes as its pinned parallel sizes need. For another team's host,
    devices and speed are included, but not its identity.

    Raises:
        ConflictProblem: the first host has not reported or not been measured yet.
    """
    cluster = _unnamed(cluster_for_host(hosts[0]), hosts[0].pool, team)
    if goal in TRAINING_GOALS:
        return cluster.model_copy(update={"nodes": len(hosts)})
    if goal != "generate":
        return cluster
    ranks = (pins.tensor_parallel_size or 1) * (pins.pipeline_parallel_size or 1)
    nodes = math.ceil(ranks / cluster.devices_per_node)
    return cluster.model_copy(update={"nodes": min(nodes, len(hosts))})


def _unnamed(cluster: ClusterSpec, pool: Pool, team: Team) -> ClusterSpec:
    device = cluster.device
    if pool.team_id == team.pk or not isinstance(device, DeviceSpec):
        return cluster
    if device.provenance != "measured":
        return cluster
    changes = {"id": f"pool-{pool.slug}", "source": f"measured in {pool_words(pool, team)}"}
    return cluster.model_copy(update={"device": device.model_copy(update=changes)})


def spread_of(best: PlannedStrategy, goal: str) -> Spread:
    """Return the number of hosts and devices on which a strategy runs.

    Raises:
        DraftProblem: the strategy splits the model in a way that jobs do not support yet.
    """
    if goal in TRAINING_GOALS:
        return _training_spread(best)
    strategy = best.strategy
    split = split_of(strategy) if goal == "generate" else None
    splits = [] if split else _splits(strategy)
    copies = strategy.data_parallel_size or 1
    if copies > 1:
        splits.append("several copies side by side")
    if splits:
        raise DraftProblem(
            f"This plan needs {' and '.join(splits)}, which jobs do not support yet: a generation "
            "divides one model in one way, and an endpoint uses one device. Pin tensor and "
            "pipeline parallel to 1 (of a generation, one of them), or choose a smaller model.",
            "tensor_parallel_size",
        )
    each = best.cluster.devices_per_node
    ranks = split.size if split else copies
    if ranks <= each:
        return Spread(1, ranks)
    if split and ranks % each:
        raise DraftProblem(
            f"{ranks} ranks do not fill hosts of {each} devices evenly. Choose a number that "
            f"divides by {each}.",
            f"{split.method}_parallel_size",
        )
    return Spread(ranks // each, each)


def _training_spread(best: PlannedStrategy) -> Spread:
    layout = layout_of(best.strategy)
    each, copies = best.cluster.devices_per_node, best.strategy.data_parallel_size or 1
    ranks = layout.world_size if layout else copies
    if ranks <= each:
        return Spread(1, ranks)
    if not ranks % each:
        return Spread(ranks // each, each)
    if ranks == copies:
        raise DraftProblem(
            f"{copies} copies do not fill hosts of {each} devices evenly. Choose a global batch "
            f"that divides by {each}.",
            "global_batch_size",
        )
    raise DraftProblem(
        f"{ranks} ranks do not fill hosts of {each} devices evenly. Choose sizes whose product "
        f"divides by {each}.",
        "tensor_parallel_size",
    )


def _splits(strategy: Strategy) -> list[str]:
    return [name for field, name in SPLITS.items() if (getattr(strategy, field) or 1) > 1]


def split_of(strategy: Strategy) -> TensorSplit | ExpertSplit | PipelineSplit | None:
    """Return how a plan splits the model among ranks; None if not, or by two methods.

    Expert parallelism with tensor parallelism of the same size counts as one method.
    """
    experts, methods = strategy.expert_parallel_size, set(_splits(strategy))
    if experts == strategy.tensor_parallel_size and methods == SHARED_EXPERTS:
        return ExpertSplit(size=experts or 1)
    if len(methods) != 1:
        return None
    if (size := strategy.tensor_parallel_size or 1) > 1:
        return TensorSplit(size=size)
    if (size := strategy.pipeline_parallel_size or 1) > 1:
        return PipelineSplit(size=size)
    return None


def check_model(model: ModelRef, spread: Spread) -> None:
    """Refuse a model stored on one host for a job on several.

    Raises:
        DraftProblem: the model is an artefact of a job on one host.
    """
    if spread.num_hosts > 1 and isinstance(model, ArtefactModel):
        raise DraftProblem(
            "This model's weights are on one host, and the job runs on several. Copy the model's "
            "folder to the models folder of each host, and choose the model source “A folder on a "
            "host”.",
            "source",
        )


def policy_of(hardware: HardwareChoice, spread: Spread, processes: int = 1) -> DataParallel:
    """Return a job's policy on a lost rank; elastic jobs shrink down to one host."""
    requested, is_shared_out = hardware.on_lost_rank, max(*spread, processes) > 1
    if requested == "restart" and is_shared_out:
        return DataParallel(on_lost_rank="restart")
    is_elastic = requested == "shrink" and spread.num_hosts > 1
    return DataParallel(on_lost_rank="shrink" if is_elastic else "stop")
