"""Export a training plan as DeepSpeed's JSON configuration."""

import json

from planner.exports.export import ExportCase, Format, Notes
from planner.exports.train_script import layout_notes, method_notes, optimizer_of, train_workload
from planner.specs.base import JsonObject
from planner.workload.training_tiers import weights_share

OPTIMIZERS = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD"}
PARAMETERS_NEED_STAGE = 3
NVME_NEEDS_STAGE = 3  # DeepSpeed 0.19.8: stages 1 and 2 silently treat "nvme" as host memory
NVME_PATH = "/local_nvme"


def deepspeed_config(case: ExportCase) -> JsonObject:
    """Return the configuration with only the settings that the plan decides."""
    strategy = case.strategy
    config: JsonObject = {
        "train_batch_size": train_workload(case).global_batch_size,
        "train_micro_batch_size_per_gpu": strategy.micro_batch_size or 1,
        "gradient_accumulation_steps": strategy.gradient_accumulation_steps or 1,
        "zero_optimization": _zero(case),
    }
    if strategy.compute_dtype in {"bf16", "fp16"}:
        config[strategy.compute_dtype] = {"enabled": True}
    name = OPTIMIZERS.get(optimizer_of(case))
    if name:
        config["optimizer"] = {"type": name, "params": {}}
    if strategy.gradient_dtype in {"bf16", "fp16", "fp32"}:
        config["data_types"] = {"grad_accum_dtype": strategy.gradient_dtype}
    if case.size("tensor") > 1:
        config["tensor_parallel"] = {"autotp_size": case.size("tensor")}
    if case.size("context") > 1:
        config["sequence_parallel_size"] = case.size("context")
    if strategy.activation_recomputation in {"selective", "full"}:
        offloaded = case.offload.activations_cpu > 0
        config["activation_checkpointing"] = {
            "partition_activations": case.size("tensor") > 1,
            "cpu_checkpointing": offloaded,
        }
    return config


def zero_stage_of(case: ExportCase) -> int:
    """Return the ZeRO stage; offloading states needs stage 2, NVMe stage 3."""
    stage = case.strategy.zero_stage or 0
    if case.offload.optimizer == "nvme":
        return NVME_NEEDS_STAGE
    return stage or (2 if case.offload.optimizer != "none" else 0)


def _zero(case: ExportCase) -> JsonObject:
    zero: JsonObject = {"stage": zero_stage_of(case)}
    if case.offload.optimizer != "none":
        zero["offload_optimizer"] = _place(case.offload.optimizer)
    if zero["stage"] == PARAMETERS_NEED_STAGE and weights_share(case.offload):
        zero["offload_param"] = _place("nvme" if case.offload.weights_disk else "cpu")
    return zero


def _place(device: str) -> JsonObject:
    return {"device": device, "nvme_path": NVME_PATH} if device == "nvme" else {"device": device}


def deepspeed_notes(case: ExportCase) -> Notes:
    """Return what the configuration leaves to the script or cannot express."""
    notes = [*method_notes(case)]
    notes += layout_notes(case, frozenset({"tensor", "context"}), "this configuration")
    if case.size("pipeline") > 1:
        notes.append(f"build a PipelineModule with num_stages={case.size('pipeline')}")
    if optimizer_of(case) not in OPTIMIZERS:
        notes.append(f"make the optimiser {optimizer_of(case)} in the script")
    notes += _offload_notes(case)
    if weights_share(case.offload) and case.strategy.zero_stage != PARAMETERS_NEED_STAGE:
        notes.append("DeepSpeed moves weights to the host only in ZeRO stage 3")
    if case.strategy.activation_recomputation in {"selective", "full"}:
        notes.append("the script turns recomputation on: model.gradient_checkpointing_enable()")
    return tuple(notes)


def _offload_notes(case: ExportCase) -> list[str]:
    """Return the limits of DeepSpeed's offloading for this plan."""
    offload, notes = case.offload, []
    if offload.optimizer == "nvme" or offload.weights_disk:
        notes.append(f"nvme_path is {NVME_PATH}: name the directory of your fastest local disk")
    planned = case.strategy.zero_stage or 0
    if offload.optimizer == "nvme" and planned != NVME_NEEDS_STAGE:
        notes.append(
            f"the plan has ZeRO stage {planned}, the configuration {NVME_NEEDS_STAGE}: in lower "
            "ones DeepSpeed keeps the optimiser's states in host memory where NVMe is asked"
        )
    if 0 < weights_share(offload) < 1:
        notes.append("DeepSpeed moves all weights or none: a share of them is all of them")
    if offload.activations_cpu and case.strategy.activation_recomputation in {None, "none"}:
        notes.append(
            "DeepSpeed moves checkpoints alone to the host: without recomputation, wrap the "
            "forward pass in torch.autograd.graph.save_on_cpu(pin_memory=True)"
        )
    return notes


def deepspeed_text(case: ExportCase) -> str:
    """Return the configuration as a JSON file."""
    return json.dumps(deepspeed_config(case), indent=2) + "\n"


DEEPSPEED = Format(
    "deepspeed", "DeepSpeed", "deepspeed.json", deepspeed_text, deepspeed_notes, comment=None
)
