"""Serving plans as several servers: replicas, and one server or stage per kind of node."""

import math
from collections.abc import Sequence
from dataclasses import replace

from planner.exports.export import SERVING_PORT, ExportCase, Format, Notes, shell_lines
from planner.exports.format_support import is_unlike, setting_of
from planner.specs.base import JsonObject
from planner.workload.heterogeneous_serving import Part, parts_of

# The variable that shows a process its devices, by vendor.
VISIBLE = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}
VISIBLE |= {"intel": "ZE_AFFINITY_MASK"}
PORT_WORD = "SERVER_PORT"
BALANCER = "put a balancer before them"


def servers_per_node(case: ExportCase, servers: int) -> int:
    """Return how many of the plan's servers one node runs, at least 1."""
    return max(1, servers // case.nodes)


def servers_text(case: ExportCase, command: Sequence[str], servers: int) -> str:
    """Return the shell text that starts a node's servers, numbered from the first port on.

    ``command`` starts one of them, without its port; a single server keeps the usual port.
    """
    here = servers_per_node(case, servers)
    if here <= 1:
        return shell_lines([*command, "--port", str(SERVING_PORT)])
    devices = case.devices_per_node // here
    variable = VISIBLE.get((case.device.vendor or "").lower())
    start = shell_lines([*command, "--port", PORT_WORD]).rstrip("\n")
    start = start.replace(PORT_WORD, f"$(({SERVING_PORT} + server))")
    own = f"$(seq -s , $((server * {devices})) $((server * {devices} + {devices - 1})))"
    shown = [f"export {variable}={own}"] if variable and case.device.kind == "gpu" else []
    numbers = " ".join(str(number) for number in range(here))
    return "\n".join([f"for server in {numbers}; do", *shown, f"{start} &", "done", "wait", ""])


def servers_notes(case: ExportCase, servers: int) -> tuple[str, ...]:
    """Return how to reach several servers."""
    if servers <= 1:
        return ()
    here = servers_per_node(case, servers)
    last = SERVING_PORT + here - 1
    where = f"on ports {SERVING_PORT} to {last}" if here > 1 else f"on port {SERVING_PORT}"
    on_nodes = f" of each of {case.nodes} nodes" if case.nodes > 1 else ""
    return (f"{servers} servers, {where}{on_nodes}: {BALANCER}",)


# Export a serving plan on mixed nodes: one server per kind of node, or one pipeline.
#
# Replicas of different speed are separate servers behind a router that distributes the requests.
# One file starts all of them, and a variable selects the kind on each node. Only vLLM supports a
# pipeline over several kinds, because it accepts the layers of each stage.


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
