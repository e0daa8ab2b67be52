"""Export a training plan as DeepSpeed's or accelerate's configuration."""

import json

from planner.exports.export import PORT, ExportCase, Format, Notes
from planner.exports.train_script import layout_notes, method_notes, optimizer_of, train_workload
from planner.exports.yaml_text import yaml_text
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


# Export a training plan as the file for ``accelerate launch --config_file``.


MIXED = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
SHARDED = 2
FULLY_SHARDED = 3


def accelerate_config(case: ExportCase) -> JsonObject:
    """Return the launcher settings that the plan decides; ZeRO 2 and 3 become FSDP2."""
    config: JsonObject = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": distributed_type(case),
        "mixed_precision": MIXED.get(case.strategy.compute_dtype or "", "no"),
        "num_machines": case.nodes,
        "num_processes": case.devices,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static" if case.nodes == 1 else "c10d",
        "same_network": True,
        "use_cpu": case.device.kind == "cpu",
    }
    if case.nodes > 1:
        config |= {"main_process_ip": "MASTER_ADDR", "main_process_port": PORT}
    if config["distributed_type"] == "FSDP":
        config["fsdp_config"] = _fsdp(case)
    if config["distributed_type"] == "DEEPSPEED":
        config["deepspeed_config"] = _deepspeed(case)
    return config


def distributed_type(case: ExportCase) -> str:
    """Return accelerate's name for the plan's mode of parallelism."""
    if (
        case.offload.weights_disk
        or case.offload.optimizer != "none"
        or case.strategy.zero_stage == 1
    ):
        return "DEEPSPEED"
    if (case.strategy.zero_stage or 0) >= SHARDED:
        return "FSDP"
    if case.devices == 1:
        return "NO"
    return "MULTI_CPU" if case.device.kind == "cpu" else "MULTI_GPU"


def _fsdp(case: ExportCase) -> JsonObject:
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": case.strategy.zero_stage == FULLY_SHARDED,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": case.strategy.activation_recomputation == "full",
        "fsdp_offload_params": case.offload.weights_cpu > 0,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _deepspeed(case: ExportCase) -> JsonObject:
    parameters = "nvme" if case.offload.weights_disk else "cpu"
    devices = {
        "offload_optimizer": case.offload.optimizer,
        "offload_param": parameters if weights_share(case.offload) else "none",
    }
    paths = {f"{name}_nvme_path": NVME_PATH for name in devices if devices[name] == "nvme"}
    return {
        "zero_stage": zero_stage_of(case),
        "gradient_accumulation_steps": case.strategy.gradient_accumulation_steps or 1,
        **{f"{name}_device": device for name, device in devices.items()},
        **paths,
        "zero3_init_flag": case.strategy.zero_stage == FULLY_SHARDED,
    }


def accelerate_notes(case: ExportCase) -> Notes:
    """Return what the launcher leaves to the script."""
    strategy = case.strategy
    micro, steps = strategy.micro_batch_size or 1, strategy.gradient_accumulation_steps or 1
    notes = [
        f"the script sets micro batch {micro} and gradient_accumulation_steps={steps}",
        *method_notes(case),
        *layout_notes(case, frozenset(), "this file"),
    ]
    if case.offload.activations_cpu:
        notes.append("the script moves activations to the host: torch.autograd.graph.save_on_cpu")
    if case.nodes > 1:
        notes.append("on every node: MASTER_ADDR is the first one's address, machine_rank its own")
    if strategy.activation_recomputation == "selective" or (
        strategy.activation_recomputation == "full" and distributed_type(case) != "FSDP"
    ):
        notes.append(f"the script turns {strategy.activation_recomputation} recomputation on")
    return tuple(notes)


def accelerate_text(case: ExportCase) -> str:
    """Return the settings as YAML."""
    return yaml_text(accelerate_config(case))


ACCELERATE = Format(
    "accelerate", "Accelerate", "accelerate.yaml", accelerate_text, accelerate_notes
)
