"""A served plan over unlike nodes in a tool's words: a server for each kind, or one pipeline.

Replicas of unlike speed are servers of their own behind a router that shares the requests: one
file starts them all, and each node is told of which kind it is. A pipeline over both kinds is said
by vLLM alone, which takes the layers of each stage.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from planner.errors import PlannerError
from planner.exports.case import ExportCase
from planner.exports.export import Format, Notes
from planner.specs.base import JsonObject
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import EstimateRequest
from planner.specs.model import ModelSpec
from planner.specs.strategy import Strategy
from planner.specs.workload import GenerateWorkload, ServeWorkload, Workload
from planner.techniques.case import Case
from planner.workload.dealing import deal, groups_of
from planner.workload.resolve import resolve
from planner.workload.setting import Setting
from planner.workload.unlike_serving import Part, parts_of

STAGED = "vllm"  # the one server that takes an uneven split of the layers
COUNTED = ("concurrency", "burst_requests", "batch_size")


def is_unlike(cluster: ClusterSpec, workload: Workload) -> bool:
    """Return whether a plan serves on nodes of several kinds."""
    return bool(cluster.other_nodes) and isinstance(workload, ServeWorkload | GenerateWorkload)


def unlike_servers(
    case: Case, strategy: Strategy, servers_of: Callable[[Case], list[str]]
) -> tuple[str, ...]:
    """Return the servers that can say a plan over unlike nodes; no cluster manager can."""
    try:
        setting = _setting(case.model, case.cluster, case.workload, strategy)
    except PlannerError:
        return ()
    dealt = deal(setting)
    kinds = {place.device.id: place.device for one in dealt for place in one.places}
    runs = [servers_of(replace(case, device=device)) for device in kinds.values()]
    everywhere = [name for name in runs[0] if all(name in one for one in runs)]
    if not any(one.is_uneven for one in dealt):
        return tuple(everywhere)
    whole = len(dealt) == 1 and dealt[0].replicas == 1 and _in_equal_nodes(setting)
    return tuple(name for name in everywhere if name == STAGED and whole)


def _in_equal_nodes(setting: Setting) -> bool:
    """Return whether a pipeline takes as many devices of each node that it reaches.

    Source: vLLM, vllm/config/parallel.py (the ranks of a world are dealt evenly to its nodes).
    """
    widths = {group.devices_per_node for group in groups_of(setting.cluster)}
    return len(widths) == 1 and setting.layout.devices % widths.pop() == 0


def _setting(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    strategy: Strategy,
    engine: str | None = None,
) -> Setting:
    return resolve(
        EstimateRequest(
            model=model, cluster=cluster, workload=workload, strategy=strategy, engine=engine
        )
    )


def unlike_parts(case: ExportCase) -> tuple[Part, ...]:
    """Return the replicas of a plan by kind; nothing where all nodes are alike."""
    plan, workload = case.plan, case.workload
    if not is_unlike(plan.cluster, workload):
        return ()
    setting = _setting(case.shape, plan.cluster, workload, plan.strategy, plan.engine)
    return parts_of(setting, setting.workload)  # type: ignore[arg-type]  # is_unlike says which


def unlike_body(chosen: Format, case: ExportCase, parts: tuple[Part, ...]) -> str:
    """Return the body of a file: one server for each kind, of which a node starts its own."""
    if len(parts) < 2:  # noqa: PLR2004 - a pipeline over both kinds is one server
        return chosen.body(case)
    return "".join(
        f'if [ "$KIND" = {number} ]; then\n{chosen.body(_alone(case, part))}fi\n'
        for number, part in enumerate(parts, start=1)
    )


def unlike_notes(chosen: Format, case: ExportCase, parts: tuple[Part, ...]) -> Notes:
    """Return what the file leaves open."""
    if len(parts) < 2:  # noqa: PLR2004 - a pipeline over both kinds is one server
        return chosen.notes(case)
    kinds = (
        f"KIND={number} starts {part.title} for {part.share:.0%} of the requests"
        for number, part in enumerate(parts, start=1)
    )
    own = (note for part in parts for note in chosen.notes(_alone(case, part)))
    start = "start it on every node as its kind, behind a router that shares the requests"
    return (f"{start}: {'; '.join(kinds)}", *dict.fromkeys(own))


def _alone(case: ExportCase, part: Part) -> ExportCase:
    """Return the replicas of one kind as a plan of their own."""
    plan, setting = case.plan, part.setting
    layers = tuple(int(float(share.layers)) for share in setting.shares)
    staged = {"per_stage_layers": layers if len(layers) > 1 else None}
    own: JsonObject = {
        "cluster": setting.cluster,
        "strategy": plan.strategy.model_copy(update={"data_parallel_size": part.dealt.replicas}),
        "memory": plan.memory.model_copy(update=staged),
    }
    load = part.load(case.workload)  # type: ignore[type-var]  # only what serves has parts
    whole = {name: math.ceil(n) for name in COUNTED if (n := getattr(load, name, None))}
    return replace(
        case,
        device=setting.device,
        plan=plan.model_copy(update=own),
        workload=load.model_copy(update=whole),
    )
