"""A plan as a ``torchrun`` command: the ranks, and the layout in the environment."""

import shlex

from planner.exports.case import MASTER, PORT, ExportCase
from planner.exports.export import Format, Notes
from planner.specs.strategy import Strategy

FIELDS = (
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "zero_stage",
    "pipeline_schedule",
    "virtual_pipeline_size",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "activation_recomputation",
    "compute_dtype",
)


def torchrun_arguments(nodes: int, devices_per_node: int, *program: str) -> list[str]:
    """Return ``torchrun`` for so many nodes and ranks; several nodes meet at ``$MASTER_ADDR``."""
    command = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={devices_per_node}"]
    if nodes == 1:
        command.append("--standalone")
    else:
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={MASTER}:{PORT}"]
    return [*command, *program]


def layout_environment(strategy: Strategy) -> dict[str, str]:
    """Return the layout as the environment that a training script reads."""
    chosen = {name: getattr(strategy, name) for name in FIELDS}
    return {name.upper(): str(value) for name, value in chosen.items() if value is not None}


def training_environment(case: ExportCase) -> dict[str, str]:
    """Return what a training script needs to know: the model, the work and the layout."""
    work = {"MODEL": case.model, "WORKLOAD": case.workload.kind}
    return {**work, **layout_environment(case.strategy)}


def torchrun_text(case: ExportCase) -> str:
    """Return the command with its environment, one assignment a line."""
    environment = training_environment(case)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    command = torchrun_arguments(case.nodes, case.devices_per_node, "train.py")
    return "\n".join([*lines, " ".join(command)]) + "\n"


def torchrun_notes(_case: ExportCase) -> Notes:
    """Return what the command leaves to the script."""
    return ("train.py is your own: it reads the layout from the environment",)


TORCHRUN = Format("torchrun", "torchrun", "train-torchrun.sh", torchrun_text, torchrun_notes)
