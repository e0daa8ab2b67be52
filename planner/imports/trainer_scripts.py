"""Read the command lines of ms-swift, nanoGPT and MLX LM's trainer, by their own options."""

import math
from dataclasses import replace

from planner.imports.draft import Option, shown
from planner.imports.models import add_model
from planner.imports.on_policy import add_completions
from planner.imports.shell import (
    ignore_rest,
    ignore_words,
    option_table,
    plain,
    read_options,
    source_of,
)
from planner.imports.trainers import (
    HUGGING_FACE,
    PREFERENCE,
    add_preference_options,
    put_objective,
    put_world,
    sources,
)
from planner.imports.training import NO_FILE, TrainDraft, read_training, rename

# ---------------------------------------------------------------------------
# ms-swift
# ---------------------------------------------------------------------------


SWIFT = {
    **{name: HUGGING_FACE[name] for name in HUGGING_FACE if name in option_table("swift").names},
    "dataset": "dataset",  # of ModelScope
    "model": "model",
    "attn_impl": "attention",
    "sequence_parallel_size": "context",
    "target_modules": "targets",
}
LEAST_BATCH = 16  # sequences; ms-swift accumulates up to it, unless the steps are stated
EIGHT_BIT = "Slipway plans adapters on 16-bit or 4-bit weights: 16-bit is the draft"


def read_swift(train: TrainDraft, program: str, command: str, words: list[str]) -> None:
    """Read ``swift sft``, ``pt`` or ``rlhf``, whose trainer is Hugging Face's with more options.

    Source: modelscope/ms-swift, docs/source_en/Instruction/Command-line-parameters.md (2026).
    """
    draft = train.draft
    arguments = read_options(draft, words, "swift")
    ignore_words(draft, arguments.positional)
    named = {name: each for name, each in arguments.options.items() if name != "optimizer"}
    if "optimizer" in arguments.options:
        option = arguments.options["optimizer"]
        draft.assume(option.source, "an optimiser of a plugin: Slipway does not model its states")
    train.options |= {**rename(named, SWIFT), **train.options}
    options = train.options
    method = options.pop("rlhf_type", None)
    if command == "rlhf" or method is not None:
        source = method.source if method is not None else source_of(program)
        name = method.text.lower() if method is not None else "dpo"
        put_objective(draft, source, PREFERENCE.get(name, shown(name)))
    add_preference_options(draft, options)
    _swift_world(train)
    add_completions(train, of_program=True)
    _swift_method(train)
    dtype = options.pop("torch_dtype", None)
    if dtype is not None:
        precision = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype.text)
        if precision is None or precision in options:
            draft.ignore(dtype.source, "bf16 or fp16 state the precision of training")
        else:
            options[precision] = replace(dtype, name=precision, value="true")
    if "recompute" not in options:
        source = "gradient checkpointing (on by default)"
        options["recompute"] = Option("recompute", "true", source, source)
    if "micro_batch" not in options:
        source = "per_device_train_batch_size 1 (the default)"
        options["micro_batch"] = Option("micro_batch", 1, source, source)
    if "accumulation" not in options and train.world:
        steps = math.ceil(LEAST_BATCH / (options["micro_batch"].whole() * train.world))
        source = f"gradient_accumulation_steps {steps} (the default: {LEAST_BATCH} sequences)"
        options["accumulation"] = Option("accumulation", steps, source, source)
    read_training(train)
    ignore_rest(draft, options, "swift")


def _swift_world(train: TrainDraft) -> None:
    """Record the processes, which ms-swift takes from the environment."""
    number = train.draft.variable("NPROC_PER_NODE")
    nodes = train.draft.variable("NNODES")
    if train.world is None and number is not None:
        count = nodes.whole() if nodes is not None else 1
        put_world(train, number.whole(), count, sources(number, nodes))


def _swift_method(train: TrainDraft) -> None:
    draft, options = train.draft, train.options
    kind, bits = options.pop("tuner_type", None), options.pop("quant_bits", None)
    way = options.pop("quant_method", None)
    text = kind.text.lower() if kind else "lora"
    source = kind.source if kind else "lora (the default)"
    if text == "lora":
        narrow = bits if bits is not None and bits.text == "4" else None
        train.method = "qlora" if narrow else "lora"
        draft.put(sources(kind, narrow) if kind else source, "workload.method", train.method)
        if bits is not None and narrow is None:
            draft.assume(bits.source, EIGHT_BIT)
    elif text == "full":
        draft.put(source, "workload.method", "full")
        if bits is not None:
            draft.ignore(bits.source, "no adapters: full training is planned")
    else:
        reason = f"Slipway does not model {text}: full training is the draft"
        draft.assume(source, reason)
        if bits is not None:
            draft.assume(bits.source, EIGHT_BIT)
    if way is not None:
        draft.ignore(way.source, "Slipway plans NF4 with double quantisation")


# ---------------------------------------------------------------------------
# nanoGPT
# ---------------------------------------------------------------------------


NANOGPT = {
    "batch_size": "micro_batch",
    "block_size": "sequence_length",
    "max_iters": "max_steps",
}
NANOGPT_STEPS = 40  # gradient_accumulation_steps of train.py, of all ranks together
GPT2 = "openai-community/gpt2"


def read_nanogpt(train: TrainDraft, program: str, words: list[str]) -> None:
    """Read nanoGPT's ``train.py --key=value``, whose defaults are those of GPT-2 with 124M.

    Source: karpathy/nanoGPT 3adf61e, train.py and configurator.py.
    """
    draft = train.draft
    draft.ignore(source_of(program), "read as nanoGPT's train.py, by its arguments")
    arguments = read_options(draft, words, "nanogpt")
    train.options |= {**rename(arguments.options, NANOGPT), **train.options}
    options = train.options
    has_file = bool(arguments.positional)
    for word in arguments.positional:
        draft.assume(source_of(word), NO_FILE)
    started = options.pop("init_from", None)
    shape = [options.pop(name, None) for name in ("n_layer", "n_head", "n_embd")]
    if started is not None and started.text.startswith("gpt2"):
        train.spec = add_model(draft, started.source, f"openai-community/{started.text}")
    elif any(shape):
        reason = "a shape that is no model of the catalog"
        draft.ignore(sources(*shape), reason)
    elif not has_file:
        train.spec = add_model(draft, "the shape of GPT-2 (nanoGPT's default)", GPT2)
    is_tuned = started is not None and started.text.startswith("gpt2")
    train.method = "full" if is_tuned else "pretrain"
    source = started.source if started is not None else "nanoGPT trains from random weights"
    draft.put(source, "workload.method", train.method)
    _nanogpt_steps(train, has_file=has_file)
    dtype = options.pop("dtype", None)
    if dtype is not None:
        name = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype.text)
        if name:
            draft.put(dtype.source, "pins.compute_dtype", name)
        else:
            draft.ignore(dtype.source, "32-bit arithmetic is the plan's without it")
    read_training(train)
    ignore_rest(draft, options, "nanogpt")


def _nanogpt_steps(train: TrainDraft, *, has_file: bool) -> None:
    """Record the accumulation of a rank: nanoGPT states that of all ranks together."""
    option = train.options.pop("gradient_accumulation_steps", None)
    if option is None and not has_file:
        source = f"gradient_accumulation_steps {NANOGPT_STEPS} (the default)"
        option = Option("gradient_accumulation_steps", NANOGPT_STEPS, source, source)
    if option is None:
        return
    steps, ranks = option.whole(), train.world
    if ranks is None:
        train.draft.ignore(option.source, "of all ranks together, whose number is not stated")
    elif steps % ranks:
        reason = f"nanoGPT shares {steps} among its ranks, and they are no multiple of {ranks}"
        train.draft.assume(option.source, f"{reason}: it would stop; each rank takes one here")
        train.options["accumulation"] = replace(option, value=1)
    else:
        train.options["accumulation"] = replace(option, value=steps // ranks)


# ---------------------------------------------------------------------------
# MLX LM
# ---------------------------------------------------------------------------


MLX = {
    "model": "model",
    "batch_size": "micro_batch",
    "iters": "max_steps",
    "max_seq_length": "sequence_length",
    "grad_accumulation_steps": "accumulation",
    "grad_checkpoint": "recompute",
    "optimizer": "optimizer",
}
MLX_DEFAULTS = {"batch_size": 4, "max_seq_length": 2048, "iters": 1000}


def read_mlx_trainer(train: TrainDraft, words: list[str]) -> None:
    """Read ``mlx_lm.lora --train``, which trains adapters on one machine.

    Source: ml-explore/mlx-lm, mlx_lm/lora.py.
    """
    draft = train.draft
    arguments = read_options(draft, words, "mlx")
    ignore_words(draft, [plain(word) for word in arguments.positional])
    options = arguments.options
    config, kind = options.pop("config", None), options.pop("fine_tune_type", None)
    switch = options.pop("train", None)
    if switch is not None:
        draft.ignore(switch.source, "a training is planned")
    for name, value in MLX_DEFAULTS.items():
        if name not in options and config is None:
            source = f"{name.replace('_', '-')} {value} (the default)"
            options[name] = Option(name, value, source, source)
    layers = options.pop("num_layers", None)
    if layers is not None and layers.text != "-1":
        draft.assume(layers.source, "Slipway plans adapters on all layers")
    elif layers is not None:
        draft.ignore(layers.source, "all layers, as Slipway plans adapters")
    train.options |= rename(options, MLX)
    if config is not None:
        draft.assume(config.source, NO_FILE)
    text = kind.text.lower() if kind else "lora"
    source = kind.source if kind else "lora (the default)"
    if text == "full":
        draft.put(source, "workload.method", "full")
    else:
        named = train.options.get("model")
        narrow = named is not None and named.text.lower().endswith("-4bit")
        train.method = "qlora" if narrow else "lora"
        draft.put(source, "workload.method", train.method)
    if text == "dora":
        draft.assume(source, "Slipway plans LoRA, without DoRA's magnitudes")
    read_training(train)
    ignore_rest(draft, train.options, "mlx")
