"""A plan as a ``torchrun`` command: the ranks, and the layout in the environment."""

import shlex

from planner.specs.plan import PlannedStrategy
from planner.specs.strategy import Strategy
from planner.specs.workload import Workload

FIELDS = (
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "zero_stage",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "activation_recomputation",
    "compute_dtype",
)


def torchrun_arguments(nodes: int, devices_per_node: int, script: str) -> list[str]:
    """Return ``torchrun`` for so many nodes and ranks; several nodes meet at ``$MASTER_ADDR``."""
    command = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={devices_per_node}"]
    if nodes == 1:
        command.append("--standalone")
    else:
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=$MASTER_ADDR:29500"]
    return [*command, script]


def layout_environment(strategy: Strategy) -> dict[str, str]:
    """Return the layout as the environment that a training script reads."""
    chosen = {name: getattr(strategy, name) for name in FIELDS}
    return {name.upper(): str(value) for name, value in chosen.items() if value is not None}


def export_torchrun(model: str, plan: PlannedStrategy, workload: Workload) -> str:
    """Return the command with its environment, one assignment a line."""
    cluster = plan.cluster
    environment = {"MODEL": model, "WORKLOAD": workload.kind, **layout_environment(plan.strategy)}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    command = torchrun_arguments(cluster.nodes, cluster.devices_per_node, "train.py")
    return "\n".join([*lines, " ".join(command)]) + "\n"
