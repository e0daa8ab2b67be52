"""Read trainers' command lines: of launchers, Hugging Face trainers, TRL and Megatron-LM.

A launcher states the devices, the trainer behind it the model, the batch and the method; which
trainer that is, ``programs`` finds out.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from planner.imports.documents import options_of
from planner.imports.draft import Draft, Option, Options, shown
from planner.imports.on_policy import add_completions
from planner.imports.shell import (
    Arguments,
    ignore_rest,
    ignore_words,
    option_table,
    plain,
    read_arguments,
    read_options,
)
from planner.imports.training import (
    NO_FILE,
    TrainDraft,
    add_fsdp_parts,
    add_place,
    read_training,
    rename,
)
from planner.specs.base import BadRequestError, JsonObject
from planner.specs.workload import REFERENCE_OBJECTIVES, TrainObjective

SUPERVISED = (
    "Slipway plans supervised steps in its place: this method also runs another model, generates "
    "answers or has a loss of its own, which the plan leaves out"
)
OTHER_LOSS = "Slipway plans the usual loss of {}, of the same memory and time"
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
    "packing_strategy": "packing_strategy",
    "activation_offloading": "activation_offload",
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
    "dataset_name": "data_repository",
    "dataset": "data_repository",
    "dataset_config": "data_subset",
    "dataset_config_name": "data_subset",
    "dataset_train_split": "data_split",
}
DEFAULT_MICRO_BATCH = 8  # transformers 5, src/transformers/training_args.py
ON_POLICY_DISTILLATION = "on-policy distillation"  # of `trl distillation`
# What trainers that do more than supervised steps are called, by words of their scripts' names.
PREFERENCE = {
    "dpo": "DPO",
    "grpo": "GRPO",
    "kto": "KTO",
    "ppo": "PPO",
    "orpo": "ORPO",
    "cpo": "CPO",
    "simpo": "SimPO",
    "ipo": "IPO",
    "bco": "BCO",
    "xpo": "XPO",
    "rloo": "RLOO",
    "gspo": "GSPO",
    "dapo": "DAPO",
    "gkd": "generalised knowledge distillation",
    "minillm": "distillation",
    "gold": "distillation",
    "distillation": ON_POLICY_DISTILLATION,
    "distill": "distillation",
    "nash": "Nash-MD",
    "prm": "a process reward model",
    "reward": "a reward model",
    "rm": "a reward model",
    "rlhf": "reinforcement learning",
}
# Those that a plan has an objective for, by what they are called; IPO is DPO with another loss.
OBJECTIVES: Mapping[str, TrainObjective] = {
    "DPO": "dpo",
    "IPO": "dpo",
    "KTO": "kto",
    "ORPO": "orpo",
    "a reward model": "reward",
    "GRPO": "grpo",
    ON_POLICY_DISTILLATION: "distillation",
}
USUAL_LOSSES = frozenset(
    {"sigmoid", "kto", "grpo", "dapo", "['sigmoid']", "['kto']", "['grpo']", "['dapo']"}
)
SOME_PREFERENCE = "preference training"  # of arguments that several methods have
# Arguments that only such trainers have. Source: TRL 2026-07, the configurations in trl/trainer.
PREFERENCE_ARGUMENTS = {
    "beta": SOME_PREFERENCE,
    "desirable_weight": "KTO",
    "undesirable_weight": "KTO",
    "num_generations": "GRPO",
    "reward_funcs": "GRPO",
    "reward_weights": "GRPO",
    "max_completion_length": "GRPO",
    "steps_per_generation": "GRPO",
    "max_prompt_length": SOME_PREFERENCE,
    "precompute_ref_log_probs": SOME_PREFERENCE,
    "sync_ref_model": SOME_PREFERENCE,
    "reward_model_path": "PPO",
    "reward_model_name_or_path": "PPO",
    "sft_model_path": "PPO",
    "num_ppo_epochs": "PPO",
    "kl_coef": "PPO",
    "cliprange": "PPO",
    "total_episodes": "PPO",
    "rloo_k": "RLOO",
    "cpo_alpha": "CPO",
    "simpo_gamma": "SimPO",
    "center_rewards_coefficient": "a reward model",
    "teacher_model_name_or_path": "distillation",
}


# ---------------------------------------------------------------------------
# Launchers
# ---------------------------------------------------------------------------


def _torchrun(train: TrainDraft, options: Options) -> None:
    draft = train.draft
    ranks, nodes = draft.take(options, "nproc_per_node"), draft.take(options, "nnodes")
    number = 1
    if nodes is not None and ":" in nodes.text:
        draft.ignore(nodes.source, "a range of nodes: Slipway plans a fixed number")
        nodes = None
    elif nodes is not None:
        number = nodes.whole()
    if ranks is not None and ranks.text in {"gpu", "cpu", "auto", "xpu"}:
        draft.ignore(ranks.source, "as many ranks as the machine has devices, which is not stated")
    else:
        put_world(train, ranks.whole() if ranks else 1, number, sources(ranks, nodes))


def _accelerate(train: TrainDraft, options: Options) -> None:
    draft = train.draft
    ranks, nodes = draft.take(options, "num_processes"), draft.take(options, "num_machines")
    machines = nodes.whole() if nodes else 1
    if ranks is not None:
        total = ranks.whole()
        if total % machines:
            raise ranks.refusal(f"a multiple of the {machines} machines")
        put_world(train, total // machines, machines, sources(ranks, nodes))
    elif nodes is not None:
        draft.ignore(nodes.source, "the processes of a machine are not stated")
    precision = draft.take(options, "mixed_precision")
    if precision is not None:
        put_precision(draft, precision)
    stage, config = draft.take(options, "zero_stage"), draft.take(options, "config_file")
    if stage is not None:
        draft.put(stage.source, "pins.zero_stage", stage.whole(0, 3))
    if config is not None:
        train.options["deepspeed"] = config
    for name, target in (
        ("deepspeed_config_file", "deepspeed"),
        ("gradient_accumulation_steps", "accumulation"),
    ):
        option = draft.take(options, name)
        if option is not None:
            train.options[target] = option
    for name in ("offload_optimizer_device", "offload_param_device"):
        option = draft.take(options, name)
        if option is not None:
            add_place(draft, name, option)
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
        put_world(train, ranks.whole(), number, sources(ranks, nodes))
    elif include is not None and (slots := re.fullmatch(r"[\w.-]+:([\d,]+)", include.text)):
        listed = [slot for slot in slots[1].split(",") if slot]
        put_world(train, max(1, len(listed)), 1, include.source)
    else:
        for option in (nodes, include):
            if option is not None:
                draft.ignore(option.source, "the devices of a node are not stated")


def sources(*options: Option | None) -> str:
    """Return the texts of the options that are stated, as one."""
    return " ".join(option.source for option in options if option) or "one process"


def put_world(train: TrainDraft, per_node: int, nodes: int, source: str) -> None:
    """Record the devices that a launcher starts a process for."""
    train.world, train.per_node = per_node * nodes, per_node
    train.draft.put(source, "cluster.devices_per_node", per_node)
    if nodes > 1:
        train.draft.put(source, "cluster.nodes", nodes)


def put_precision(draft: Draft, option: Option) -> None:
    """Record the precision that a launcher sets, of compute and gradients."""
    name = option.text.lower()
    if name in {"bf16", "fp16", "fp8"}:
        draft.put(option.source, "pins.compute_dtype", name)
    elif name in {"no", "fp32"}:
        draft.ignore(option.source, "no mixed precision here: the trainer's own arguments decide")
    else:
        raise option.refusal("no, fp16, bf16 or fp8")


def paste_file(name: str) -> BadRequestError:
    """Return the error for a command whose settings are in a file."""
    return BadRequestError(
        f"the settings are in {shown(name)}, which is not in the text: paste the content of the "
        "file instead of the command",
        "text",
    )


LAUNCHERS: dict[str, Callable[[TrainDraft, Options], None]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
}


# ---------------------------------------------------------------------------
# Hugging Face trainers and TRL
# ---------------------------------------------------------------------------


def read_trl(draft: Draft, words: list[str], train: TrainDraft | None = None) -> None:
    """Read ``trl sft …`` and its like, which pass Accelerate's options on to it.

    ``train`` has the devices of a launcher before it.

    Source: TRL, trl/cli, trl/scripts/utils.py, trl/trainer/sft_config.py and model_config.py.
    """
    command, *arguments = words or [""]
    add_preference(draft, f"trl {plain(command)}", plain(command), arguments)
    own, launcher = option_table("transformers"), option_table("accelerate")
    passed: list[str] = []
    kept: list[str] = []
    target = kept
    for word in arguments:
        if word.startswith("--"):
            name = word.partition("=")[0]
            is_passed = own.name_of(name) is None and launcher.name_of(name) is not None
            target = passed if is_passed else kept
        target.append(word)
    train = train or TrainDraft(draft, {})
    options = read_arguments(passed, launcher).options
    _accelerate(train, options)
    ignore_rest(draft, options, "accelerate")
    read_hugging_face(train, kept)


def preference_of(program: str, arguments: Iterable[str]) -> str | None:
    """Return the method of a trainer that does more than supervised steps, None for others.

    It is known by a word of its script, module or command, or by an argument that no supervised
    trainer has.
    """
    stem = program.replace("\\", "/").removesuffix(".py")
    last = re.split(r"[/.]", stem)[-1]
    for word in re.split(r"[^a-z0-9]+", last.lower()):
        if word in PREFERENCE:
            return PREFERENCE[word]
    names = (each.partition("=")[0] for each in arguments if each.startswith("-"))
    named = preference_argument(name.lstrip("-").replace("-", "_") for name in names)
    return PREFERENCE_ARGUMENTS[named] if named else None


def preference_argument(names: Iterable[str]) -> str | None:
    """Return the argument that tells the method best: one that a single method has, in any order.

    None if no argument is of preference training.
    """
    known = [name for name in names if name in PREFERENCE_ARGUMENTS]
    own = (name for name in known if PREFERENCE_ARGUMENTS[name] != SOME_PREFERENCE)
    return next(own, next(iter(known), None))


def add_preference(draft: Draft, source: str, program: str, arguments: Iterable[str]) -> bool:
    """Record a trainer that does more than supervised steps; return whether it does."""
    method = preference_of(program, arguments)
    if method is not None:
        put_objective(draft, source, method)
    return method is not None


def put_objective(draft: Draft, source: str, method: str) -> None:
    """Record what a trainer's loss compares; say so if a plan has no objective for it.

    The first of several sources counts.
    """
    objective = OBJECTIVES.get(method)
    if objective is None:
        draft.assume(source, f"it trains by {method}. {SUPERVISED}")
    elif draft.value("workload.objective") is None:
        draft.put(source, "workload.objective", objective)
        if method == "IPO":
            draft.assume(source, OTHER_LOSS.format("DPO"))


def add_preference_options(draft: Draft, options: Options) -> None:
    """Record the loss and the reference's precomputed answers of a trainer that compares."""
    objective = draft.value("workload.objective")
    if objective is None:
        return
    loss, ahead = (draft.take(options, name) for name in ("loss_type", "precompute_ref_log_probs"))
    if loss is not None and loss.text.lower() not in USUAL_LOSSES:
        draft.assume(loss.source, OTHER_LOSS.format(objective.upper()))
    elif loss is not None:
        draft.ignore(loss.source, "the usual loss")
    if ahead is not None and ahead.is_on and objective in REFERENCE_OBJECTIVES:
        draft.put(ahead.source, "workload.precompute_reference", value=True)
    elif ahead is not None:
        draft.ignore(ahead.source, "off, or without a reference")


def read_hugging_face(train: TrainDraft, words: list[str], *, is_known: bool = True) -> None:
    """Read the arguments of a script that uses transformers' or TRL's trainers.

    One that is not known to use them has none of their defaults.
    """
    arguments: Arguments = read_options(train.draft, words, "transformers")
    ignore_words(train.draft, arguments.positional)
    read_hugging_face_options(train, arguments.options, is_known=is_known)


def read_hugging_face_options(
    train: TrainDraft, options: Options, *, is_known: bool = True
) -> None:
    """Read arguments of transformers' and TRL's trainers, of a command or of a YAML file."""
    train.options |= {**rename(options, HUGGING_FACE), **train.options}
    draft = train.draft
    add_preference_options(draft, train.options)
    add_completions(train)
    accumulation = train.options.get("accumulation")
    is_stated = accumulation is not None and accumulation.text.lower() != "auto"
    if is_known and is_stated and "micro_batch" not in train.options:
        source = f"per_device_train_batch_size {DEFAULT_MICRO_BATCH} (the default)"
        train.options["micro_batch"] = Option("micro_batch", DEFAULT_MICRO_BATCH, source)
    peft = draft.take(train.options, "use_peft")
    quantised = quantised_base(train)
    config = draft.take(train.options, "config")
    if config is not None:
        draft.ignore(config.source, NO_FILE)
    scratch = [draft.take(train.options, name) for name in ("config_name", "config_overrides")]
    adapters = peft or (None if draft.kind == "trl" else train.options.get("rank"))
    if adapters is not None and (adapters is not peft or adapters.is_on):
        train.method = "qlora" if quantised else "lora"
        draft.put(sources(adapters, quantised), "workload.method", train.method)
        peft = quantised = None
    elif any(scratch) and "model" not in train.options:
        train.method = "pretrain"
        draft.put(sources(*scratch), "workload.method", train.method)
        if scratch[0] is not None:  # the shape is that of a published model
            train.options["model"] = replace(scratch[0], name="model")
        scratch = []
    for option in (peft, quantised):
        if option is not None:
            draft.ignore(option.source, "no adapters: full training is planned")
    for option in scratch:
        if option is not None:
            draft.ignore(option.source, "the model's weights are stated: they are trained")
    read_training(train)
    ignore_rest(draft, train.options, "transformers")


def quantised_base(train: TrainDraft) -> Option | None:
    """Return the switch of a 4-bit base model if it is on."""
    narrow, eight = train.take_on("load_in_4bit"), train.take_on("load_in_8bit")
    if eight is not None:
        reason = "Slipway plans adapters on 16-bit or 4-bit weights: 16-bit is the draft"
        train.draft.assume(eight.source, reason)
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
    arguments = read_options(draft, words, "megatron")
    ignore_words(draft, arguments.positional)
    train.options = rename(arguments.options, MEGATRON)
    options = train.options
    tuned = draft.take(options, "finetune")
    train.method = "full" if tuned is not None else "pretrain"
    source = tuned.source if tuned is not None else "pretrain_gpt.py"
    draft.put(source, "workload.method", train.method)
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
    for name, field, value in (
        ("optimizer_cpu_offload", "pins.offload", {"optimizer": "cpu"}),
        ("grad_reduce_in_bf16", "pins.gradient_dtype", "bf16"),
    ):
        switch = draft.take(options, name)
        if switch is not None and switch.is_on:
            draft.put(switch.source, field, value)
        elif switch is not None:
            draft.ignore(switch.source, "off, as without it")
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
        "fsdp_mode": "fsdp",
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
    if not plan.get("fsdp_mode"):
        train.options.pop("fsdp", None)
    read_training(train)
    ignore_rest(draft, train.options, "transformers")
