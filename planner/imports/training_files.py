"""Read trainers' files: Axolotl, LLaMA-Factory, TRL, and DeepSpeed's and Accelerate's alone."""

from dataclasses import replace
from typing import Any

from planner.imports.documents import options_of
from planner.imports.draft import LARGEST_TOKENS, Draft, Option, Options, shown
from planner.imports.models import add_model
from planner.imports.on_policy import OF_COMPLETIONS, add_completions
from planner.imports.shell import ignore_rest, ignore_words, option_table, read_options
from planner.imports.trainers import (
    HUGGING_FACE,
    PREFERENCE,
    PREFERENCE_ARGUMENTS,
    add_preference_options,
    preference_argument,
    put_objective,
    put_precision,
    put_world,
    quantised_base,
    read_hugging_face_options,
    sources,
)
from planner.imports.training import (
    TrainDraft,
    add_deepspeed_config,
    add_fsdp_parts,
    read_training,
    rename,
)
from planner.specs.base import JsonObject

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
    "activation_offloading": "activation_offload",
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
    "dpo_loss_type": "loss_type",
}
AXOLOTL_REWARDS = {
    "reward_model": "a reward model",
    "process_reward_model": "a process reward model",
}
AXOLOTL_PARTS = {"data_files", "data_dir", "shards"}  # they choose some of the data
AXOLOTL_DATA = {"path": "data_repository", "name": "data_subset", "split": "data_split"}
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
    quantised = quantised_base(train)
    if adapter is not None and adapter.text.lower() in {"lora", "qlora"}:
        is_narrow = adapter.text.lower() == "qlora" or quantised is not None
        train.method = "qlora" if is_narrow else "lora"
        draft.put(sources(adapter, quantised), "workload.method", train.method)
        quantised = None
    elif adapter is not None:
        draft.assume(adapter.source, "Slipway plans lora and qlora; full training is the draft")
    elif scratch is not None and scratch.is_on:
        train.method = "pretrain"
        draft.put(scratch.source, "workload.method", train.method)
        scratch = None
    if quantised is not None:
        draft.ignore(quantised.source, "no adapter: full training is planned")
    if scratch is not None:
        draft.ignore(scratch.source, "off, or adapters on the model's weights")
    linear = train.options.pop("lora_target_linear", None)
    if linear is not None and linear.is_on and "targets" not in train.options:
        train.options["targets"] = replace(linear, value="all")
    elif linear is not None:
        draft.ignore(linear.source, "off, or stated by lora_target_modules")
    _attention_switches(train)
    _axolotl_data(train)
    preference = train.options.pop("rl", None)
    if preference is not None:
        method = PREFERENCE.get(preference.text.lower(), shown(preference.text))
        put_objective(draft, preference.source, method)
    for key, method in AXOLOTL_REWARDS.items():
        option = train.options.get(key)
        if option is not None and option.is_on:
            put_objective(draft, train.options.pop(key).source, method)
    add_preference_options(draft, train.options)
    _axolotl_devices(train)
    _axolotl_completions(train)
    read_training(train)
    ignore_rest(draft, train.options, "axolotl")


def _axolotl_completions(train: TrainDraft) -> None:
    """Record the completions of GRPO, which Axolotl has under ``trl`` by TRL's names.

    Source: axolotl-ai-cloud/axolotl, src/axolotl/utils/schemas/trl.py.
    """
    section = train.options.get("trl")
    if train.draft.value("workload.objective") != "grpo":
        return
    own: Options = {}
    if section is not None and isinstance(section.value, dict):
        own = options_of(train.options.pop("trl").value, "trl.")
    host = own.get("vllm_server_host")
    if host is not None:
        own["vllm_mode"] = replace(own.pop("vllm_server_host"), name="vllm_mode", value="server")
    train.options |= {name: option for name, option in own.items() if name in OF_COMPLETIONS}
    add_completions(train)
    for name in [each for each in own if each not in OF_COMPLETIONS]:
        train.draft.ignore(
            own[name].source, "no effect on the plan: sampling, and the engine's own"
        )


def _axolotl_data(train: TrainDraft) -> None:
    """Record the data set of a file that names one."""
    option = train.options.pop("datasets", None)
    if option is None:
        return
    rows = option.value if isinstance(option.value, list) else [option.value]
    if len(rows) != 1 or not isinstance(rows[0], dict):
        train.draft.ignore(option.source, f"{len(rows)} data sets: a plan names one of the Hub")
        return
    if narrowed := sorted(AXOLOTL_PARTS & set(rows[0])):
        reason = f"{', '.join(narrowed)}: a plan names a whole split of a data set of the Hub"
        train.draft.ignore(option.source, reason)
        return
    if revision := rows[0].pop("revision", None):
        rows[0]["path"] = f"{rows[0].get('path')}@{revision}"
    for key, name in AXOLOTL_DATA.items():
        if (value := rows[0].get(key)) not in (None, ""):
            source = shown(f"datasets.{key}: {value}")
            train.options[name] = replace(option, name=name, value=value, source=source)
    for key in sorted(set(map(str, rows[0])) - set(AXOLOTL_DATA)):
        reason = "no field of a plan: the columns of the data say how it is read"
        train.draft.ignore(shown(f"datasets.{key}: {rows[0].get(key)}"), reason)


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
    train.draft.put(sources(shard, replicate), "pins.data_parallel_size", width * copies)
    if copies > 1 and width > 1:
        train.draft.put(sources(shard, replicate), "pins.zero_shard_size", width)


def _options_of_file(draft: Draft, document: JsonObject, tool: str) -> Options:
    """Return the keys of a file that the tool knows; record the others."""
    table, options = option_table(tool), options_of(document)
    for key in map(str, document):
        if key not in table.names and key not in table.aliases:
            option = options.pop(key, None)
            draft.reject(option.source if option else shown(f"{key}:"), key, table.names)
        elif document[key] in (None, ""):
            draft.ignore(shown(f"{key}:"), "empty: as without it")
    return options


def read_trl_file(draft: Draft, document: JsonObject) -> None:
    """Read a YAML file of arguments of TRL's or transformers' trainers."""
    options = _options_of_file(draft, document, "transformers")
    if named := preference_argument(options):
        put_objective(draft, options[named].source, PREFERENCE_ARGUMENTS[named])
    read_hugging_face_options(TrainDraft(draft, {}), options)


# ---------------------------------------------------------------------------
# LLaMA-Factory
# ---------------------------------------------------------------------------


OTHER_LENGTHS = frozenset({"max_length", "max_seq_length", "block_size", "model_max_length"})
LLAMA_FACTORY = {
    **{name: HUGGING_FACE[name] for name in HUGGING_FACE if name not in OTHER_LENGTHS},
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context",
    "cp_size": "context",
    "expert_model_parallel_size": "expert",
    "recompute_granularity": "recompute",
}
STAGES = frozenset({"sft", "pt"})
ENGINES = {"vllm": "vllm", "sglang": "sglang", "huggingface": "transformers"}


def read_llama_factory_line(train: TrainDraft, words: list[str]) -> None:
    """Read LLaMA-Factory's arguments behind a launcher or Python, which state the devices."""
    arguments = read_options(train.draft, words, "llama_factory")
    ignore_words(train.draft, arguments.positional)
    read_llama_factory(train.draft, arguments.options, train)


def read_llama_factory(draft: Draft, options: Options, train: TrainDraft | None = None) -> None:
    """Read settings of LLaMA-Factory: of a training, of a chat or an API, or of an export.

    ``train`` has the devices of a launcher.

    Source: hiyouga/LLaMA-Factory, src/llamafactory/hparams (2026-08).
    """
    if "export_dir" in options:
        _llama_factory_export(draft, options)
    elif "infer_backend" in options and "output_dir" not in options:
        _llama_factory_chat(draft, options)
    else:
        draft.goal = "train"
        _llama_factory_training(train or TrainDraft(draft, {}), options)
    ignore_rest(draft, options, "llama_factory")


def read_llama_factory_file(draft: Draft, document: JsonObject) -> None:
    """Read the keys of a YAML file of LLaMA-Factory."""
    read_llama_factory(draft, _options_of_file(draft, document, "llama_factory"))


def _llama_factory_training(train: TrainDraft, options: Options) -> None:
    draft = train.draft
    train.options = {**rename(options, LLAMA_FACTORY), **train.options}
    options.clear()
    stage, kind = train.options.pop("stage", None), train.options.pop("finetuning_type", None)
    scratch, bits = train.options.pop("train_from_scratch", None), train.options.pop(
        "quantization_bit", None
    )  # fmt: skip
    text = kind.text.lower() if kind else "lora"
    if stage is not None and stage.text.lower() in STAGES:
        draft.ignore(stage.source, "supervised steps on the tokens of the texts")
    elif stage is not None:
        _factory_objective(train, stage)
    if scratch is not None and scratch.is_on:
        train.method = "pretrain"
        draft.put(scratch.source, "workload.method", train.method)
        scratch = None
    elif text == "lora":
        narrow = bits if bits is not None and bits.text == "4" else None
        train.method = "qlora" if narrow else "lora"
        draft.put(sources(kind, narrow) if kind else "finetuning_type: lora (the default)",
                  "workload.method", train.method)  # fmt: skip
        bits = None if narrow else bits
    elif kind is not None and text == "full":
        draft.put(kind.source, "workload.method", "full")
    if kind is not None and text not in {"lora", "full"}:
        draft.assume(
            kind.source, f"Slipway does not model {shown(text)}: full training is the draft"
        )
    if scratch is not None:
        draft.ignore(scratch.source, "off, as without it")
    if bits is not None:
        reason = "Slipway plans adapters on 16-bit or 4-bit weights: 16-bit is the draft"
        draft.assume(bits.source, reason)
    pure = train.options.pop("pure_bf16", None)
    if pure is not None and pure.is_on:
        train.options.setdefault("bf16", pure)
        draft.put(pure.source, "pins.optimizer_dtype", "bf16")
    elif pure is not None:
        draft.ignore(pure.source, "off, as without it")
    _without_recompute(train)
    read_training(train)
    options |= train.options


def _factory_objective(train: TrainDraft, stage: Option) -> None:
    """Record a stage that compares answers, and of ``dpo`` the loss, which may be another's."""
    draft, method = train.draft, PREFERENCE.get(stage.text.lower(), shown(stage.text))
    loss = train.options.pop("pref_loss", None)
    other = PREFERENCE.get(loss.text.lower()) if loss is not None and method == "DPO" else None
    put_objective(draft, sources(stage, loss if other else None), other or method)
    if loss is not None and other is None:
        train.options["loss_type"] = replace(loss, name="loss_type")
    add_preference_options(draft, train.options)


def _without_recompute(train: TrainDraft) -> None:
    """Record recomputation, which LLaMA-Factory has on unless it is switched off."""
    off = train.options.pop("disable_gradient_checkpointing", None)
    stated = train.options.get("recompute")
    if stated is not None and stated.text.lower() == "auto":
        train.draft.ignore(train.options.pop("recompute").source, "auto: it is on by default")
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
        draft.put(sources(samples, length), "workload.calibration_tokens", tokens)
    else:
        for option in (samples, length):
            if option is not None:
                draft.ignore(option.source, "calibration tokens are samples times their length")


V1_NAMES = {
    "model": "model_name_or_path",
    "micro_batch_size": "per_device_train_batch_size",
    "train_dataset": "dataset",
}
V1_PEFT = {"r": "lora_rank", "lora_alpha": "lora_alpha", "target_modules": "lora_target"}


def from_version_1(draft: Draft, document: JsonObject) -> JsonObject:
    """Return a file of LLaMA-Factory's version 1 by the names of its other files.

    Source: hiyouga/LLaMA-Factory, examples/v1 (2026-08).
    """
    renamed = {V1_NAMES.get(key, key): value for key, value in document.items()}
    peft, quantised = renamed.pop("peft_config", None), renamed.pop("quant_config", None)
    kind = str(peft.get("name", "lora")) if isinstance(peft, dict) else "full"
    renamed["finetuning_type"] = kind
    if isinstance(peft, dict):
        renamed |= {V1_PEFT[key]: peft[key] for key in peft if key in V1_PEFT}
        for key in sorted(set(map(str, peft)) - set(V1_PEFT) - {"name"}):
            reason = "Slipway does not model this choice of trained weights or adapters"
            draft.ignore(shown(f"peft_config.{key}: {peft[key]}"), reason)
    if isinstance(quantised, dict) and "quantization_bit" in quantised:
        renamed["quantization_bit"] = quantised["quantization_bit"]
    dist = renamed.pop("dist_config", None)
    if isinstance(dist, dict):
        if str(dist.get("name", "")).startswith("fsdp"):
            renamed["fsdp"] = "full_shard"
        if "config_file" in dist:
            renamed["deepspeed"] = dist["config_file"]
    return renamed


# ---------------------------------------------------------------------------
# Configurations of DeepSpeed and Accelerate alone
# ---------------------------------------------------------------------------


def read_deepspeed_config(draft: Draft, document: JsonObject) -> None:
    """Read DeepSpeed's JSON configuration by itself."""
    train = TrainDraft(draft, {}, is_trainer=False)
    draft.need("workload.method", "the launcher's file states none: full, lora, qlora …")
    add_deepspeed_config(train, options_of(document))
    read_training(train)


def read_accelerate_config(draft: Draft, document: JsonObject) -> None:
    """Read the file of ``accelerate launch --config_file``.

    Source: accelerate/commands/config/config_args.py.
    """
    options = _options_of_file(draft, document, "accelerate_config")
    train = TrainDraft(draft, {}, is_trainer=False)
    ranks, nodes = options.pop("num_processes", None), options.pop("num_machines", None)
    machines, kind = nodes.whole() if nodes else 1, options.pop("distributed_type", None)
    if ranks is not None:
        total = ranks.whole()
        if total % machines:
            raise ranks.refusal(f"a multiple of num_machines, {machines}")
        put_world(train, total // machines, machines, sources(ranks, nodes))
    precision = options.pop("mixed_precision", None)
    if precision is not None:
        put_precision(draft, precision)
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
