"""Export a plan as a ``torchrun`` command with its training script."""

from planner.exports.case import MASTER, PORT, ExportCase
from planner.exports.export import Format, Notes
from planner.exports.train_script import DEFAULT_STEPS, FILE, train_script
from planner.exports.training import optimizer_of, steps_of, train_workload


def torchrun_arguments(nodes: int, devices_per_node: int, *program: str) -> list[str]:
    """Return ``torchrun`` for some nodes and ranks; nodes connect at ``$MASTER_ADDR``."""
    command = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={devices_per_node}"]
    if nodes == 1:
        command.append("--standalone")
    else:
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={MASTER}:{PORT}"]
    return [*command, *program]


def torchrun_text(case: ExportCase) -> str:
    """Return a script that writes the training script and starts it on one node."""
    command = torchrun_arguments(case.nodes, case.devices_per_node, FILE)
    return f"cat > {FILE} <<'END'\n{train_script(case)}END\n{' '.join(command)}\n"


def torchrun_notes(case: ExportCase) -> Notes:
    """Return the script's requirements, and its differences from the plan."""
    packages = ["torch", "transformers", "accelerate"]
    workload, strategy = train_workload(case), case.strategy
    if workload.method in {"lora", "qlora"}:
        packages.append("peft")
    if workload.method == "qlora" or optimizer_of(case) in {"adamw_8bit", "lion"}:
        packages.append("bitsandbytes")
    if optimizer_of(case) in {"lomo", "adalomo"}:
        packages.append("lomo-optim")
    notes = [f"needs {', '.join(packages)}; DATA names a text file, OUTPUT where the result goes"]
    if steps_of(case) is None:
        notes.append(f"the plan does not say how long it runs: {DEFAULT_STEPS} steps, or STEPS")
    if strategy.activation_recomputation == "selective":
        notes.append("the trainer recomputes whole layers, not attention alone")
    if case.offload.optimizer != "none" or case.offload.weights_disk:
        notes.append(
            "the script keeps the optimiser's states on the devices: use DeepSpeed's file"
        )
    axes = ("tensor", "pipeline", "context", "expert")
    unsupported = [f"{axis} parallel {case.size(axis)}" for axis in axes if case.size(axis) > 1]
    if unsupported:
        notes.append(f"{FILE} has no {', '.join(unsupported)}: Megatron-LM and torchtitan have")
    return tuple(notes)


TORCHRUN = Format("torchrun", "torchrun", "train-torchrun.sh", torchrun_text, torchrun_notes)
