"""What the settings of trainers share: model, method, batch, precision, sharding and devices.

Each trainer's own names are mapped to those of ``Setting`` first; one reader takes them from
there, so that a batch, a ZeRO stage or an adapter means the same for all.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from planner.imports.documents import options_of
from planner.imports.draft import LARGEST_TOKENS, Draft, Option, Options, shown
from planner.imports.models import PASTE_CONFIG, add_model
from planner.imports.shell import OWN
from planner.specs.base import ATTENTION, OPTIMIZERS, alias_parser
from planner.specs.model import ModelSpec
from planner.specs.workload import PAIRED_OBJECTIVES, Attention, Optimizer

# Common names of the settings of trainers.
Setting = Literal[
    "model",
    "sequence_length",
    "micro_batch",
    "accumulation",
    "global_batch",
    "optimizer",
    "recompute",
    "bf16",
    "fp16",
    "fp8",
    "attention",
    "packing",
    "packing_strategy",
    "activation_offload",
    "max_steps",
    "epochs",
    "deepspeed",
    "fsdp",
    "fsdp_config",
    "tensor",
    "pipeline",
    "context",
    "expert",
    "rank",
    "targets",
    "load_in_4bit",
    "load_in_8bit",
    "data_repository",
    "data_subset",
    "data_split",
]
FULLY_SHARDED, SHARDED_GRADIENTS = 3, 2
ZERO_NAME = re.compile(r"z(?:ero)?[_-]?(?:stage)?[_-]?([0-3])(?![0-9])", re.IGNORECASE)
# huggingface/trl, trl/trainer/sft_config.py (packing_strategy) and data_utils.py, release 1.16
TRLS_PACKING, OTHER_PACKING = "bfd", ("bfd_split", "wrapped")
QUERY_VALUE = frozenset({"q_proj", "v_proj"})
ALL_PROJECTIONS = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
)
# A repository of the Hub; anything else is a file, a folder, or a name that a trainer knows.
DATA_SET = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]*\w(?:@[\w./-]+)?", re.ASCII)
DATA_FILE = re.compile(r".*\.(?:jsonl?|parquet|csv|txt|arrow|gz|zst)", re.IGNORECASE)
NO_DATA_SET = "no data set of the Hub: choose the training text in the Workload step"
ALL_LINEAR = frozenset({"all", "all-linear", "all_linear"})
PAGED = re.compile(r"^paged_|_32bit$")
# Names of trainers that requests have not. Source: LLaMA-Factory, hparams/model_args.py;
# transformers, integrations/hub_kernels.py and trainer_utils.py.
TRAINERS_ATTENTION = {
    **dict.fromkeys(("fa2", "fa3", "fa4", "flash_attn3", "flash_attention_4"), "flash"),
    **dict.fromkeys(("vllm_flash_attn3", "cudnn"), "flash"),
    **dict.fromkeys(("disabled", "math"), "eager"),
    "flex_attention": "flex",
}
TRAINERS_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch_8bit", "adamw_8bit_torch"), "adamw_8bit"),
    "adamw_torch_npu_fused": "adamw",
}
# Values of Axolotl's activation_offloading beside true and false.
OFFLOADING, TO_DISK = frozenset({"legacy", "hidden_states"}), frozenset({"disk"})
BY_TRAINER = "auto: the trainer fills it in from its own arguments"
OTHER_ATTENTION = "Slipway plans eager, flash or flex attention"
NO_FILE = "the file is not read: paste it to have its settings"


@dataclass
class TrainDraft:
    """A trainer's settings in reading, by their common names.

    ``world`` is the number of devices if the text states it, else None. ``method`` is that of a
    trainer without adapters; the file of a launcher (not ``is_trainer``) states none.
    """

    draft: Draft
    options: Options
    world: int | None = None
    per_node: int | None = None
    spec: ModelSpec | None = None
    method: str = "full"
    is_trainer: bool = True
    sizes: dict[str, int] = field(default_factory=dict)

    def take(self, name: Setting) -> Option | None:
        """Remove and return a setting; one that the trainer fills in itself is ignored."""
        option = self.draft.take(self.options, name)
        if option is not None and option.text.lower() == "auto":
            self.draft.ignore(option.source, BY_TRAINER)
            return None
        return option

    def take_on(self, name: Setting) -> Option | None:
        """Return a switch that is on, and ignore one that is off."""
        option = self.take(name)
        if option is not None and not option.is_on:
            self.draft.ignore(option.source, "off, as without it")
            return None
        return option


def rename(options: Options, names: Mapping[str, str]) -> Options:
    """Return options by the common names of their settings; others keep theirs.

    Of two names for one setting the first in ``names`` counts.
    """
    renamed: Options = {}
    order = {name: at for at, name in enumerate(names)}
    for name, option in sorted(options.items(), key=lambda each: order.get(each[0], -1)):
        own = f"{OWN}{name}" if name in get_args(Setting) else name
        target = names.get(name, own)
        key = own if target in renamed else target
        renamed[key] = replace(option, name=key)
    return renamed


def _read_data(train: TrainDraft) -> None:
    """Record the data set of the Hub that a text names, if it names one."""
    named = train.take("data_repository")
    text = named.text.removeprefix("[").removesuffix("]").strip("'\"") if named else ""
    is_data_set = DATA_SET.fullmatch(text) is not None and DATA_FILE.fullmatch(text) is None
    if named is not None and is_data_set:
        train.draft.put_data(named.source, "data_repository", text)
    elif named is not None:
        train.draft.ignore(named.source, NO_DATA_SET)
    for name in ("data_subset", "data_split"):
        option = train.take(name)
        if option is not None and is_data_set and option.text:
            train.draft.put_data(option.source, name, option.text)
        elif option is not None:
            train.draft.ignore(option.source, "of a data set that the text does not name")


def read_training(train: TrainDraft) -> None:
    """Record the settings that all trainers share, in the order in which they depend.

    Raises:
        BadRequestError: a value is outside its limits.
    """
    draft = train.draft
    _read_data(train)
    named = train.take("model")
    if named is not None:
        train.spec = add_model(draft, named.source, named.text)
    elif draft.header is not None:
        train.spec = add_model(draft, draft.header.source, draft.header.model)
    elif draft.value("model") is None:
        draft.need("model", f"the text names none; {PASTE_CONFIG}")
    if draft.value("workload.method") is None and train.is_trainer:
        draft.put(f"no adapters ({train.method})", "workload.method", train.method)
    _add_parallel_sizes(train)
    _add_formats(train)
    add_deepspeed(train, train.take("deepspeed"))
    _add_fsdp(train)
    _add_adapter(train)
    _add_batch(train)


def _add_parallel_sizes(train: TrainDraft) -> None:
    axes: tuple[Setting, ...] = ("tensor", "pipeline", "context", "expert")
    for axis in axes:
        option = train.take(axis)
        if option is not None:
            size = option.whole()
            train.sizes[axis] = size
            train.draft.put(option.source, f"pins.{axis}_parallel_size", size)


def _add_formats(train: TrainDraft) -> None:
    """Record precision, recomputation, attention, optimiser and packing."""
    draft = train.draft
    wide, half, eight = train.take_on("bf16"), train.take_on("fp16"), train.take_on("fp8")
    chosen = eight or wide or half
    for option, dtype in ((eight, "fp8"), (wide, "bf16"), (half, "fp16")):
        if option is not None and option is chosen:
            draft.put(option.source, "pins.compute_dtype", dtype)
        elif option is not None:
            draft.ignore(option.source, "another precision of the text takes precedence")
    recompute = train.take("recompute")
    if recompute is not None:
        add_recomputation(draft, recompute)
    attention = train.take("attention")
    if attention is not None:
        text = attention.text.lower().removeprefix("kernels-community/").replace("-", "_")
        read = alias_parser(get_args(Attention), {**ATTENTION, **TRAINERS_ATTENTION})(text)
        if read in get_args(Attention):
            draft.put(attention.source, "pins.attention", read)
        else:
            draft.ignore(attention.source, OTHER_ATTENTION)
    moved = train.take("activation_offload")
    if moved is not None and moved.text.lower() in TO_DISK:
        draft.assume(moved.source, "Slipway moves activations to host memory, not to disk")
    elif moved is not None and (moved.text.lower() in OFFLOADING or moved.is_on):
        setting = {**(draft.value("pins.offload") or {}), "activations_cpu": 1.0}
        draft.put(moved.source, "pins.offload", setting)
    elif moved is not None:
        draft.ignore(moved.source, "off, as without it")
    optimizer = train.take("optimizer")
    if optimizer is not None:
        add_optimizer(draft, optimizer)
    _add_packing(train)


def _add_packing(train: TrainDraft) -> None:
    """Record whether short samples share a row, and by which way of TRL's; answers never do."""
    draft = train.draft
    packing, strategy = train.take("packing"), train.take("packing_strategy")
    is_packed = packing is not None and packing.is_on
    if packing is not None and draft.value("workload.objective"):
        draft.ignore(packing.source, "each answer has a row of its own")
        is_packed = False
    elif packing is not None:
        draft.put(packing.source, "pins.packed", packing.is_on)
    if strategy is None:
        return
    way = strategy.text.lower()
    if not is_packed:
        draft.ignore(strategy.source, "no effect: the text packs no rows")
    elif way == TRLS_PACKING:
        draft.put(strategy.source, "pins.packed", True)  # noqa: FBT003 - a value
    elif way in OTHER_PACKING:
        draft.put_data(strategy.source, "packing_strategy", way)
    else:
        known = ", ".join((TRLS_PACKING, *OTHER_PACKING))
        draft.assume(strategy.source, f"not one of TRL's ways to pack ({known}): bfd is used")


def add_recomputation(draft: Draft, option: Option) -> None:
    """Record gradient checkpointing: of whole layers, or none."""
    text = option.text.lower()
    if text in {"selective", "full"}:
        draft.put(option.source, "pins.activation_recomputation", text)
    elif text in {"unsloth", "offload", "offload_disk"}:
        draft.put(option.source, "pins.activation_recomputation", "full")
        draft.ignore(option.source, "Slipway plans the inputs of layers on the device")
    else:
        value = "full" if option.is_on else "none"
        draft.put(option.source, "pins.activation_recomputation", value)


def add_optimizer(draft: Draft, option: Option) -> None:
    """Record the optimiser; one that Slipway has no states for is ignored."""
    text = option.text.lower()
    parse = alias_parser(get_args(Optimizer), {**OPTIMIZERS, **TRAINERS_OPTIMIZERS})
    read = next((each for name in (text, PAGED.sub("", text)) if (each := parse(name)) in
                 get_args(Optimizer)), None)  # fmt: skip
    if read is None:
        known = ", ".join(get_args(Optimizer))
        reason = f"Slipway does not model its states; choose among {known}"
        draft.assume(option.source, reason)
        return
    draft.put(option.source, "workload.optimizer", read)
    if text.startswith("paged_"):
        draft.ignore(
            option.source, "paging to host memory is not modelled: states stay on the device"
        )


# ---------------------------------------------------------------------------
# Sharding
# ---------------------------------------------------------------------------


def add_deepspeed(train: TrainDraft, option: Option | None) -> None:
    """Record the ZeRO stage of DeepSpeed's configuration, or of its usual file names."""
    if option is None:
        return
    if isinstance(option.value, dict):
        add_deepspeed_config(train, options_of(option.value, f"{option.title}."))
        return
    name = option.text.rsplit("/", 1)[-1]
    stage = ZERO_NAME.search(name)
    if stage is None:
        train.draft.ignore(option.source, NO_FILE)
        return
    number = int(stage[1])
    train.draft.put(option.source, "pins.zero_stage", number)
    if "offload" in name.lower():
        _put_offload(train.draft, option.source, optimizer="cpu", weights=number == FULLY_SHARDED)
    train.draft.ignore(option.source, f"{NO_FILE}; its name states the stage")


def _put_offload(draft: Draft, source: str, *, optimizer: str, weights: bool) -> None:
    setting: dict[str, Any] = dict(draft.value("pins.offload") or {})
    if optimizer != "none":
        setting["optimizer"] = optimizer
    if weights:
        setting["weights_cpu"] = 1.0
    if setting:
        draft.put(source, "pins.offload", setting)


DEEPSPEED_IGNORED = {
    "steps_per_print": "no effect on the plan: logs, metrics and traces",
    "wall_clock_breakdown": "no effect on the plan: logs, metrics and traces",
    "gradient_clipping": "no effect on the plan: the learning rate and regularisation",
    "scheduler": "no effect on the plan: the learning rate and regularisation",
    "zero_allow_untested_optimizer": "no effect on the plan",
    "zero_force_ds_cpu_optimizer": "no effect on the plan",
    "communication_data_type": "Slipway does not model it",
    "prescale_gradients": "no effect on the plan",
    "checkpoint": "no effect on the plan: when a run evaluates and saves",
    "compression_training": "Slipway does not model compression beside a training",
    "comms_logger": "no effect on the plan: logs, metrics and traces",
    "flops_profiler": "no effect on the plan: logs, metrics and traces",
    "tensorboard": "no effect on the plan: logs, metrics and traces",
    "wandb": "no effect on the plan: logs, metrics and traces",
    "aio": "no effect on the plan: how files are read",
    "pipeline": "Slipway does not model it",
    "elasticity": "Slipway does not model changes of the number of devices",
    "autotuning": "Slipway does not model it",
    "amp": "Slipway plans bf16 or fp16 by DeepSpeed itself",
    "seed": "no effect on the plan",
    "dump_state": "no effect on the plan: logs, metrics and traces",
    "memory_breakdown": "no effect on the plan: logs, metrics and traces",
    "dataloader_drop_last": "no effect on the plan: the data set and its preparation",
    "data_efficiency": "Slipway does not model it",
    "curriculum_learning": "Slipway does not model it",
    "sparse_attention": "Slipway does not model it",
    "hybrid_engine": "Slipway does not model it",
    "zero_optimization.offload": "no effect on the plan",
}
DEEPSPEED_KEYS = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "zero_optimization",
        "bf16",
        "fp16",
        "optimizer",
        "activation_checkpointing",
        "data_types",
        "tensor_parallel",
        "sequence_parallel_size",
    }
)


def add_deepspeed_config(train: TrainDraft, options: Options) -> None:
    """Record the settings of DeepSpeed's JSON configuration.

    Source: DeepSpeed 0.19, docs/_pages/config-json.md and deepspeed/runtime/config.py.
    """
    draft = train.draft
    simple: tuple[tuple[str, Setting], ...] = (
        ("train_batch_size", "global_batch"),
        ("train_micro_batch_size_per_gpu", "micro_batch"),
        ("gradient_accumulation_steps", "accumulation"),
        ("sequence_parallel_size", "context"),
    )
    for name, setting in simple:
        if name in options:
            train.options.setdefault(setting, options.pop(name))
    for name in ("bf16", "fp16"):
        _add_deepspeed_precision(draft, name, options.pop(name, None))
    _add_zero(train, options.pop("zero_optimization", None))
    _add_deepspeed_optimizer(draft, options.pop("optimizer", None))
    _add_deepspeed_recomputation(draft, options.pop("activation_checkpointing", None))
    types = options.pop("data_types", None)
    gradient = _part(types, "grad_accum_dtype")
    _ignore_parts(draft, types, "grad_accum_dtype", "Slipway does not model it")
    if gradient is not None:
        draft.put(gradient.source, "pins.gradient_dtype", gradient.text)
    split = options.pop("tensor_parallel", None)
    tensor = _part(split, "autotp_size")
    _ignore_parts(draft, split, "autotp_size", "Slipway does not model it")
    if tensor is not None:
        train.sizes["tensor"] = tensor.whole()
        draft.put(tensor.source, "pins.tensor_parallel_size", train.sizes["tensor"])
    for name, option in options.items():
        if name in DEEPSPEED_IGNORED:
            draft.ignore(option.source, DEEPSPEED_IGNORED[name])
        else:
            known = DEEPSPEED_KEYS | set(DEEPSPEED_IGNORED)
            draft.reject(option.source, name, known)


def _ignore_parts(draft: Draft, option: Option | None, read: str, reason: str) -> None:
    """Record the keys of a mapping beside the one that is read."""
    if option is not None and isinstance(option.value, dict):
        for name, part in options_of(option.value, f"{option.title}.").items():
            if name != read:
                draft.ignore(part.source, reason)


LOSS_SCALE = "no effect on the plan: the scale of the loss"


def _add_deepspeed_precision(draft: Draft, name: str, option: Option | None) -> None:
    if option is None:
        return
    enabled = _part(option, "enabled")
    if enabled is not None:
        _ignore_parts(draft, option, "enabled", LOSS_SCALE)
    if enabled is None:
        draft.ignore(option.source, BY_TRAINER)
    elif enabled.text.lower() == "auto":
        draft.ignore(enabled.source, BY_TRAINER)
    elif enabled.is_on and draft.value("pins.compute_dtype") is None:
        draft.put(enabled.source, "pins.compute_dtype", name)
    else:
        draft.ignore(enabled.source, "off, or stated by the trainer already")


def _add_deepspeed_optimizer(draft: Draft, option: Option | None) -> None:
    kind = _part(option, "type")
    if kind is not None and draft.value("workload.optimizer") is None:
        add_optimizer(draft, kind)
        _ignore_parts(draft, option, "type", "no effect on the plan: the learning rate")
    elif option is not None:
        draft.ignore(option.source, BY_TRAINER)


def _add_deepspeed_recomputation(draft: Draft, option: Option | None) -> None:
    if option is None:
        return
    if draft.value("pins.activation_recomputation") is not None:
        draft.ignore(option.source, "stated by the trainer already")
        return
    draft.put(option.source, "pins.activation_recomputation", "full")
    moved = _part(option, "cpu_checkpointing")
    if moved is not None and moved.is_on:
        setting = {**(draft.value("pins.offload") or {}), "activations_cpu": 1.0}
        draft.put(moved.source, "pins.offload", setting)


def _part(option: Option | None, name: str) -> Option | None:
    """Return one key of a setting that is a mapping, None without it."""
    if option is None or not isinstance(option.value, dict):
        return None
    return options_of(option.value, f"{option.title}.").get(name)


def _add_zero(train: TrainDraft, option: Option | None) -> None:
    """Record DeepSpeed's ZeRO stage, and the place of offloaded states and weights."""
    if option is None:
        return
    draft, stage = train.draft, _part(option, "stage")
    if stage is not None and stage.text.lower() != "auto":
        draft.put(stage.source, "pins.zero_stage", stage.whole(0, FULLY_SHARDED))
    for name in ("offload_optimizer", "offload_param"):
        device = _part(_part(option, name), "device")
        if device is not None:
            add_place(draft, name, device)
    read = {"stage", "offload_optimizer", "offload_param"}
    rest = sorted(set(option.value) - read) if isinstance(option.value, dict) else []
    if rest:
        source = f"{option.title}: {', '.join(rest)}"
        draft.ignore(shown(source), "Slipway plans DeepSpeed's default buckets and overlap")


def add_place(draft: Draft, name: str, device: Option) -> None:
    """Record where optimiser states or weights are offloaded to."""
    place = device.text.lower()
    if place in {"none", "null"}:
        draft.ignore(device.source, "none: they stay on the device")
        return
    if place not in {"cpu", "nvme"}:
        raise device.refusal("none, cpu or nvme")
    setting = dict(draft.value("pins.offload") or {})
    if name.startswith("offload_optimizer"):
        setting["optimizer"] = place
    else:
        setting["weights_cpu" if place == "cpu" else "weights_disk"] = 1.0
    draft.put(device.source, "pins.offload", setting)


FSDP_MODES = frozenset({"full_shard", "shard_grad_op", "no_shard"})
FSDP_IGNORED = "Slipway plans FSDP's sharding with the trainer's default wrapping and loading"


def _add_fsdp(train: TrainDraft) -> None:
    """Record FSDP as the ZeRO stage that it equals: gradients and states, or weights too.

    Source: Zhao et al. 2023 (PyTorch FSDP), arXiv:2304.11277, section 3.2; torch FSDP2,
    ``reshard_after_forward``.
    """
    mode, config = train.take("fsdp"), train.take("fsdp_config")
    draft = train.draft
    if mode is None and config is None:
        return
    parts: Options = {}
    if config is not None and isinstance(config.value, dict):
        read = options_of(config.value, f"{config.title}.")
        parts = {name.removeprefix("fsdp_"): option for name, option in read.items()}
    elif config is not None and config.text.startswith("{"):
        parts = _json_parts(config)
    elif config is not None:
        draft.assume(config.source, NO_FILE)
    if mode is not None or parts:
        add_fsdp_parts(train, mode, parts, config.source if config is not None else "fsdp_config")


def _json_parts(config: Option) -> Options:
    """Return the keys of a mapping that a command line has as JSON."""
    try:
        document = json.loads(config.text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise config.refusal('a JSON object such as {"reshard_after_forward": true}, or a file')
    read = options_of(document, f"{config.title}.")
    return {name.removeprefix("fsdp_"): option for name, option in read.items()}


def add_fsdp_parts(
    train: TrainDraft, mode: Option | None, parts: Options, source: str = "fsdp_config"
) -> None:
    """Record FSDP from its mode (``full_shard auto_wrap``) and its configuration's keys.

    ``source`` is that of the configuration, which alone means full sharding.
    """
    draft, words = train.draft, set(re.findall(r"\w+", mode.text.lower())) if mode else set()
    strategy = parts.pop("sharding_strategy", None)
    words |= {strategy.text.lower()} if strategy else set()
    reshard = parts.pop("reshard_after_forward", None)
    sources = [each.source for each in (mode, strategy, reshard) if each] or [source]
    draft.put(", ".join(sources), "pins.zero_stage", _fsdp_stage(words, reshard))
    if words & {"hybrid_shard", "hybrid_shard_zero2", "_hybrid_shard_zero2"} and train.per_node:
        draft.put(", ".join(sources), "pins.zero_shard_size", train.per_node)
    offloads = [parts.pop(name, None) for name in ("offload_params", "cpu_offload")]
    for offload in offloads:
        if offload is not None and offload.is_on:
            _put_offload(draft, offload.source, optimizer="cpu", weights=True)
        elif offload is not None:
            draft.ignore(offload.source, "off, as without it")
    if "offload" in words:
        _put_offload(draft, sources[0], optimizer="cpu", weights=True)
    recompute = parts.pop("activation_checkpointing", None)
    if recompute is not None and draft.value("pins.activation_recomputation") in {None, "none"}:
        add_recomputation(draft, recompute)
    elif recompute is not None:
        draft.ignore(recompute.source, "stated by gradient checkpointing already")
    for option in parts.values():
        draft.ignore(option.source, FSDP_IGNORED)


def _fsdp_stage(words: set[str], reshard: Option | None) -> int:
    """Return the ZeRO stage that FSDP equals, by its mode's words and its second version's key."""
    if reshard is not None and reshard.text.lower() in FSDP_MODES:
        words = words | {reshard.text.lower()}  # Accelerate writes FSDP 1's mode so
    elif reshard is not None and not words & FSDP_MODES:
        return FULLY_SHARDED if reshard.is_on else SHARDED_GRADIENTS
    if words & {"shard_grad_op", "2"}:
        return SHARDED_GRADIENTS
    return 0 if words & {"no_shard", "false"} else FULLY_SHARDED


# ---------------------------------------------------------------------------
# Adapters and the batch
# ---------------------------------------------------------------------------


def _add_adapter(train: TrainDraft) -> None:
    """Record rank and targets of adapters."""
    draft = train.draft
    rank, targets = train.take("rank"), train.take("targets")
    if train.method not in {"lora", "qlora"}:
        for option in (rank, targets):
            if option is not None:
                draft.ignore(option.source, f"method {train.method} has no adapters")
        return
    if rank is not None:
        draft.put(rank.source, "workload.lora_rank", rank.whole())
    if targets is None:
        return
    value = targets.value
    names = value if isinstance(value, list) else re.findall(r"[\w.*-]+", targets.text)
    short = {str(name).rsplit(".", 1)[-1] for name in names}
    if short & ALL_LINEAR or short >= ALL_PROJECTIONS:
        draft.put(targets.source, "workload.lora_targets", "all")
    elif short == QUERY_VALUE:
        draft.put(targets.source, "workload.lora_targets", "query_value")
    else:
        reason = "Slipway plans adapters on all linear layers, or on queries and values alone"
        draft.ignore(targets.source, reason)


def _add_batch(train: TrainDraft) -> None:
    """Record the batch: sequences per device, accumulation, data-parallel ranks and length."""
    draft = train.draft
    micro, accumulation = train.take("micro_batch"), train.take("accumulation")
    total, length = train.take("global_batch"), train.take("sequence_length")
    each = micro.whole() if micro else None
    steps = accumulation.whole() if accumulation else 1
    if micro:
        draft.put(micro.source, "pins.micro_batch_size", each)
    if accumulation:
        draft.put(accumulation.source, "pins.gradient_accumulation_steps", steps)
    whole = total.whole(most=LARGEST_TOKENS) if total else None
    model = math.prod(train.sizes.get(axis, 1) for axis in ("tensor", "pipeline", "context"))
    if train.world is None and whole and each and whole % (each * steps) == 0:
        train.world = whole // (each * steps) * model
    ranks = None
    if train.world is not None:
        if train.world % model:
            raise Option("devices", train.world, "", "number of devices").refusal(
                f"a multiple of the {model} ranks of one replica"
            )
        ranks = train.world // model
    used = ", ".join(option.source for option in (micro, accumulation) if option)
    if total:
        draft.put(total.source, "workload.global_batch_size", whole)
    elif ranks and each:
        draft.put(used, "workload.global_batch_size", each * steps * ranks)
    else:
        per_rank = f"{each} x {steps} sequences" if each else "the sequences"
        why = f"{per_rank} of a data-parallel device, times the number of these devices"
        draft.need("workload.global_batch_size", why)
    if ranks and ranks > 1:
        draft.put(f"{train.world} devices", "pins.data_parallel_size", ranks)
    _add_cluster(train)
    if length:
        draft.put(length.source, "workload.sequence_length", length.whole(most=LARGEST_TOKENS))
    else:
        draft.need("workload.sequence_length", "tokens of a row of the batch")
    _add_length(train)


def _add_cluster(train: TrainDraft) -> None:
    """Record the devices if the text states them."""
    draft, world = train.draft, train.world
    if world is None or draft.value("cluster.devices_per_node"):
        return
    per_node = train.per_node or (world if world <= LARGEST_NODE else None)
    if per_node and world % per_node == 0:
        draft.put(f"{world} devices", "cluster.devices_per_node", per_node)
        if world > per_node:
            draft.put(f"{world} devices", "cluster.nodes", world // per_node)
    else:
        draft.need("cluster.devices_per_node", f"the text takes {world} devices: how many a node")


LARGEST_NODE = 8


def _add_length(train: TrainDraft) -> None:
    """Record the tokens of a run whose number of steps is stated."""
    draft = train.draft
    steps, epochs = train.take("max_steps"), train.take("epochs")
    if steps is not None and not steps.text.startswith("-") and steps.text != "0":
        count = steps.whole(most=LARGEST_TOKENS)
        batch = draft.value("workload.global_batch_size")
        length = draft.value("workload.sequence_length")
        if batch and length:
            rows = 2 if draft.value("workload.objective") in PAIRED_OBJECTIVES else 1
            draft.put(steps.source, "workload.tokens", count * batch * rows * length)
        else:
            draft.ignore(
                steps.source, "tokens are steps times batch times length, which are missing"
            )
    elif steps is not None:
        draft.ignore(steps.source, "no limit of steps")
    if epochs is not None:
        reason = "the tokens of a pass are the data set's: state workload.tokens for a whole run"
        draft.ignore(epochs.source, reason)
