"""Export a training plan as a torchtitan configuration: a function over one of its models."""

from planner.exports.export import ExportCase, Format, Notes
from planner.exports.format_support import CONFIGURATIONS
from planner.exports.train_script import method_notes, steps_of, torchrun_arguments, train_workload
from planner.workload.training_tiers import weights_share

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "ZBVZeroBubble",
}
RECOMPUTATION = {"full": "FullAC.Config()", "selective": "SelectiveAC.Config()", "none": "None"}
FULLY_SHARDED = 3
# torchtitan 0.3's configuration of this size computes in float8, which GPUs before SM 8.9 reject
# and the plan does not assume: use another size's configuration with this model.
PLAIN = {"llama3_405b": ("llama3_70b", "405B", "./assets/hf/Llama-3.1-405B")}
MODULE = "slipway_plan"


def torchtitan_text(case: ExportCase) -> str:
    """Return a module for ``--module``, with the run command in its docstring."""
    module, function = CONFIGURATIONS[case.shape.id.lower()]
    lines, imports = _settings(case), ""
    if function in PLAIN:
        function, flavor, assets = PLAIN[function]
        imports = f"from torchtitan.models.{module} import model_registry\n"
        named = (f'model_spec = model_registry("{flavor}")', f'hf_assets_path = "{assets}"')
        lines = [*named, *lines]
    settings = "".join(f"    config.{line}\n" for line in lines)
    return (
        f'"""Run with {_command(case)}."""\n\n'
        "from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC\n"
        f"{imports}from torchtitan.models.{module}.config_registry import {function}\n"
        "from torchtitan.trainer import Trainer\n\n\n"
        "def plan() -> Trainer.Config:\n"
        f"    config = {function}()\n{settings}    return config\n"
    )


def _command(case: ExportCase) -> str:
    program = ("-m", "torchtitan.train", "--module", MODULE, "--config", "plan")
    return " ".join(torchrun_arguments(case.nodes, case.devices_per_node, *program))


def _settings(case: ExportCase) -> list[str]:
    workload, strategy = train_workload(case), case.strategy
    recomputation = RECOMPUTATION[strategy.activation_recomputation or "none"]
    lines = [
        f"training.local_batch_size = {_local_batch(case)}",
        f"training.global_batch_size = {workload.global_batch_size}",
        f"training.seq_len = {workload.sequence_length}",
        *([f"training.steps = {steps_of(case)}"] if steps_of(case) else []),
        *_parallelism(case),
        f"activation_checkpoint = {recomputation}",
    ]
    if case.offload.optimizer == "cpu" or case.offload.weights_cpu:
        lines.append("training.enable_cpu_offload = True")
    if case.size("pipeline") > 1 or case.size("expert") > 1:
        # The trainer does not support CUDA graphs for either; they are on by default.
        lines.append("training.disable_cuda_graphs = True")
    return lines


def _local_batch(case: ExportCase) -> int:
    """Return the sequences of a rank per step; a pipeline splits them into micro-batches."""
    micro = case.strategy.micro_batch_size or 1
    steps = case.strategy.gradient_accumulation_steps or 1
    return micro * steps if case.size("pipeline") > 1 else micro


def _parallelism(case: ExportCase) -> list[str]:
    stage = case.strategy.zero_stage or 0
    sharded = case.size("data") if stage else 1
    reshard_policy = '"always"' if stage == FULLY_SHARDED else '"never"'
    values = {
        "data_parallel_replicate_degree": case.size("data") // sharded,
        "data_parallel_shard_degree": sharded,
        "fsdp_reshard_after_forward": reshard_policy,
        "tensor_parallel_degree": case.size("tensor"),
        "enable_sequence_parallel": bool(case.strategy.sequence_parallel),
        "pipeline_parallel_degree": case.size("pipeline"),
        "context_parallel_degree": case.size("context"),
        "expert_parallel_degree": case.size("expert"),
    }
    if case.size("pipeline") > 1:
        schedule = SCHEDULES[case.strategy.pipeline_schedule or "1f1b"]
        values["pipeline_parallel_schedule"] = f'"{schedule}"'
        values["pipeline_parallel_microbatch_size"] = case.strategy.micro_batch_size or 1
    return [f"parallelism.{name} = {value}" for name, value in values.items()]


def torchtitan_notes(case: ExportCase) -> Notes:
    """Return what the configuration leaves open or cannot express."""
    notes = [f"save it as {MODULE}.py; written for torchtitan 0.3", *method_notes(case)]
    if case.strategy.zero_stage in {1, 2}:
        notes.append(
            f"ZeRO {case.strategy.zero_stage}: torchtitan shards the weights too, and keeps them "
            "gathered between forward and backward pass"
        )
    if case.offload.optimizer == "nvme" or case.offload.weights_disk:
        notes.append("torchtitan offloads to host memory only, not to NVMe")
    if case.offload.optimizer == "cpu" and not weights_share(case.offload):
        notes.append("torchtitan moves weights, gradients and optimiser states together")
    if case.offload.activations_cpu:
        notes.append("torchtitan does not move activations: wrap the step in save_on_cpu")
    return tuple(notes)


TORCHTITAN = Format("torchtitan", "torchtitan", f"{MODULE}.py", torchtitan_text, torchtitan_notes)
