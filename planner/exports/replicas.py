"""Start the replicas of a plan as servers of their own, each with its devices and its port."""

from collections.abc import Sequence

from planner.exports.case import SERVING_PORT, ExportCase
from planner.exports.export import shell_lines

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
