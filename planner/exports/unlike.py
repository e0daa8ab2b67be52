"""A served plan over unlike nodes in a tool's words: a server for each kind, or one pipeline.

Replicas of unlike speed are servers of their own behind a router that shares the requests: one
file starts them all, and each node is told of which kind it is. A pipeline over both kinds is said
by vLLM alone, which takes the layers of each stage.
"""

import math
from dataclasses import replace

from planner.exports.case import ExportCase
from planner.exports.export import Format, Notes
from planner.exports.sayable import is_unlike, setting_of
from planner.specs.base import JsonObject
from planner.workload.unlike_serving import Part, parts_of

COUNTED = ("concurrency", "burst_requests", "batch_size")


def unlike_parts(case: ExportCase) -> tuple[Part, ...]:
    """Return the replicas of a plan by kind; nothing where all nodes are alike."""
    plan, workload = case.plan, case.workload
    if not is_unlike(plan.cluster, workload):
        return ()
    setting = setting_of(case.shape, plan.cluster, workload, plan.strategy, plan.engine)
    return parts_of(setting, setting.workload)  # type: ignore[arg-type]  # is_unlike says which


def unlike_body(chosen: Format, case: ExportCase, parts: tuple[Part, ...]) -> str:
    """Return the body of a file: one server for each kind, of which a node starts its own."""
    if len(parts) <= 1:  # a pipeline over both kinds is one server
        return chosen.body(case)
    return "".join(
        f'if [ "$KIND" = {number} ]; then\n{chosen.body(_alone(case, part))}fi\n'
        for number, part in enumerate(parts, start=1)
    )


def unlike_notes(chosen: Format, case: ExportCase, parts: tuple[Part, ...]) -> Notes:
    """Return what the file leaves open."""
    if len(parts) <= 1:  # a pipeline over both kinds is one server
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
