"""Read trainers and their launchers: torchrun, Accelerate, DeepSpeed, TRL, Axolotl, LLaMA-Factory.

A launcher states the devices, the trainer behind it the model, the batch and the method.
"""

import json
import re
from dataclasses import replace
from typing import Any

from planner.imports.documents import options_of
from planner.imports.draft import LARGEST_TOKENS, Draft, Option, Options, shown
from planner.imports.models import add_model
from planner.imports.serving import ignore_rest, ignore_words, read_server
from planner.imports.shell import Arguments, option_table, plain, read_arguments, source_of
from planner.imports.training import (
    NO_FILE,
    TrainDraft,
    add_deepspeed_config,
    add_fsdp_parts,
    read_training,
    rename,
)
from planner.specs.base import BadRequestError, JsonObject

SUPERVISED = (
    "Slipway plans supervised steps: this method also runs a reference or a reward model, or "
    "generates answers, which the draft leaves out"
)
# Names of transformers' TrainingArguments, TRL's ModelConfig and trainers' arguments, and
# LLaMA-Factory's keys, by the common setting. The first of several counts.
HUGGING_FACE = {
    "model_name_or_path": "model",
    "max_length": "sequence_length",
    "max_seq_length": "sequence_length",
    "cutoff_len": "sequence_length",
    "block_size": "sequence_length",
    "model_max_length": "sequence_length",
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "optim": "optimizer",
    "gradient_checkpointing": "recompute",
    "activation_checkpointing": "recompute",  # its name since transformers 5
    "bf16": "bf16",
    "fp16": "fp16",
    "attn_implementation": "attention",
    "flash_attn": "attention",
    "packing": "packing",
    "max_steps": "max_steps",
    "num_train_epochs": "epochs",
    "deepspeed": "deepspeed",
    "fsdp": "fsdp",
    "fsdp_config": "fsdp_config",
    "lora_r": "rank",
    "lora_rank": "rank",
    "lora_target_modules": "targets",
    "lora_target": "targets",
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "fp8": "fp8",
}
# TRL's commands whose trainers do more than supervised steps.
OTHER_COMMANDS = frozenset({"dpo", "grpo", "kto", "reward", "rloo", "orpo", "ppo"})


# ---------------------------------------------------------------------------
# Launchers
# ---------------------------------------------------------------------------


def read_launcher(draft: Draft, words: list[str], files: dict[str, str]) -> None:
    """Read ``torchrun``, ``accelerate launch`` or ``deepspeed`` with the program that it starts.

    Sources: torch/distributed/run.py; accelerate/commands/launch.py; deepspeed/launcher/runner.py.
    """
    table = option_table(draft.kind)
    arguments = read_arguments(words, table, launches=True)
    for source, name in arguments.unknown:
        draft.reject(source, name, table.names | set(table.aliases))
    train = TrainDraft(draft, {})
    {"torchrun": _torchrun, "accelerate": _accelerate, "deepspeed": _deepspeed}[draft.kind](
        train, arguments.options
    )
    ignore_rest(draft, arguments.options, draft.kind)
    if not arguments.positional:
        draft.need("workload", "the launcher names no program")
        draft.need("model", "the launcher names no program")
        return
    read_program(train, arguments.positional, files)


def _torchrun(train: TrainDraft, options: Options) -> None:
    draft = train.draft
    ranks, nodes = draft.take(options, "nproc_per_node"), draft.take(options, "nnodes")
    number = 1
    if nodes is not None and ":" in nodes.text:
        draft.ignore(nodes.source, "a range of nodes: Slipway plans a fixed number")
    elif nodes is not None:
        number = nodes.whole()
    if ranks is not None and ranks.text in {"gpu", "cpu", "auto", "xpu"}:
        draft.ignore(ranks.source, "as many ranks as the machine has devices, which is not stated")
    else:
        _put_world(train, ranks.whole() if ranks else 1, number, _sources(ranks, nodes))


def _accelerate(train: TrainDraft, options: Options) -> None:
    draft = train.draft
    ranks, nodes = draft.take(options, "num_processes"), draft.take(options, "num_machines")
    machines = nodes.whole() if nodes else 1
    if ranks is not None:
        total = ranks.whole()
        if total % machines:
            raise ranks.refusal(f"a multiple of the {machines} machines")
        _put_world(train, total // machines, machines, _sources(ranks, nodes))
    elif nodes is not None:
        draft.ignore(nodes.source, "the processes of a machine are not stated")
    precision = draft.take(options, "mixed_precision")
    if precision is not None:
        _put_precision(draft, precision)
    stage, config = draft.take(options, "zero_stage"), draft.take(options, "config_file")
    if stage is not None:
        draft.put(stage.source, "pins.zero_stage", stage.whole(0, 3))
    if config is not None:
        train.options["deepspeed"] = config
    for name, target in (("deepspeed_config_file", "deepspeed"),):
        option = draft.take(options, name)
        if option is not None:
            train.options[target] = option
    sharded = draft.take(options, "use_fsdp")
    parts = {
        name.removeprefix("fsdp_"): options.pop(name)
        for name in sorted(options)
        if name.startswith("fsdp_")
    }
    if sharded is not None or parts:
        add_fsdp_parts(train, replace(sharded, value="") if sharded else None, parts)


def _deepspeed(train: TrainDraft, options: Options) -> None:
    draft = train.draft
    ranks, nodes = draft.take(options, "num_gpus"), draft.take(options, "num_nodes")
    include = draft.take(options, "include")
    number = nodes.whole() if nodes else 1
    if ranks is not None:
        _put_world(train, ranks.whole(), number, _sources(ranks, nodes))
    elif include is not None and (slots := re.fullmatch(r"[\w.-]+:([\d,]+)", include.text)):
        listed = [slot for slot in slots[1].split(",") if slot]
        _put_world(train, max(1, len(listed)), 1, include.source)
    else:
        for option in (nodes, include):
            if option is not None:
                draft.ignore(option.source, "the devices of a node are not stated")


def _sources(*options: Option | None) -> str:
    return " ".join(option.source for option in options if option) or "one process"


def _put_world(train: TrainDraft, per_node: int, nodes: int, source: str) -> None:
    """Record the devices that a launcher starts a process for."""
    train.world, train.per_node = per_node * nodes, per_node
    train.draft.put(source, "cluster.devices_per_node", per_node)
    if nodes > 1:
        train.draft.put(source, "cluster.nodes", nodes)


def _put_precision(draft: Draft, option: Option) -> None:
    name = option.text.lower()
    if name in {"bf16", "fp16", "fp8"}:
        draft.put(option.source, "pins.compute_dtype", name)
    elif name in {"no", "fp32"}:
        draft.ignore(option.source, "no mixed precision here: the trainer's own arguments decide")
    else:
        raise option.refusal("no, fp16, bf16 or fp8")


def read_program(train: TrainDraft, words: list[str], files: dict[str, str]) -> None:
    """Read the program that a launcher starts, by its arguments.

    Raises:
        BadRequestError: its settings are in a file that the text does not have.
    """
    program, *arguments = words
    name = plain(program).rsplit("/", 1)[-1]
    script = files.get(plain(program))
    if script is not None and (plan := exported_plan(script)) is not None:
        read_exported(train, plan, arguments)
        return
    if name in MEGATRON_PROGRAMS:
        read_megatron(train, arguments)
        return
    configuration = next(
        (plain(word) for word in arguments if word.endswith((".yaml", ".yml"))), ""
    )
    if configuration and ("axolotl" in plain(program) or "llamafactory" in plain(program)):
        raise paste_file(configuration)
    if configuration and len(arguments) == 1:
        raise paste_file(configuration)
    train.draft.ignore(source_of(program), f"{shown(name)} is read by the names of its arguments")
    read_hugging_face(train, arguments)


def paste_file(name: str) -> BadRequestError:
    """Return the error for a command whose settings are in a file."""
    return BadRequestError(
        f"the settings are in {shown(name)}, which is not in the text: paste the content of the "
        "file instead of the command",
        "text",
    )


# ---------------------------------------------------------------------------
# Hugging Face trainers and TRL
# ---------------------------------------------------------------------------


def read_trl(draft: Draft, words: list[str]) -> None:
    """Read ``trl sft …`` and its like.

    Source: TRL, trl/scripts/utils.py, trl/trainer/sft_config.py and model_config.py.
    """
    command, *arguments = words or [""]
    if plain(command) in OTHER_COMMANDS:
        draft.ignore(f"trl {plain(command)}", SUPERVISED)
    read_hugging_face(TrainDraft(draft, {}), arguments)


def read_hugging_face(train: TrainDraft, words: list[str]) -> None:
    """Read the arguments of a script that uses transformers' or TRL's trainers."""
    arguments: Arguments = read_server(train.draft, words, "transformers")
    ignore_words(train.draft, arguments.positional)
    read_hugging_face_options(train, arguments.options)


def read_hugging_face_options(train: TrainDraft, options: Options) -> None:
    """Read arguments of transformers' and TRL's trainers, of a command or of a YAML file."""
    train.options |= {**rename(options, HUGGING_FACE), **train.options}
    draft = train.draft
    peft = draft.take(train.options, "use_peft")
    quantised = _quantised_base(train)
    config = draft.take(train.options, "config")
    if config is not None:
        draft.ignore(config.source, NO_FILE)
    scratch = [draft.take(train.options, name) for name in ("config_name", "config_overrides")]
    if peft is not None and peft.is_on:
        train.method = "qlora" if quantised else "lora"
        draft.put(_sources(peft, quantised), "workload.method", train.method)
    elif peft is not None or quantised is not None:
        source = _sources(peft, quantised)
        draft.ignore(source, "no adapters: full training is planned")
    elif any(scratch) and "model" not in train.options:
        train.method = "pretrain"
        draft.put(_sources(*scratch), "workload.method", train.method)
    read_training(train)
    ignore_rest(draft, train.options, "transformers")


def _quantised_base(train: TrainDraft) -> Option | None:
    """Return the switch of a 4-bit base model if it is on."""
    narrow, eight = train.take_on("load_in_4bit"), train.take_on("load_in_8bit")
    if eight is not None:
        reason = "Slipway plans adapters on 16-bit or 4-bit weights: 16-bit is the draft"
        train.draft.ignore(eight.source, reason)
    return narrow


# ---------------------------------------------------------------------------
# Megatron-LM
# ---------------------------------------------------------------------------


MEGATRON_PROGRAMS = frozenset({"pretrain_gpt.py"})
MEGATRON = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "seq_length": "sequence_length",
    "micro_batch_size": "micro_batch",
    "global_batch_size": "global_batch",
    "train_iters": "max_steps",
    "optimizer": "optimizer",
    "recompute_granularity": "recompute",
    "bf16": "bf16",
    "fp16": "fp16",
}
MEGATRON_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def read_megatron(train: TrainDraft, words: list[str]) -> None:
    """Read the arguments of Megatron-LM's ``pretrain_gpt.py``, whose model is a shape.

    Source: Megatron-LM d98e8a6, megatron/training/arguments.py.
    """
    draft = train.draft
    arguments = read_server(draft, words, "megatron")
    ignore_words(draft, arguments.positional)
    train.options = rename(arguments.options, MEGATRON)
    train.method = "pretrain"
    draft.put("pretrain_gpt.py", "workload.method", train.method)
    options = train.options
    sharding = draft.take(options, "data_parallel_sharding_strategy")
    distributed = draft.take(options, "use_distributed_optimizer")
    if sharding is not None:
        if sharding.text not in MEGATRON_SHARDING:
            raise sharding.refusal(", ".join(MEGATRON_SHARDING))
        draft.put(sharding.source, "pins.zero_stage", MEGATRON_SHARDING[sharding.text])
    elif distributed is not None:
        draft.put(distributed.source, "pins.zero_stage", 1)
    for name, target in (
        ("num_virtual_stages_per_pipeline_rank", "pins.virtual_pipeline_size"),
        ("virtual_pipeline_model_parallel_size", "pins.virtual_pipeline_size"),
    ):
        option = draft.take(options, name)
        if option is not None:
            draft.put(option.source, target, option.whole())
            draft.put(option.source, "pins.pipeline_schedule", "interleaved")
    parallel = draft.take(options, "sequence_parallel")
    if parallel is not None:
        draft.put(parallel.source, "pins.sequence_parallel", parallel.is_on)
    moved, narrow = (
        draft.take(options, "optimizer_cpu_offload"),
        draft.take(options, "grad_reduce_in_bf16"),
    )
    if moved is not None and moved.is_on:
        draft.put(moved.source, "pins.offload", {"optimizer": "cpu"})
    if narrow is not None and narrow.is_on:
        draft.put(narrow.source, "pins.gradient_dtype", "bf16")
    attention = draft.take(options, "attention_backend")
    if attention is not None and attention.text == "flash":
        draft.put(attention.source, "pins.attention", "flash")
    elif attention is not None:
        draft.ignore(attention.source, "Slipway plans eager, flash or flex attention")
    read_training(train)
    ignore_rest(draft, options, "megatron")


PLAN = ("PLAN = json.loads(r'''", "''')")


def exported_plan(script: str) -> JsonObject | None:
    """Return the plan inside a training script that Slipway exported, None for other scripts.

    Source: planner/exports/train_script.py, ``SCRIPT``.
    """
    _, _, rest = script.partition(PLAN[0])
    text, closed, _ = rest.partition(PLAN[1])
    try:
        plan = json.loads(text) if closed else None
    except (ValueError, RecursionError):
        return None
    return plan if isinstance(plan, dict) else None


def read_exported(train: TrainDraft, plan: JsonObject, arguments: list[str]) -> None:
    """Read the plan of a script that Slipway exported, with the launcher's devices."""
    ignore_words(train.draft, arguments)
    draft, options = train.draft, options_of(plan, "PLAN.")
    names = {
        "model": "model",
        "sequence_length": "sequence_length",
        "micro_batch_size": "micro_batch",
        "gradient_accumulation_steps": "accumulation",
        "optimizer": "optimizer",
        "gradient_checkpointing": "recompute",
        "steps": "max_steps",
        "fsdp": "fsdp_config",
    }
    method, lora = options.pop("method", None), options.pop("lora", None)
    if method is not None:
        train.method = method.text
        draft.put(method.source, "workload.method", train.method)
    dtype, fused = options.pop("compute_dtype", None), options.pop("fused_attention", None)
    if dtype is not None:
        draft.put(dtype.source, "pins.compute_dtype", dtype.text)
    if fused is not None:
        draft.put(fused.source, "pins.attention", "flash" if fused.is_on else "eager")
    adapters = (
        options_of(lora.value, "PLAN.lora.") if lora and isinstance(lora.value, dict) else {}
    )
    adapters = rename(adapters, {"r": "rank", "target_modules": "targets"})
    for name in ("rank", "targets"):
        if name in adapters:
            options[name] = adapters[name]
    train.options |= rename(options, names)
    if not isinstance(plan.get("fsdp"), dict) or not plan["fsdp"]:
        train.options.pop("fsdp_config", None)
    read_training(train)
    ignore_rest(draft, train.options, "transformers")


# ---------------------------------------------------------------------------
# Axolotl
# ---------------------------------------------------------------------------


AXOLOTL = {
    "base_model": "model",
    "sequence_len": "sequence_length",
    "micro_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "optimizer": "optimizer",
    "gradient_checkpointing": "recompute",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "fp8": "fp8",
    "attn_implementation": "attention",
    "sample_packing": "packing",
    "max_steps": "max_steps",
    "num_epochs": "epochs",
    "deepspeed": "deepspeed",
    "fsdp": "fsdp",
    "fsdp_config": "fsdp_config",
    "tensor_parallel_size": "tensor",
    "context_parallel_size": "context",
    "sequence_parallel_degree": "context",
    "expert_parallel_size": "expert",
    "lora_r": "rank",
    "lora_target_modules": "targets",
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
}
ATTENTION_SWITCHES = {
    "flash_attention": "flash",
    "sdp_attention": "flash",
    "xformers_attention": "flash",
    "flex_attention": "flex",
    "eager_attention": "eager",
}


def read_axolotl(draft: Draft, document: JsonObject) -> None:
    """Read a configuration file of Axolotl.

    Source: axolotl-ai-cloud/axolotl, src/axolotl/utils/schemas (2026-07).
    """
    options = _options_of_file(draft, document, "axolotl")
    train = TrainDraft(draft, rename(options, AXOLOTL))
    adapter, scratch = (
        train.options.pop("adapter", None),
        train.options.pop("reinit_weights", None),
    )
    quantised = _quantised_base(train)
    if adapter is not None and adapter.text.lower() in {"lora", "qlora"}:
        is_narrow = adapter.text.lower() == "qlora" or quantised is not None
        train.method = "qlora" if is_narrow else "lora"
        draft.put(_sources(adapter, quantised), "workload.method", train.method)
    elif adapter is not None:
        draft.ignore(adapter.source, "Slipway plans lora and qlora; full training is the draft")
    elif scratch is not None and scratch.is_on:
        train.method = "pretrain"
        draft.put(scratch.source, "workload.method", train.method)
    elif quantised is not None:
        draft.ignore(quantised.source, "no adapter: full training is planned")
    linear = train.options.pop("lora_target_linear", None)
    if linear is not None and linear.is_on and "targets" not in train.options:
        train.options["targets"] = replace(linear, value="all")
    elif linear is not None:
        draft.ignore(linear.source, "off, or stated by lora_target_modules")
    _attention_switches(train)
    preference = train.options.pop("rl", None)
    if preference is not None:
        draft.ignore(preference.source, SUPERVISED)
    _axolotl_devices(train)
    read_training(train)
    ignore_rest(draft, train.options, "axolotl")


def _attention_switches(train: TrainDraft) -> None:
    for name, kind in ATTENTION_SWITCHES.items():
        option = train.options.pop(name, None)
        if option is None:
            continue
        if option.is_on and "attention" not in train.options:
            train.options["attention"] = replace(option, value=kind)
        else:
            train.draft.ignore(option.source, "off, or another kind of attention is stated")


def _axolotl_devices(train: TrainDraft) -> None:
    """Record data-parallel groups, if the file states them, and with them the devices."""
    shard, replicate = train.options.pop("dp_shard_size", None), train.options.pop(
        "dp_replicate_size", None
    )  # fmt: skip
    if shard is None and replicate is None:
        return
    width, copies = (option.whole() if option else 1 for option in (shard, replicate))
    axes = ("tensor", "context")
    inner = [train.options[axis].whole() for axis in axes if axis in train.options]
    world = width * copies
    for size in inner:
        world *= size
    train.world = world
    if copies > 1 and width > 1:
        train.draft.put(_sources(shard, replicate), "pins.zero_shard_size", width)
    else:
        reason = "the data-parallel ranks, from which the number of devices follows"
        train.draft.ignore(_sources(shard, replicate), reason)


def _options_of_file(draft: Draft, document: JsonObject, tool: str) -> Options:
    """Return the keys of a file that the tool knows; record the others."""
    table, options = option_table(tool), options_of(document)
    for key in map(str, document):
        if key not in table.names and key not in table.aliases:
            option = options.pop(key, None)
            draft.reject(option.source if option else shown(f"{key}:"), key, table.names)
    return options


# ---------------------------------------------------------------------------
# LLaMA-Factory
# ---------------------------------------------------------------------------


LLAMA_FACTORY = {
    **HUGGING_FACE,
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context",
    "cp_size": "context",
    "expert_model_parallel_size": "expert",
    "recompute_granularity": "recompute",
}
STAGES = frozenset({"sft", "pt"})
ENGINES = {"vllm": "vllm", "sglang": "sglang", "huggingface": "transformers"}
EXPORT_METHODS = {"gptq": "gptq", "awq": "awq"}


def read_llama_factory(draft: Draft, options: Options) -> None:
    """Read a file of LLaMA-Factory: of a training, of a chat or an API, or of an export.

    Source: hiyouga/LLaMA-Factory, src/llamafactory/hparams (2026-08).
    """
    if "export_dir" in options:
        _llama_factory_export(draft, options)
    elif "infer_backend" in options and "output_dir" not in options:
        _llama_factory_chat(draft, options)
    else:
        draft.goal = "train"
        _llama_factory_training(draft, options)
    ignore_rest(draft, options, "llama_factory")


def read_llama_factory_file(draft: Draft, document: JsonObject) -> None:
    """Read the keys of a YAML file of LLaMA-Factory."""
    read_llama_factory(draft, _options_of_file(draft, document, "llama_factory"))


def _llama_factory_training(draft: Draft, options: Options) -> None:
    train = TrainDraft(draft, rename(options, LLAMA_FACTORY))
    options.clear()
    stage, kind = train.options.pop("stage", None), train.options.pop("finetuning_type", None)
    scratch, bits = train.options.pop("train_from_scratch", None), train.options.pop(
        "quantization_bit", None
    )  # fmt: skip
    text = kind.text.lower() if kind else "lora"
    if stage is not None and stage.text.lower() in STAGES:
        draft.ignore(stage.source, "supervised steps on the tokens of the texts")
    elif stage is not None:
        draft.ignore(stage.source, SUPERVISED)
    if scratch is not None and scratch.is_on:
        train.method = "pretrain"
        draft.put(scratch.source, "workload.method", train.method)
    elif text == "lora":
        narrow = bits if bits is not None and bits.text == "4" else None
        train.method = "qlora" if narrow else "lora"
        draft.put(_sources(kind, narrow) if kind else "finetuning_type: lora (the default)",
                  "workload.method", train.method)  # fmt: skip
        bits = None if narrow else bits
    elif kind is not None and text == "full":
        draft.put(kind.source, "workload.method", "full")
    if kind is not None and text not in {"lora", "full"}:
        draft.ignore(
            kind.source, f"Slipway does not model {shown(text)}: full training is the draft"
        )
    if bits is not None:
        reason = "Slipway plans adapters on 16-bit or 4-bit weights: 16-bit is the draft"
        draft.ignore(bits.source, reason)
    pure = train.options.pop("pure_bf16", None)
    if pure is not None and pure.is_on:
        train.options.setdefault("bf16", pure)
        draft.put(pure.source, "pins.optimizer_dtype", "bf16")
    _without_recompute(train)
    read_training(train)
    options |= train.options


def _without_recompute(train: TrainDraft) -> None:
    """Record recomputation, which LLaMA-Factory has on unless it is switched off."""
    off = train.options.pop("disable_gradient_checkpointing", None)
    if off is not None and off.is_on:
        train.options["recompute"] = replace(off, value="false")
    elif off is not None:
        train.draft.ignore(off.source, "off, as without it")
    if "recompute" not in train.options:
        source = "gradient checkpointing (on by default)"
        train.options["recompute"] = Option("recompute", "true", source, source)


def _llama_factory_chat(draft: Draft, options: Options) -> None:
    """Read a chat or an API: its engine, its longest request and its share of memory."""
    draft.goal = "serve"
    backend = options.pop("infer_backend")
    engine = ENGINES.get(backend.text.lower())
    if engine:
        draft.put(backend.source, "engine", engine)
    else:
        draft.ignore(backend.source, "Slipway does not know this engine of LLaMA-Factory")
    model = options.pop("model_name_or_path", None)
    if model is None:
        draft.need("model", "the file names none")
    else:
        add_model(draft, model.source, model.text)
    for name in ("vllm_maxlen", "sglang_maxlen"):
        option = options.pop(name, None)
        if option is not None:
            longest = option.whole(most=LARGEST_TOKENS)
            draft.put(option.source, "workload.max_request_tokens", longest)
    for name in ("vllm_gpu_util", "sglang_mem_fraction"):
        option = options.pop(name, None)
        if option is not None:
            share = option.number(0.01, 1.0)
            draft.put(option.source, "pins.gpu_memory_utilization", share)
    size = options.pop("sglang_tp_size", None)
    if size is not None and size.text != "-1":
        draft.put(size.source, "pins.tensor_parallel_size", size.whole())
        draft.put(size.source, "cluster.devices_per_node", size.whole())
    draft.need("workload.input_tokens", "tokens of a typical prompt")
    draft.need("workload.output_tokens", "tokens of a typical answer")


def _llama_factory_export(draft: Draft, options: Options) -> None:
    """Read an export: a quantisation, or a merge, which needs no plan."""
    bits, model = options.pop("export_quantization_bit", None), options.pop(
        "model_name_or_path", None
    )  # fmt: skip
    if model is not None:
        add_model(draft, model.source, model.text)
    if bits is None:
        draft.need("workload", "merging an adapter is no work that Slipway plans")
        return
    draft.goal = "compress"
    draft.put(bits.source, "workload.method", "gptq")
    draft.put(bits.source, "workload.bits", bits.whole(1, 16))
    samples, length = (
        options.pop("export_quantization_nsamples", None),
        options.pop("export_quantization_maxlen", None),
    )
    if samples and length:
        tokens = samples.whole(most=LARGEST_TOKENS) * length.whole(most=LARGEST_TOKENS)
        draft.put(_sources(samples, length), "workload.calibration_tokens", tokens)
    else:
        for option in (samples, length):
            if option is not None:
                draft.ignore(option.source, "calibration tokens are samples times their length")


# ---------------------------------------------------------------------------
# Configurations of DeepSpeed and Accelerate alone
# ---------------------------------------------------------------------------


def read_deepspeed_config(draft: Draft, document: JsonObject) -> None:
    """Read DeepSpeed's JSON configuration by itself."""
    train = TrainDraft(draft, {})
    draft.need("workload.method", "the launcher's file states none: full, lora, qlora …")
    add_deepspeed_config(train, options_of(document))
    read_training(train)


def read_accelerate_config(draft: Draft, document: JsonObject) -> None:
    """Read the file of ``accelerate launch --config_file``.

    Source: accelerate/commands/config/config_args.py.
    """
    options = _options_of_file(draft, document, "accelerate_config")
    train = TrainDraft(draft, {})
    ranks, nodes = options.pop("num_processes", None), options.pop("num_machines", None)
    machines, kind = nodes.whole() if nodes else 1, options.pop("distributed_type", None)
    if ranks is not None:
        total = ranks.whole()
        if total % machines:
            raise ranks.refusal(f"a multiple of num_machines, {machines}")
        _put_world(train, total // machines, machines, _sources(ranks, nodes))
    precision = options.pop("mixed_precision", None)
    if precision is not None:
        _put_precision(draft, precision)
    name = kind.text.upper() if kind else "NO"
    if kind is not None:
        draft.ignore(kind.source, "the keys below it state the sharding")
    fsdp, deepspeed = options.pop("fsdp_config", None), options.pop("deepspeed_config", None)
    if fsdp is not None and name == "FSDP" and isinstance(fsdp.value, dict):
        read = options_of(fsdp.value, "fsdp_config.")
        add_fsdp_parts(train, None, {key.removeprefix("fsdp_"): read[key] for key in read})
    if deepspeed is not None and name == "DEEPSPEED" and isinstance(deepspeed.value, dict):
        _accelerate_deepspeed(train, options_of(deepspeed.value, "deepspeed_config."))
    for option, used in ((fsdp, "FSDP"), (deepspeed, "DEEPSPEED")):
        if option is not None and name != used:
            draft.ignore(option.source, f"distributed_type is {shown(name)}, not {used}")
    draft.need("workload.method", "the launcher's file states none: full, lora, qlora …")
    read_training(train)
    ignore_rest(draft, options, "accelerate_config")


def _accelerate_deepspeed(train: TrainDraft, options: Options) -> None:
    """Read Accelerate's flat keys of DeepSpeed as those of DeepSpeed's own configuration."""
    zero: dict[str, Any] = {}
    for name, target in (("zero_stage", "stage"),):
        if name in options:
            zero[target] = options.pop(name).value
    for name in ("offload_optimizer", "offload_param"):
        device = options.pop(f"{name}_device", None)
        options.pop(f"{name}_nvme_path", None)
        if device is not None:
            zero[name] = {"device": device.value}
    steps, file = options.pop("gradient_accumulation_steps", None), options.pop(
        "deepspeed_config_file", None
    )  # fmt: skip
    own: Options = {}
    if zero:
        own["zero_optimization"] = Option(
            "zero_optimization", zero, shown(f"deepspeed_config: {zero}"), "deepspeed_config"
        )
    if steps is not None:
        own["gradient_accumulation_steps"] = steps
    add_deepspeed_config(train, own)
    if file is not None:
        train.options["deepspeed"] = file
    for option in options.values():
        train.draft.ignore(
            option.source, "no effect on the plan: how weights are loaded and saved"
        )
