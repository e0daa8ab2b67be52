"""A training plan as DeepSpeed's JSON configuration."""

import json

from planner.exports.case import ExportCase
from planner.exports.export import Format, Notes
from planner.exports.training import layout_notes, method_notes, optimizer_of, train_workload
from planner.specs.base import JsonObject

OPTIMIZERS = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD"}
PARAMETERS_NEED_STAGE = 3


def deepspeed_config(case: ExportCase) -> JsonObject:
    """Return the configuration with the settings that the plan decides, and no others."""
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


def _zero(case: ExportCase) -> JsonObject:
    zero: JsonObject = {"stage": case.strategy.zero_stage or 0}
    if case.offload.optimizer != "none":
        zero["offload_optimizer"] = {"device": case.offload.optimizer}
    if case.offload.weights_cpu and zero["stage"] == PARAMETERS_NEED_STAGE:
        zero["offload_param"] = {"device": "cpu"}
    if case.offload.weights_disk and zero["stage"] == PARAMETERS_NEED_STAGE:
        zero["offload_param"] = {"device": "nvme"}
    return zero


def deepspeed_notes(case: ExportCase) -> Notes:
    """Return what the configuration leaves to the script or cannot say."""
    notes = [*method_notes(case)]
    notes += layout_notes(case, frozenset({"tensor", "context"}), "this configuration")
    if case.size("pipeline") > 1:
        notes.append(f"build a PipelineModule with num_stages={case.size('pipeline')}")
    if optimizer_of(case) not in OPTIMIZERS:
        notes.append(f"make the optimiser {optimizer_of(case)} in the script")
    if case.offload.optimizer == "nvme" or case.offload.weights_disk:
        notes.append("add nvme_path with a fast local disk to each offload_* entry")
    if case.offload.weights_cpu and case.strategy.zero_stage != PARAMETERS_NEED_STAGE:
        notes.append("DeepSpeed moves weights to the host only in ZeRO stage 3")
    if case.strategy.activation_recomputation in {"selective", "full"}:
        notes.append("the script turns recomputation on: model.gradient_checkpointing_enable()")
    return tuple(notes)


def deepspeed_text(case: ExportCase) -> str:
    """Return the configuration as a JSON file."""
    return json.dumps(deepspeed_config(case), indent=2) + "\n"


DEEPSPEED = Format(
    "deepspeed", "DeepSpeed", "deepspeed.json", deepspeed_text, deepspeed_notes, comment=None
)
