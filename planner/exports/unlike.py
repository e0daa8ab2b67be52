"""Export a serving plan on mixed nodes: one server per kind of node, or one pipeline.

Replicas of different speed are separate servers behind a router that distributes the requests. One
file starts all of them, and a variable selects the kind on each node. Only vLLM supports a
pipeline over several kinds, because it accepts the layers of each stage.
"""

import math
from dataclasses import replace

from planner.exports.case import ExportCase
from planner.exports.export import Format, Notes
from planner.exports.format_support import is_unlike, setting_of
from planner.specs.base import JsonObject
from planner.workload.heterogeneous_serving import Part, parts_of

COUNTED = ("concurrency", "burst_requests", "batch_size")


def unlike_parts(case: ExportCase) -> tuple[Part, ...]:
    """Return the replicas of a plan by kind of node; empty for uniform clusters."""
    plan, workload = case.plan, case.workload
    if not is_unlike(plan.cluster, workload):
        return ()
    setting = setting_of(case.shape, plan.cluster, workload, plan.strategy, plan.engine)
    return parts_of(setting, setting.workload)  # type: ignore[arg-type]  # is_unlike says which


def unlike_body(chosen: Format, case: ExportCase, parts: tuple[Part, ...]) -> str:
    """Return the body of a file: one server per kind, selected on each node."""
    if len(parts) <= 1:  # a pipeline over both kinds is one server
        return chosen.body(case)
    return "".join(
        f'if [ "$KIND" = {number} ]; then\n{chosen.body(_part_case(case, part))}fi\n'
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
    part_notes = (note for part in parts for note in chosen.notes(_part_case(case, part)))
    start = "start it on every node as its kind, behind a router that shares the requests"
    return (f"{start}: {'; '.join(kinds)}", *dict.fromkeys(part_notes))


def _part_case(case: ExportCase, part: Part) -> ExportCase:
    """Return the replicas of one kind as their own plan."""
    plan, setting = case.plan, part.setting
    layers = tuple(int(float(share.layers)) for share in setting.shares)
    staged = {"per_stage_layers": layers if len(layers) > 1 else None}
    own: JsonObject = {
        "cluster": setting.cluster,
        "strategy": plan.strategy.model_copy(update={"data_parallel_size": part.dealt.replicas}),
        "memory": plan.memory.model_copy(update=staged),
    }
    load = part.load(case.workload)  # type: ignore[type-var]  # only what serves has parts
    counts = {name: math.ceil(n) for name in COUNTED if (n := getattr(load, name, None))}
    return replace(
        case,
        device=setting.device,
        plan=plan.model_copy(update=own),
        workload=load.model_copy(update=counts),
    )
