"""Training scripts with torchrun, Accelerate and DeepSpeed, and their configurations."""

import json

from planner.exports.export import MASTER, PORT, ExportCase, Format, Notes, configuration_of
from planner.exports.yaml_text import yaml_text
from planner.specs.base import BadRequestError, JsonObject
from planner.specs.workload import TrainWorkload
from planner.workload.training_memory import DEFAULT_LORA_RANK

# ---------------------------------------------------------------------------
# Export a training plan as a script for the Hugging Face trainer or for torchtitan.
# ---------------------------------------------------------------------------


# Common parts of the training exports: batch, optimiser, methods, layout notes.


ADAPTERS = frozenset({"lora", "qlora", "alphatuning"})
FUSED_UPDATES = frozenset({"lomo", "adalomo", "qft"})


def train_workload(case: ExportCase) -> TrainWorkload:
    """Return the training workload of a case.

    Raises:
        TypeError: the case does not train.
    """
    if not isinstance(case.workload, TrainWorkload):
        raise TypeError(f"workload.kind is {case.workload.kind!r}: only train has a batch")
    return case.workload


def optimizer_of(case: ExportCase) -> str:
    """Return the optimiser of the plan: the workload's, or AdamW."""
    workload = train_workload(case)
    return workload.optimizer or (workload.method if workload.method == "lomo" else "adamw")


def steps_of(case: ExportCase) -> int | None:
    """Return the optimiser steps of the run, None if its length is not given."""
    workload = train_workload(case)
    if workload.tokens is None:
        return None
    return -(-workload.tokens // (workload.global_batch_size * workload.sequence_length))


def method_notes(case: ExportCase) -> Notes:
    """Return what the training method needs beyond a launcher's or framework's settings."""
    method = train_workload(case).method
    if method in {"lora", "qlora"}:
        rank = train_workload(case).lora_rank or DEFAULT_LORA_RANK
        note = f"method {method}, rank {rank}: the torchrun export's train.py wraps the model"
        return (note,)
    if method in ADAPTERS:
        return (f"method {method}: wrap the model with its adapters in the training script",)
    if method in FUSED_UPDATES:
        return (f"method {method}: the training script must update inside the backward pass",)
    return ()


def layout_notes(case: ExportCase, expressible: frozenset[str], title: str) -> Notes:
    """Return notes on the parallel sizes that a format cannot express."""
    axes = ("tensor", "pipeline", "context", "expert")
    parallel_sizes = [f"{axis} parallel {case.size(axis)}" for axis in axes if case.size(axis) > 1]
    missing = [size for size in parallel_sizes if size.split()[0] not in expressible]
    notes = [f"{title} does not say {', '.join(missing)}: the script must"] if missing else []
    if is_uneven(case) and "layers" not in expressible:
        shown = ", ".join(str(layers) for layers in case.plan.memory.per_stage_layers or ())
        notes.append(f"the stages hold {shown} layers: {title} splits them evenly by default")
    return tuple(notes)


def is_uneven(case: ExportCase) -> bool:
    """Return whether stages differ by more than one layer."""
    layers = case.plan.memory.per_stage_layers
    return layers is not None and max(layers) - min(layers) > 1


FILE = "train.py"
DEFAULT_STEPS = 100  # for a plan without a stated length
# The trainer's names of optimisers; LOMO's two need the package lomo-optim.
OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "adafactor": "adafactor",
    "lion": "lion_32bit",
    "sgd": "sgd",
    "lomo": "lomo",
    "adalomo": "adalomo",
}
TARGETS: dict[str, str | list[str]] = {"all": "all-linear", "query_value": ["q_proj", "v_proj"]}
SCRIPT = '''\
#!/usr/bin/env python3
"""Train as planned, with the Hugging Face trainer under torchrun.

The environment may name DATA, a text file (data.txt), MODEL, other weights, OUTPUT, a folder for
the result (trained), and STEPS, another number of steps.
"""

import json
import os

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

PLAN = json.loads(r\'\'\'@PLAN@\'\'\')
MODEL = os.environ.get("MODEL", PLAN["model"])
ON_GPU = torch.cuda.is_available()


def rows():
    """Return the text as rows of the planned length, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with open(os.environ.get("DATA", "data.txt"), encoding="utf-8") as text:
        tokens = tokenizer(text.read())["input_ids"]
    length = PLAN["sequence_length"]
    if len(tokens) < length:
        raise SystemExit(f"DATA has {len(tokens)} tokens, a row takes {length}: give more text")
    cut = [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)]
    return [{"input_ids": row, "labels": row} for row in cut]


def model():
    """Return the model that the plan trains."""
    options = {"attn_implementation": "sdpa"} if PLAN["fused_attention"] else {}
    if PLAN["method"] == "pretrain":
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL), **options)
    if PLAN["method"] == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=torch.bfloat16 if PLAN["fsdp"] else torch.uint8,
        )
        if not PLAN["fsdp"]:
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if ON_GPU else "cpu"
            options["device_map"] = {"": device}
    wide = torch.bfloat16 if PLAN["lora"] else torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(MODEL, dtype=wide, **options)
    return adapted(loaded) if PLAN["lora"] else loaded


def adapted(loaded):
    """Return the model with the adapters that the plan trains."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    # FSDP shards units of one dtype: what it shards stays in that of the packed 4-bit weights.
    packed = PLAN["method"] == "qlora" and bool(PLAN["fsdp"])
    if PLAN["method"] == "qlora" and not packed:
        loaded = prepare_model_for_kbit_training(
            loaded, use_gradient_checkpointing=PLAN["gradient_checkpointing"]
        )
    elif PLAN["gradient_checkpointing"]:
        loaded.enable_input_require_grads()
    lora = LoraConfig(task_type="CAUSAL_LM", **PLAN["lora"])
    return get_peft_model(loaded, lora, autocast_adapter_dtype=not packed)


def main():
    """Train and keep the result."""
    output = os.environ.get("OUTPUT", "trained")
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=PLAN["micro_batch_size"],
        gradient_accumulation_steps=PLAN["gradient_accumulation_steps"],
        max_steps=int(os.environ.get("STEPS", PLAN["steps"])),
        optim=PLAN["optimizer"],
        bf16=PLAN["compute_dtype"] == "bf16",
        fp16=PLAN["compute_dtype"] == "fp16" and ON_GPU,
        gradient_checkpointing=PLAN["gradient_checkpointing"]
        and not PLAN["fsdp"].get("activation_checkpointing"),
        fsdp=PLAN["fsdp_mode"] or bool(PLAN["fsdp"]) or None,
        fsdp_config=PLAN["fsdp"] or None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not ON_GPU,
    )
    trainer = Trainer(
        model=model(),
        args=arguments,
        train_dataset=rows(),
        data_collator=default_data_collator,
    )
    trainer.train()
    trainer.save_model(output)


if __name__ == "__main__":
    main()
'''


def train_script(case: ExportCase) -> str:
    """Return the training script of a plan.

    Raises:
        BadRequestError: the method has no public implementation for the trainer.
    """
    workload = train_workload(case)
    if workload.method in {"qft", "alphatuning"}:
        raise BadRequestError(
            f"method {workload.method} has no script for the Hugging Face trainer: launch it as a "
            "job, or choose full, lora or qlora",
            "workload.method",
        )
    # A quote in the plan, such as in the model's name, must not end the string literal.
    plan = json.dumps(script_plan(case), indent=1).replace("'", "\\u0027")
    return SCRIPT.replace("@PLAN@", plan)


FULLY_SHARDED = 3  # ZeRO's last stage
# FSDP of packed 4-bit weights, which has no second version yet (accelerate, issue 3874).
# Source: PEFT docs/source/accelerate/fsdp.md; bitsandbytes docs/source/fsdp_qlora.md; TRL,
# SFTTrainer (no cast of norms and adapters to fp32 in such a model).
PACKED_FSDP: JsonObject = {
    "version": 1,
    "use_orig_params": False,
    "cpu_ram_efficient_loading": True,
    "sync_module_states": True,
}
PACKED_NOTE = (
    "ranks share the 4-bit weights by FSDP 1, as PEFT documents it: it needs transformers from "
    "4.45 to 4.57; release 5 loads all of them on every device first, and drops FSDP 1"
)


def script_plan(case: ExportCase) -> JsonObject:
    """Return the values that the plan sets in the script."""
    workload, strategy = train_workload(case), case.strategy
    recomputes = strategy.activation_recomputation not in {None, "none"}
    stage = strategy.zero_stage or 0
    sharded = stage >= 1 and case.devices > 1 and workload.method != "qlora"
    packed = shards_packed_weights(case)
    moved = " offload" if case.offload.weights_cpu else ""
    fsdp: JsonObject = {
        "reshard_after_forward": stage == FULLY_SHARDED,
        "activation_checkpointing": recomputes,
        "cpu_offload": case.offload.weights_cpu > 0,
    }
    return {
        "model": case.model,
        "method": workload.method,
        "lora": _lora(case),
        "optimizer": OPTIMIZERS[optimizer_of(case)],
        "sequence_length": workload.sequence_length,
        "micro_batch_size": strategy.micro_batch_size or 1,
        "gradient_accumulation_steps": strategy.gradient_accumulation_steps or 1,
        "steps": steps_of(case) or DEFAULT_STEPS,
        "compute_dtype": strategy.compute_dtype or "bf16",
        "gradient_checkpointing": recomputes,
        "fused_attention": strategy.attention == "flash",
        "fsdp": PACKED_FSDP if packed else fsdp if sharded else {},
        "fsdp_mode": f"full_shard auto_wrap{moved}" if packed else "",
    }


def shards_packed_weights(case: ExportCase) -> bool:
    """Return whether ranks share the 4-bit weights of a base model: QLoRA under ZeRO 3."""
    is_sharded = case.strategy.zero_stage == FULLY_SHARDED and case.devices > 1
    return train_workload(case).method == "qlora" and is_sharded


def _lora(case: ExportCase) -> JsonObject:
    workload = train_workload(case)
    if workload.method not in {"lora", "qlora"}:
        return {}
    rank = workload.lora_rank or DEFAULT_LORA_RANK
    targets = TARGETS[workload.lora_targets or "all"]
    return {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets}


# Export a plan as a ``torchrun`` command with its training script.


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
    packages[1] += "<5" if shards_packed_weights(case) else ""
    purpose = (
        "the script measures the plan: it reads one text file into memory, and writes no "
        "checkpoint to go on from; give a long run to a trainer of your own"
    )
    notes = [
        purpose,
        f"needs {', '.join(packages)}; DATA names a text file, OUTPUT where the result goes",
    ]
    if steps_of(case) is None:
        notes.append(f"the plan does not say how long it runs: {DEFAULT_STEPS} steps, or STEPS")
    if shards_packed_weights(case):
        notes.append(PACKED_NOTE)
    elif workload.method == "qlora" and strategy.zero_stage and case.devices > 1:
        notes.append(
            f"every rank keeps the 4-bit weights and all states of its adapters: ZeRO "
            f"{strategy.zero_stage} would share these states, which are small"
        )
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


# Export a training plan as a torchtitan configuration: a function over one of its models.


SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "ZBVZeroBubble",
}
RECOMPUTATION = {"full": "FullAC.Config()", "selective": "SelectiveAC.Config()", "none": "None"}
# torchtitan 0.3's configuration of this size computes in float8, which GPUs before SM 8.9 reject
# and the plan does not assume: use another size's configuration with this model.
PLAIN = {"llama3_405b": ("llama3_70b", "405B", "./assets/hf/Llama-3.1-405B")}
MODULE = "slipway_plan"


def torchtitan_text(case: ExportCase) -> str:
    """Return a module for ``--module``, with the run command in its docstring."""
    configuration = configuration_of(case.shape.id)
    if configuration is None:
        raise ValueError(f"torchtitan has no configuration for {case.shape.id}")
    (module, function), lines, imports = configuration, _settings(case), ""
    if function in PLAIN:
        function, flavor, assets = PLAIN[function]
        imports = f"from torchtitan.models.{module} import model_registry\n"
        named = (f'model_spec = model_registry("{flavor}")', f'hf_assets_path = "{assets}"')
        lines = [*named, *lines]
    settings = "".join(f"    config.{line}\n" for line in lines)
    program = ("-m", "torchtitan.train", "--module", MODULE, "--config", "plan")
    command = " ".join(torchrun_arguments(case.nodes, case.devices_per_node, *program))
    return (
        f'"""Run with {command}."""\n\n'
        "from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC\n"
        f"{imports}from torchtitan.models.{module}.config_registry import {function}\n"
        "from torchtitan.trainer import Trainer\n\n\n"
        "def plan() -> Trainer.Config:\n"
        f"    config = {function}()\n{settings}    return config\n"
    )


def _settings(case: ExportCase) -> list[str]:
    workload, strategy = train_workload(case), case.strategy
    recomputation = RECOMPUTATION[strategy.activation_recomputation or "none"]
    micro, steps = strategy.micro_batch_size or 1, strategy.gradient_accumulation_steps or 1
    # A pipeline splits the sequences of a rank into micro-batches.
    local_batch = micro * steps if case.size("pipeline") > 1 else micro
    lines = [
        f"training.local_batch_size = {local_batch}",
        f"training.global_batch_size = {workload.global_batch_size}",
        f"training.seq_len = {workload.sequence_length}",
        *([f"training.steps = {steps_of(case)}"] if steps_of(case) else []),
        *_parallelism(case),
        f"activation_checkpoint = {recomputation}",
    ]
    if workload.method != "pretrain":  # from the weights in hf_assets_path
        lines += ["checkpoint.enable = True", "checkpoint.initial_load_in_hf = True"]
    if (found := case.plan.reliability) is not None:
        pretrains = workload.method == "pretrain"
        lines += ["checkpoint.enable = True"] if pretrains else []
        lines.append(f"checkpoint.interval = {found.checkpoint_interval_steps}")
    if case.offload.optimizer == "cpu" or case.offload.weights_cpu:
        lines.append("training.enable_cpu_offload = True")
    if case.size("pipeline") > 1 or case.size("expert") > 1:
        # The trainer does not support CUDA graphs for either; they are on by default.
        lines.append("training.disable_cuda_graphs = True")
    return lines


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
    """Return notes on settings that the configuration leaves to the user or cannot express."""
    notes = [f"save it as {MODULE}.py; written for torchtitan 0.3", *method_notes(case)]
    if train_workload(case).method != "pretrain":
        notes.append(
            f"it starts from the safetensors of {case.model} in hf_assets_path: download them "
            "with torchtitan's scripts/download_hf_assets.py; set your data set and the learning "
            "rate, which are those of its pre-training"
        )
    if case.strategy.zero_stage in {1, 2}:
        notes.append(
            f"ZeRO {case.strategy.zero_stage}: torchtitan shards the weights too, and keeps them "
            "gathered between forward and backward pass"
        )
    if case.offload.optimizer == "nvme" or case.offload.weights_disk:
        notes.append("torchtitan offloads to host memory only, not to NVMe")
    if case.offload.optimizer == "cpu" and not case.offload.weights_share:
        notes.append("torchtitan moves weights, gradients and optimiser states together")
    if case.offload.activations_cpu:
        notes.append("torchtitan does not move activations: wrap the step in save_on_cpu")
    return tuple(notes)


TORCHTITAN = Format("torchtitan", "torchtitan", f"{MODULE}.py", torchtitan_text, torchtitan_notes)


# ---------------------------------------------------------------------------
# Export a training plan as DeepSpeed's or accelerate's configuration.
# ---------------------------------------------------------------------------


DEEPSPEED_OPTIMIZERS = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD"}
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
    name = DEEPSPEED_OPTIMIZERS.get(optimizer_of(case))
    if name:
        # Without a rate DeepSpeed takes 1e-3; transformers' trainer fills "auto" in.
        config["optimizer"] = {"type": name, "params": {"lr": "auto"}}
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
    if zero["stage"] == PARAMETERS_NEED_STAGE and case.offload.weights_share:
        zero["offload_param"] = _place("nvme" if case.offload.weights_disk else "cpu")
    return zero


def _place(device: str) -> JsonObject:
    return {"device": device, "nvme_path": NVME_PATH} if device == "nvme" else {"device": device}


def deepspeed_notes(case: ExportCase) -> Notes:
    """Return what the configuration leaves to the script or cannot express."""
    notes = [*method_notes(case)]
    if optimizer_of(case) in DEEPSPEED_OPTIMIZERS:
        notes.append(
            'optimizer.params.lr is "auto": transformers\' trainer fills in its learning_rate; a '
            "script without it needs the rate there"
        )
    if shards_packed_weights(case):
        notes.append(
            "ZeRO 3 shares 4-bit weights only if they are stored as bf16 (bnb_4bit_quant_storage) "
            "and the script loads them without a device_map: the torchrun export does, with FSDP"
        )
    notes += layout_notes(case, frozenset({"tensor", "context"}), "this configuration")
    if case.size("pipeline") > 1:
        notes.append(f"build a PipelineModule with num_stages={case.size('pipeline')}")
    if optimizer_of(case) not in DEEPSPEED_OPTIMIZERS:
        notes.append(f"make the optimiser {optimizer_of(case)} in the script")
    notes += _offload_notes(case)
    if case.offload.weights_share and case.strategy.zero_stage != PARAMETERS_NEED_STAGE:
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
    if 0 < offload.weights_share < 1:
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
        if shards_packed_weights(case):
            config["mixed_precision"] = "no"  # the script computes in bf16
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
    if shards_packed_weights(case):
        return {
            "fsdp_version": 1,
            "fsdp_sharding_strategy": "FULL_SHARD",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_offload_params": case.offload.weights_cpu > 0,
            "fsdp_use_orig_params": False,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_sync_module_states": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
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
        "offload_param": parameters if case.offload.weights_share else "none",
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
        *([PACKED_NOTE] if shards_packed_weights(case) else []),
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
