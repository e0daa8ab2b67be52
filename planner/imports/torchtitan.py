"""Read torchtitan: its TOML files, its command line, and the Python module of Slipway's export.

All three have the same settings, by a section and a name: ``training.local_batch_size``.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from planner.imports.draft import Draft, Option, Options, shown
from planner.imports.models import add_model
from planner.imports.shell import plain, source_of
from planner.imports.trainers import put_world, sources
from planner.imports.training import TrainDraft, read_training, rename
from planner.specs.base import BadRequestError, JsonObject

TORCHTITAN_MODULES = re.compile(r"(^|/)torchtitan([./]train(\.py)?)?$|run_train\.sh$")
# Models by the function of a configuration, or by ``[model]``'s name and flavor.
MODELS = {
    "llama3_8b": "meta-llama/Llama-3.1-8B",
    "llama3_70b": "meta-llama/Llama-3.1-70B",
    "llama3_405b": "meta-llama/Llama-3.1-405B",
    "qwen3_0_6b": "Qwen/Qwen3-0.6B",
    "qwen3_1_7b": "Qwen/Qwen3-1.7B",
    "qwen3_14b": "Qwen/Qwen3-14B",
    "qwen3_32b": "Qwen/Qwen3-32B",
    "qwen3_30b_a3b": "Qwen/Qwen3-30B-A3B",
    "deepseek_v3_671b": "deepseek-ai/DeepSeek-V3",
    "deepseek_v3_16b": "deepseek-ai/DeepSeek-V2-Lite",
}
# Settings by the common name; the others that a run reads follow below.
COMMON = {
    "training.local_batch_size": "local_batch",
    "training.batch_size": "local_batch",
    "training.global_batch_size": "global_batch",
    "training.seq_len": "sequence_length",
    "training.steps": "max_steps",
    "parallelism.tensor_parallel_degree": "tensor",
    "training.tensor_parallel_degree": "tensor",
    "parallelism.pipeline_parallel_degree": "pipeline",
    "experimental.pipeline_parallel_degree": "pipeline",
    "parallelism.context_parallel_degree": "context",
    "experimental.context_parallel_degree": "context",
    "parallelism.expert_parallel_degree": "expert",
    "parallelism.data_parallel_replicate_degree": "replicate",
    "training.data_parallel_replicate_degree": "replicate",
    "parallelism.data_parallel_shard_degree": "shard",
    "training.data_parallel_shard_degree": "shard",
    "parallelism.fsdp_reshard_after_forward": "reshard",
    "parallelism.enable_sequence_parallel": "sequence_parallel",
    "parallelism.pipeline_parallel_schedule": "schedule",
    "parallelism.pipeline_parallel_microbatch_size": "stage_batch",
    "activation_checkpoint.mode": "recompute",
    "activation_checkpoint": "recompute",
    "optimizer.name": "optimizer",
    "checkpoint.initial_load_in_hf": "from_weights",
    "training.enable_cpu_offload": "cpu_offload",
    "training.mixed_precision_param": "mixed",
    "model.name": "name",
    "model.flavor": "flavor",
}
SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved",
    "zbvzerobubble": "zero_bubble",
    "interleavedzerobubble": "zero_bubble",
}
NOT_MODELLED = "Slipway does not model it"
OF_THE_RUN = "no effect on the plan: how a run is done and where its data is"
REASONS = {
    "job": "no effect on the plan: where a run writes and how it is called",
    "profiling": "no effect on the plan: logs, metrics and traces",
    "profiler": "no effect on the plan: logs, metrics and traces",
    "metrics": "no effect on the plan: logs, metrics and traces",
    "lr_scheduler": "no effect on the plan: the learning rate and regularisation",
    "optimizer": "no effect on the plan: the learning rate and regularisation",
    "checkpoint": "no effect on the plan: when a run evaluates and saves",
    "validation": "no effect on the plan: when a run evaluates and saves",
    "validator": "no effect on the plan: when a run evaluates and saves",
    "dataloader": "no effect on the plan: the data set and its preparation",
    "tokenizer": "no effect on the plan: the data set and its preparation",
    "comm": "no effect on the plan: how the processes are started and find each other",
    "debug": "no effect on the plan: logs, metrics and traces",
    "compile": "Slipway does not model another choice of CUDA graphs and compilation",
    "quantize": "Slipway does not model FP8 by another library than the plan's",
    "float8": "Slipway does not model FP8 by another library than the plan's",
    "mx": "Slipway does not model FP8 by another library than the plan's",
    "model": NOT_MODELLED,
    "model_spec": "the model of the configuration, by its name",
    "hf_assets_path": "no effect on the plan: how files are found and loaded",
    "experimental": NOT_MODELLED,
    "fault_tolerance": NOT_MODELLED,
    "memory_estimation": NOT_MODELLED,
    "activation_checkpoint": "Slipway plans selective recomputation of attention, or of layers",
}
OF_TRAINING = frozenset(
    {
        "dataset",
        "dataset_path",
        "max_norm",
        "seed",
        "deterministic",
        "compile",
        "gc_freq",
        "gc_debug",
        "mixed_precision_reduce",
        "dtype",
        "disable_cuda_graphs",
        "enable_cuda_graphs",
        "warmup_steps",
    }
)
OF_PARALLELISM = frozenset(
    {
        "disable_loss_parallel",
        "enable_async_tensor_parallel",
        "enable_compiled_autograd",
        "context_parallel_rotate_method",
        "expert_tensor_parallel_degree",
        "module_fqns_per_model_part",
        "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_split_points",
        "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_schedule_csv",
        "pipeline_parallel_expert_parallel_overlap",
        "spmd_backend",
        "fsdp_reshard_policy",
    }
)
SECTIONS = frozenset({"training", "parallelism", "parallelism_config", *REASONS})


def is_torchtitan_file(text: str) -> bool:
    """Return whether a text is TOML with sections of torchtitan."""
    found = set(re.findall(r"^\[(\w+)\]\s*(?:#.*)?$", text, re.MULTILINE))
    return "training" in found and len(found & SECTIONS) > 1


def read_torchtitan_file(draft: Draft, text: str) -> None:
    """Read a TOML file of torchtitan, of releases before its configurations were Python.

    Source: pytorch/torchtitan, torchtitan/config/job_config.py (0.2).

    Raises:
        BadRequestError: it is no TOML.
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(
            f"the text is not valid TOML: {shown(error)}; correct it, and paste it again", "text"
        ) from error
    _read_settings(TrainDraft(draft, {}), _settings_of_toml(document))


def _settings_of_toml(document: JsonObject) -> Options:
    options: Options = {}
    for section, values in document.items():
        pairs = values.items() if isinstance(values, dict) else [("", values)]
        for name, value in pairs:
            key = f"{section}.{name}" if name else section
            options[key] = Option(key, value, shown(f"{key}: {value}"), key)
    return options


def read_torchtitan_line(train: TrainDraft, program: str, words: list[str]) -> None:
    """Read the command line of ``torchtitan.train``, whose options have a section and a name.

    Source: pytorch/torchtitan, torchtitan/config/manager.py.
    """
    draft = train.draft
    draft.ignore(source_of(program), "torchtitan is read by its options")
    options: Options = {}
    at = 0
    while at < len(words):
        written, joined, value = words[at].partition("=")
        used = 0
        if not written.startswith("--"):
            draft.ignore(source_of(words[at]), "no option before it")
            at += 1
            continue
        if not joined and at + 1 < len(words) and not words[at + 1].startswith("--"):
            value, used = words[at + 1], 1
        key = written[2:].replace("-", "_")
        source = source_of(*words[at : at + 1 + used])
        options[key] = Option(key, plain(value) or None, source, written, "$" in value)
        at += 1 + used
    for key in ("job.config_file", "job.config"):
        if key in options:
            draft.assume(options.pop(key).source, "the file is not read: paste it in its place")
    module, function = options.pop("module", None), options.pop("config", None)
    if function is not None:
        options["function"] = function
        if module is not None:
            draft.ignore(module.source, "the module of the configuration")
    elif module is not None:
        draft.ignore(module.source, "the module of a configuration that is not named")
    _read_settings(train, options)


def read_torchtitan_module(draft: Draft, tree: ast.Module) -> None:
    """Read the Python module that Slipway exports: a function over one of torchtitan's own.

    Source: planner/exports/train_script.py, ``torchtitan_text``.
    """
    options: Options = {}
    launched = re.search(r"--nproc[-_]per[-_]node[= ](\d+)", ast.get_docstring(tree) or "")
    nodes = re.search(r"--nnodes[= ](\d+)", ast.get_docstring(tree) or "")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        source = shown(ast.unparse(node))
        if isinstance(target, ast.Name) and isinstance(value, ast.Call):
            name = _name(value.func)
            options.setdefault("function", Option("function", name, source, name))
        elif isinstance(target, ast.Attribute):
            key = ".".join(_path(target)[1:])
            options[key] = Option(key, _value(value), source, key)
    flavor = options.get("model_spec")
    if flavor is not None and isinstance(flavor.value, str) and "function" in options:
        prefix = options["function"].text.rsplit("_", 1)[0]
        named = f"{prefix}_{flavor.text.lower()}"
        options["function"] = Option("function", named, flavor.source, named)
        del options["model_spec"]
    train = TrainDraft(draft, {})
    if launched:
        count = int(nodes[1]) if nodes else 1
        words = launched[0] + (f" {nodes[0]}" if nodes else "")
        put_world(train, int(launched[1]), count, words)
    _read_settings(train, options)


def _name(node: ast.expr) -> str:
    return _path(node)[-1] if isinstance(node, ast.Name | ast.Attribute) else ""


def _path(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [*_path(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def _value(node: ast.expr) -> Any:  # noqa: ANN401 - a literal
    """Return a literal, the first argument of a call, or the class of a configuration."""
    if isinstance(node, ast.Call):
        first = node.args[0] if node.args else None
        return _value(first) if first is not None else _path(node.func)[0]
    try:
        return ast.literal_eval(node)
    except (ValueError, RecursionError):
        return ast.unparse(node)


def _read_settings(train: TrainDraft, options: Options) -> None:
    draft = train.draft
    train.options = rename(options, COMMON)
    _add_titan_model(train)
    loaded = train.options.pop("from_weights", None)
    train.method = "full" if loaded is not None and loaded.is_on else "pretrain"
    source = loaded.source if loaded is not None else "torchtitan trains from random weights"
    draft.put(source, "workload.method", train.method)
    _add_titan_sharding(train)
    _add_titan_pipeline(train)
    moved = train.options.pop("cpu_offload", None)
    if moved is not None and moved.is_on:
        draft.put(moved.source, "pins.offload", {"optimizer": "cpu", "weights_cpu": 1.0})
    elif moved is not None:
        draft.ignore(moved.source, "off, as without it")
    mixed = train.options.pop("mixed", None)
    if mixed is not None:
        narrow = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(mixed.text)
        if narrow in {"bf16", "fp16"}:
            draft.put(mixed.source, "pins.compute_dtype", narrow)
        else:
            draft.ignore(mixed.source, NOT_MODELLED)
    recompute = train.options.get("recompute")
    if recompute is not None:
        kind = str(recompute.value).lower()
        kind = {"fullac": "full", "selectiveac": "selective", "none": "false"}.get(kind, kind)
        train.options["recompute"] = Option("recompute", kind, recompute.source, recompute.written)
    _add_titan_accumulation(train)
    read_training(train)
    _ignore_titan_rest(draft, train.options)


def _add_titan_model(train: TrainDraft) -> None:
    """Record the model of a configuration's function, or of a name and a flavor."""
    function = train.options.pop("function", None)
    name, flavor = train.options.pop("name", None), train.options.pop("flavor", None)
    stated = [option for option in (function, name, flavor) if option is not None]
    if not stated:
        return
    source = sources(*stated)
    if function is not None:
        key = function.text
    else:
        key = "_".join(option.text for option in (name, flavor) if option is not None)
    key = key.lower().replace("-", "_").replace(".", "_")
    key = {"deepseek_v3": "deepseek_v3_671b"}.get(key, key)
    model = MODELS.get(key)
    if model is None:
        train.draft.ignore(source, "the configuration is not of a model of the catalog")
    else:
        train.spec = add_model(train.draft, source, model)


def _add_titan_sharding(train: TrainDraft) -> None:
    """Record FSDP over the sharded ranks, and with the other sizes the devices."""
    draft, options = train.draft, train.options
    copies, width = options.pop("replicate", None), options.pop("shard", None)
    reshard = options.pop("reshard", None)
    shares = width.text if width is not None else "-1"  # its default: all ranks that are left
    is_sharded = shares != "1"
    if is_sharded:
        stage = 2 if reshard is not None and reshard.text == "never" else 3
        source = sources(width, reshard) if width or reshard else "FSDP (torchtitan's default)"
        draft.put(source, "pins.zero_stage", stage)
    else:
        draft.put(sources(width, reshard), "pins.zero_stage", 0)
    number = copies.whole() if copies else 1
    if shares == "-1":
        if copies is not None:
            draft.ignore(copies.source, "the copies of the sharded ranks, whose number is open")
        return
    size = width.whole() if width else 1
    draft.put(sources(copies, width), "pins.data_parallel_size", size * number)
    if size > 1 and number > 1:
        draft.put(sources(copies, width), "pins.zero_shard_size", size)
    world = size * number
    for axis in ("tensor", "pipeline", "context"):
        world *= options[axis].whole() if axis in options else 1
    if train.world is None:
        train.world = world


def _add_titan_pipeline(train: TrainDraft) -> None:
    draft, options = train.draft, train.options
    parallel = options.pop("sequence_parallel", None)
    if parallel is not None:
        draft.put(parallel.source, "pins.sequence_parallel", parallel.is_on)
    schedule = options.pop("schedule", None)
    stages = options["pipeline"].whole() if "pipeline" in options else 1
    if schedule is not None and stages > 1:
        known = SCHEDULES.get(schedule.text.lower())
        if known:
            draft.put(schedule.source, "pins.pipeline_schedule", known)
        else:
            draft.ignore(schedule.source, f"choose among {', '.join(sorted(set(SCHEDULES)))}")
    elif schedule is not None:
        draft.ignore(schedule.source, "there is one stage")


def _add_titan_accumulation(train: TrainDraft) -> None:
    """Record the sequences of a step, and how often a rank takes them before it updates.

    A pipeline splits the sequences of a rank into micro-batches; without one, a rank accumulates
    until the global batch is reached.
    """
    options = train.options
    local, stage = options.pop("local_batch", None), options.pop("stage_batch", None)
    if local is None:
        return
    stages = options["pipeline"].whole() if "pipeline" in options else 1
    if stages > 1:
        each = stage.whole() if stage is not None else 1
        options["micro_batch"] = stage or Option("micro_batch", 1, "micro-batches of one sequence")
        steps = max(1, local.whole() // each)
        options["accumulation"] = Option("accumulation", steps, local.source, local.title)
        return
    if stage is not None:
        train.draft.ignore(stage.source, "there is one stage")
    options["micro_batch"] = local
    total = options.get("global_batch")
    if total is None or total.text == "-1":
        options.pop("global_batch", None)
        if total is not None:
            train.draft.ignore(total.source, "-1: the local batches of all ranks")
        return
    if train.world is None:
        return
    ranks = train.world
    for axis in ("tensor", "context"):
        ranks //= options[axis].whole() if axis in options else 1
    step = local.whole() * ranks
    if step and total.whole(most=10**9) % step == 0:
        steps = total.whole(most=10**9) // step
        options["accumulation"] = Option("accumulation", steps, total.source, total.title)


def _ignore_titan_rest(draft: Draft, options: Mapping[str, Option]) -> None:
    for key, option in options.items():
        section, _, name = key.partition(".")
        if section in REASONS:
            draft.ignore(option.source, REASONS[section])
        elif (section, name) in _of_sections():
            is_layout = section == "parallelism"
            draft.ignore(option.source, NOT_MODELLED if is_layout else OF_THE_RUN)
        else:
            draft.reject(option.source, key, COMMON)


def _of_sections() -> Iterator[tuple[str, str]]:
    yield from (("training", name) for name in OF_TRAINING)
    yield from (("parallelism", name) for name in OF_PARALLELISM)
