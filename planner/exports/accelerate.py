"""Export a training plan as the file for ``accelerate launch --config_file``."""

from planner.exports.deepspeed import NVME_PATH, zero_stage_of
from planner.exports.export import PORT, ExportCase, Format, Notes
from planner.exports.train_script import layout_notes, method_notes
from planner.exports.yaml_text import yaml_text
from planner.specs.base import JsonObject
from planner.workload.training_tiers import weights_share

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
