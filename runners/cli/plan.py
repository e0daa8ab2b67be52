"""``slipway plan GOAL MODEL``: the options of each goal, and the request that they make.

An option is a row of a table: its names, the field of the PlanRequest that it sets, and how its
text is read. Every other field is reached by ``--set FIELD=VALUE``.
"""

import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer._click import Context
from typer._click.exceptions import NoSuchOption
from typer.core import TyperGroup

from runners.cli.errors import CliError, planner_error
from runners.cli.output import OutputOption, progress, write_document
from runners.cli.plans import is_file, keep_plan, parse_document, read_document, read_text
from runners.cli.quantities import (
    Reader,
    count,
    count_or_max,
    duration,
    length,
    rate,
    share,
    value_of_field,
    word,
)

if TYPE_CHECKING:
    from planner.catalog.gguf_names import ModelName
    from planner.specs.estimate import PlanAnswer, PlanRequest

Document = dict[str, Any]  # the JSON of a PlanRequest


class GoalOption(NamedTuple):
    """One option: its names, the request's field, the reader of its text, its help."""

    names: tuple[str, ...]
    field: str
    read: Reader
    words: str

    @property
    def key(self) -> str:
        """Return the name of the parameter: the first name without dashes."""
        return self.names[0].lstrip("-").replace("-", "_")

    @property
    def metavar(self) -> str:
        """Return what the help shows for the value."""
        return METAVARS[self.read]


METAVARS: dict[Reader, str] = {
    count: "N",
    count_or_max: "N",
    length: "TOKENS",
    duration: "DURATION",
    rate: "RATE",
    share: "SHARE",
    word: "NAME",
}


def _percentiles(figure: str, names: Sequence[str], words: str) -> Iterator[GoalOption]:
    """Yield the options that bound a percentile of a latency."""
    for percentile in ("p50", "p90", "p95", "p99"):
        yield GoalOption(
            tuple(f"--{name}-{percentile}" for name in names),
            f"constraints.{figure}_{percentile}_seconds.max",
            duration,
            f"{words}, {percentile} at most.",
        )


SEARCH = (
    GoalOption(
        ("--objective",),
        "objective",
        word,
        "What to rank by: throughput, latency, cost, energy, memory, quality or balanced "
        "(default).",
    ),
    GoalOption(("--top",), "top", count, "How many plans to return (5 without it)."),
    GoalOption(
        ("--engine",),
        "engine",
        word,
        "Plan for one engine, also with its version as 'vllm 0.12.0': vllm, sglang, tensorrt_llm, "
        "llama_cpp, ik_llama_cpp, ktransformers, exllamav2, flexgen or gpt_fast to serve; torch, "
        "torchtitan, megatron, deepspeed, nemo, llm_foundry or litgpt to train. auto compares "
        "those that sites run.",
    ),
    GoalOption(
        ("--dtype", "--weight-dtype"),
        "pins.weight_dtype",
        word,
        "Format of the weights; 16 bits beside --quantization: of the activations.",
    ),
    GoalOption(
        ("--quantization",),
        "pins.quantization",
        word,
        "Quantisation of the weights: fp8, w8a8, int8, gptq, awq, nf4, nvfp4, mxfp4, gguf:TYPE "
        "(q4_k_m, q8_0, iq4_xs), exl2:BITS, aqlm:BITS or quip:BITS; chosen by the search without "
        "it.",
    ),
    GoalOption(
        ("--max-quality-loss",),
        "constraints.quality_loss_ratio.max",
        share,
        "Largest loss of quality, such as 1%.",
    ),
    GoalOption(
        ("--tensor-parallel-size", "--tp"), "pins.tensor_parallel_size", count, "Tensor parallel."
    ),
    GoalOption(
        ("--pipeline-parallel-size", "--pp"),
        "pins.pipeline_parallel_size",
        count,
        "Pipeline parallel.",
    ),
    GoalOption(
        ("--data-parallel-size", "--dp"), "pins.data_parallel_size", count, "Data parallel."
    ),
    GoalOption(
        ("--context-parallel-size", "--cp"),
        "pins.context_parallel_size",
        count,
        "Context parallel.",
    ),
    GoalOption(
        ("--expert-parallel-size", "--ep"), "pins.expert_parallel_size", count, "Expert parallel."
    ),
)
LENGTHS = (
    GoalOption(
        ("--input-len", "--prompt-tokens"),
        "workload.input_tokens",
        length,
        "Tokens of a typical prompt.",
    ),
    GoalOption(
        ("--output-len", "--output-tokens"),
        "workload.output_tokens",
        length,
        "Tokens of a typical answer.",
    ),
)
CACHE = (
    GoalOption(("--kv-cache-dtype",), "pins.kv_cache_dtype", word, "Format of the KV cache."),
    GoalOption(
        ("--gpu-memory-utilization",),
        "pins.gpu_memory_utilization",
        share,
        "The engine's share of the device's memory.",
    ),
)
TTFT, TPOT = "Time to first token", "Time per output token, the mean ITL of a request"
SERVING = (
    *LENGTHS,
    GoalOption(
        ("--concurrency",),
        "workload.concurrency",
        count_or_max,
        "Requests in flight (closed loop), or max: as many as memory allows.",
    ),
    GoalOption(
        ("--rate", "--request-rate"),
        "workload.request_rate_per_second",
        rate,
        "Requests per second (open loop), such as 5 or 300/min.",
    ),
    GoalOption(
        ("--burst",), "workload.burst_requests", count, "Requests that all arrive at once."
    ),
    GoalOption(
        ("--prefix-share",),
        "workload.prefix_share_ratio",
        share,
        "Share of the prompt that requests have in common.",
    ),
    GoalOption(
        ("--max-model-len",),
        "workload.max_request_tokens",
        length,
        "Tokens of the longest request, prompt and answer together.",
    ),
    GoalOption(("--ttft",), "workload.ttft_slo_seconds", duration, f"{TTFT}, mean at most."),
    *_percentiles("ttft", ("ttft",), TTFT),
    GoalOption(
        ("--itl", "--tpot"), "workload.tpot_slo_seconds", duration, f"{TPOT}, mean at most."
    ),
    *_percentiles("tpot", ("itl", "tpot"), TPOT),
    *_percentiles("latency", ("latency",), "Time of a whole request"),
    *CACHE,
    GoalOption(
        ("--max-num-batched-tokens",),
        "pins.max_batch_tokens",
        length,
        "Tokens of one engine step.",
    ),
)
GENERATION = (
    *LENGTHS,
    GoalOption(("--batch-size",), "workload.batch_size", count, "Sequences of the batch."),
    *CACHE,
)
TRAINING = (
    GoalOption(
        ("--seq-len", "--sequence-length"),
        "workload.sequence_length",
        length,
        "Tokens of a training sequence.",
    ),
    GoalOption(
        ("--batch-size", "--global-batch-size"),
        "workload.global_batch_size",
        count,
        "Sequences of one update, over all devices.",
    ),
    GoalOption(("--tokens",), "workload.tokens", count, "Tokens of the run, such as 2M or 15T."),
    GoalOption(
        ("--time-budget",), "workload.time_budget_seconds", duration, "Time of the run, as 8h."
    ),
    GoalOption(
        ("--method",),
        "workload.method",
        word,
        "full, lora, qlora, pretrain, lomo, adalomo, qft or alphatuning.",
    ),
    GoalOption(("--lora-rank",), "workload.lora_rank", count, "Rank of the adapter."),
    GoalOption(("--lora-targets",), "workload.lora_targets", word, "all or query_value."),
    GoalOption(
        ("--optimizer",),
        "workload.optimizer",
        word,
        "adamw (default), adamw_8bit, adafactor, lion, sgd, lomo or adalomo.",
    ),
    GoalOption(
        ("--micro-batch-size",), "pins.micro_batch_size", count, "Sequences of one pass of a rank."
    ),
    GoalOption(
        ("--gradient-accumulation-steps",),
        "pins.gradient_accumulation_steps",
        count,
        "Passes before one update.",
    ),
    GoalOption(("--zero-stage",), "pins.zero_stage", word, "ZeRO stage: 0, 1, 2 or 3."),
    GoalOption(
        ("--activation-recomputation",),
        "pins.activation_recomputation",
        word,
        "none, selective or full.",
    ),
)
COMPRESSION = (
    GoalOption(
        ("--method",),
        "workload.method",
        word,
        "int8_weight_only, int8_dynamic, fp8, gguf, int4_weight_only, nf4, gptq, awq, "
        "autoround, sparsegpt, fptq, norm_tweaking, finequant, quantease, qmoe, "
        "llm_pruner or sheared_llama.",
    ),
    GoalOption(("--bits",), "workload.bits", count, "Bits of a weight."),
    GoalOption(("--group-size",), "workload.group_size", count, "Weights that share a scale."),
    GoalOption(
        ("--calibration-tokens",),
        "workload.calibration_tokens",
        count,
        "Tokens of the calibration text.",
    ),
)


class Goal(NamedTuple):
    """A goal: the kind of its workload, its help, defaults and options."""

    kind: str
    words: str
    defaults: Mapping[str, object]
    options: tuple[GoalOption, ...]


TRAINING_DEFAULTS = {"sequence_length": 2048, "global_batch_size": 16}
GOALS: dict[str, Goal] = {
    "serve": Goal(
        "serve",
        "Plan an endpoint: which engine, format and layout, how fast, at what price.",
        {"input_tokens": 1024, "output_tokens": 256, "concurrency": 16},
        SERVING,
    ),
    "generate": Goal(
        "generate",
        "Plan the answers to one batch of prompts.",
        {"input_tokens": 1024, "output_tokens": 256, "batch_size": 16},
        GENERATION,
    ),
    "tune": Goal(
        "train", "Plan a fine-tuning.", {**TRAINING_DEFAULTS, "method": "lora"}, TRAINING
    ),
    "train": Goal(
        "train", "Plan a pre-training.", {**TRAINING_DEFAULTS, "method": "pretrain"}, TRAINING
    ),
    "compress": Goal("compress", "Plan a compression.", {"method": "gptq"}, COMPRESSION),
}
COMPARED = frozenset({"serve", "generate"})  # goals whose engine is open
# Serving has one kind of arrival; the default holds only if none of them is given.
ARRIVALS = ("concurrency", "request_rate_per_second", "burst_requests")


# From options to the request: defaults, then a file, then options, then --set.


@dataclass(frozen=True)
class Requested:
    """A request as a document, and the defaults in it that nobody gave."""

    document: Document
    assumed: tuple[str, ...] = ()


def build_document(
    goal_name: str,
    model: str | None,
    options: Mapping[str, str],
    *,
    hardware: Sequence[str] = (),
    settings: Sequence[str] = (),
    base: Document | None = None,
    is_draft: bool = False,
    has_cluster: bool = True,
) -> Requested:
    """Return the request of a goal's options, by parameter names, and of ``--set`` values.

    ``base`` is a request from a file, which takes the place of the defaults; if ``is_draft``, the
    defaults fill what it lacks. Without ``has_cluster`` the request is in part: a server sets the
    hardware and the engine.

    Raises:
        CliError: a text cannot be read, or names no hardware, model or object.
    """
    from runners.cli.hardware import THIS, parse_hardware

    goal = GOALS[goal_name]
    document: Document = json.loads(json.dumps(base or {}, default=str))
    kind = _object(document, "workload").setdefault("kind", goal.kind)
    if kind != goal.kind:
        raise CliError(
            f"workload.kind is {kind!r} in the file, but `plan {goal_name}` makes {goal.kind!r}: "
            "use the goal of the file",
            field="workload.kind",
        )
    clusters, notes = _clusters(document, hardware if has_cluster else ())
    known = {option.key: option for option in (*goal.options, *SEARCH)}
    given: list[tuple[str, object]] = []
    for key, text in options.items():
        option = known[key]
        given.append((option.field, option.read(option.names[0], text)))
    given += map(_setting, settings)
    if model is not None:
        stated, assumed = _set_model(document, model, dict(given))
        given, notes = [*stated, *given], (*notes, *assumed)
    for field, value in given:
        if field.partition(".")[0] in {"cluster", "hardware_options"} and not has_cluster:
            raise CliError(
                f"--set {field}: the server knows the hardware of its hosts; leave it out, or "
                "name hardware of the catalog by --on",
                field=field,
            )
        for each in clusters[1:] if field.startswith("cluster.") else ():
            set_field({"cluster": each}, field, value)
        set_field(document, field, value)
    if "model" not in document:
        raise CliError(
            "MODEL is missing: give a catalog id, the path of a config.json, or --from FILE",
            field="model",
        )
    cluster = _object(document, "cluster")
    if not has_cluster:
        for name in ("cluster", "hardware_options"):
            document.pop(name, None)
    elif not {"device", "instance"} & cluster.keys():
        document["cluster"] = {**parse_hardware(THIS), **cluster}
    named = {name for name, _ in given}
    _settle_run_length(document, named)
    if base and not is_draft:
        return Requested(document, notes)
    batch = _fill_batch(document, named) if base and goal.kind == "train" else ()
    return Requested(document, (*notes, *batch, *_fill_defaults(document, goal, named)))


def _set_model(
    document: Document, name: str, given: Mapping[str, object]
) -> tuple[list[tuple[str, object]], list[str]]:
    """Set the model that a name stands for, and return the fields that it states, and notes.

    Raises:
        CliError: no model has this name, or it states another quantisation than an option.
    """
    found = read_model(name)
    if isinstance(found, dict):
        document["model"] = found
        return [], []
    from planner.catalog.gguf_names import agreed_pins
    from planner.specs.base import PlannerError

    document["model"] = found.id
    pins = {**document.get("pins", {})}
    if (quantization := given.get("pins.quantization")) is not None:
        pins["quantization"] = quantization
    try:
        stated = agreed_pins(found, pins, "--quantization")
    except PlannerError as error:
        raise planner_error(error) from error
    if not stated or document["workload"]["kind"] not in {"serve", "generate"}:
        return [], []
    return [(f"pins.{pin}", value) for pin, value in stated.items()], [
        found.assumed or f"{' '.join(stated.values())}, as MODEL states (--quantization)"
    ]


def _settle_run_length(document: Document, named: Collection[str]) -> None:
    """Let a run end by its tokens or its time: an option takes the place of a file's other one.

    Raises:
        CliError: both are given.
    """
    both = {"tokens", "time_budget_seconds"}
    workload = _object(document, "workload")
    if not both <= workload.keys():
        return
    given = {name for name in both if f"workload.{name}" in named}
    if len(given) == 1:
        workload.pop(*(both - given))
    elif given:
        raise CliError(
            "--tokens and --time-budget are both given, and a run ends by one of them: with "
            "--tokens the plan says how long it takes, with --time-budget how many tokens it "
            "trains",
            field="workload.time_budget_seconds",
        )


def _object(document: Document, name: str) -> Document:
    """Return a part of the request, made if it is absent; a cluster's text is a cloud offer."""
    part = document.setdefault(name, {})
    if name == "cluster" and isinstance(part, str):
        document[name] = part = {"instance": part}
    if not isinstance(part, dict):
        raise CliError(f"{name} is {part!r}: it must be an object with fields", field=name)
    return part


def set_field(document: Document, path: str, value: object) -> None:
    """Set a field of nested objects by its dotted path; None removes it.

    Raises:
        CliError: a part of the path is a value instead of an object.
    """
    *parents, last = path.split(".")
    place = document
    for depth, name in enumerate(parents, 1):
        inner = place.setdefault(name, {})
        if not isinstance(inner, dict):
            raise CliError(
                f"--set {path}: {'.'.join(parents[:depth])} is {inner!r}, which has no fields; "
                f"give it whole, such as --set '{parents[depth - 1]}={{…}}'",
                field=path,
            )
        place = inner
    if value is None:
        place.pop(last, None)
    else:
        place[last] = value


def _clusters(
    document: Document, hardware: Sequence[str]
) -> tuple[list[Document], tuple[str, ...]]:
    """Set the clusters that texts name, and return them with what was assumed of them.

    Without texts they are the document's own.
    """
    from runners.cli.hardware import read_hardware_option

    if not hardware:
        return [_object(document, "cluster")], ()
    found = [read_hardware_option(each) for each in hardware]
    clusters = [each.cluster for each in found]
    document["cluster"] = clusters[0]
    document.pop("hardware_options", None)
    if len(clusters) > 1:
        document["hardware_options"] = clusters
    return clusters, tuple(each.note for each in found if each.note)


def _setting(text: str) -> tuple[str, object]:
    """Return the field and the value of a ``--set`` option."""
    field, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not all(field.split(".")):
        raise CliError(
            f"--set is {text!r}: write it as FIELD=VALUE, such as workload.concurrency=8",
            field="--set",
        )
    return field, value_of_field(field, value)


def _fill_defaults(document: Document, goal: Goal, given: Collection[str]) -> Iterator[str]:
    """Set the goal's defaults that nobody gave, and yield each with its option."""
    workload = _object(document, "workload")
    for name in goal.defaults:
        names = ARRIVALS if name in ARRIVALS else (name,)
        if name in workload or any(f"workload.{each}" in given for each in names):
            continue
        workload[name] = value = _default_of(name, goal, document)
        flag = next(o.names[0] for o in goal.options if o.field == f"workload.{name}")
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        yield f"{name.replace('_', ' ')} {shown} ({flag})"
    if goal.kind in COMPARED and "engine" not in document and "cluster" in document:
        is_gguf = str(_object(document, "pins").get("quantization")).startswith("gguf")
        document["engine"] = "llama_cpp" if is_gguf else "auto"
        compared = "" if is_gguf else ": the engines that sites run, compared"
        yield f"engine {document['engine']}{compared} (--engine)"


# Tokens of one update in pre-training, by parameters: GPT-3's 0.5 to 3.2 million (Brown et al.
# 2020, table 2.1) and the 4 million of Llama 2 (Touvron et al. 2023, section 2.2).
BATCH_TOKENS = ((1e9, 2**19), (6e9, 2**20), (30e9, 2**21), (float("inf"), 2**22))
CLUSTER_DEVICES = 8  # fewer are for trials, whose batch is small


def _default_of(name: str, goal: Goal, document: Document) -> object:
    """Return a goal's default for the model and the hardware of a request."""
    usual = goal.defaults[name]
    if name == "concurrency":
        return 1 if "cluster" in document and _is_personal(document["cluster"]) else usual
    if name not in {"sequence_length", "global_batch_size"}:
        return usual
    from planner.catalog.models import get_model, model_from_config
    from planner.cost.parameters import count_parameters
    from planner.specs.base import PlannerError

    given = document["model"]
    try:
        model = get_model(given) if isinstance(given, str) else model_from_config(given, "custom")
    except PlannerError:
        return usual  # the search says what is wrong
    if name == "sequence_length":
        return min(int(str(usual)), model.max_position_embeddings)
    workload = document["workload"]
    sequence = workload.get("sequence_length")
    is_cluster = (_devices(document) or 1) >= CLUSTER_DEVICES
    if (
        workload.get("method", goal.defaults.get("method")) != "pretrain"
        or not is_cluster
        or not sequence
    ):
        return usual
    total = count_parameters(model).total
    tokens = next(tokens for most, tokens in BATCH_TOKENS if total < most)
    return max(1, tokens // int(sequence))


def _is_personal(cluster: Document) -> bool:
    """Return whether a cluster is one computer of a person: a laptop, a CPU, unified memory."""
    from planner.catalog.devices import find_device

    device = cluster.get("device")
    found = find_device(device) if isinstance(device, str) else None
    fields = found.model_dump(include={"id", "kind"}) if found else device
    if not isinstance(fields, dict):
        return False
    return fields.get("kind") in {"cpu", "uma"} or str(fields.get("id")).endswith("-laptop")


def _fill_batch(document: Document, given: Collection[str]) -> Iterator[str]:
    """Set the sequences of one update that a trainer's file makes on the hardware, and yield them.

    They are micro-batch x accumulation x data-parallel ranks, where the file states a micro-batch.
    """
    workload, pins = _object(document, "workload"), _object(document, "pins")
    micro = pins.get("micro_batch_size")
    name = "global_batch_size"
    is_stated = name in workload or f"workload.{name}" in given
    if is_stated or not isinstance(micro, int) or not (devices := _devices(document)):
        return
    steps = pins.get("gradient_accumulation_steps") or 1
    ranks = devices
    for axis in ("tensor", "pipeline", "context"):
        ranks //= pins.get(f"{axis}_parallel_size") or 1
    ranks = pins.get("data_parallel_size") or max(1, ranks)
    workload[name] = micro * steps * ranks
    yield (
        f"global batch size {micro * steps * ranks:,} = micro-batch {micro} x accumulation "
        f"{steps} x {ranks} ranks (--batch-size)"
    )


def _devices(document: Document) -> int | None:
    """Return the number of devices of a request's first cluster, None if it is not known."""
    from planner.catalog.devices import find_instance
    from planner.specs.cluster import ClusterSpec

    try:
        cluster = ClusterSpec.model_validate(document["cluster"])
    except (KeyError, ValueError):
        return None  # validation of the request says what is wrong
    if cluster.instance is None:
        return cluster.num_devices
    offer = find_instance(cluster.instance)
    return None if offer is None else offer.devices * cluster.nodes


def read_model(name: str) -> "ModelName | Document":
    """Return a model of the catalog with what its name states, or the config of a folder or file.

    Raises:
        CliError: the file is not there or is not a JSON object, or no model has the name.
    """
    for path in (Path(name, "config.json"), Path(name)):
        if path.suffix == ".json" and is_file(path):
            return read_document(str(path))
    from planner.catalog.gguf_names import read_model_name
    from planner.specs.base import PlannerError

    try:
        return read_model_name(name)
    except PlannerError as error:
        if is_path(name):
            what = "a folder without a config.json" if Path(name).is_dir() else "not there"
            raise CliError(
                f"MODEL is {name!r}: this path is {what}; give a config.json, a folder with one, "
                "or a name of the catalog",
                code="not_found",
                field="model",
            ) from error
        raise CliError(
            f"MODEL is {name!r}: {error}; `slipway models find TEXT` searches",
            code=error.code,
            field="model",
        ) from error


def is_path(name: str) -> bool:
    """Return whether a text is written as a path: not as a repository's or a model's name."""
    is_written = name.startswith(("/", "./", "../", "~", ".\\")) or name.endswith((".json", "/"))
    return is_written or name.count("/") > 1 or Path(name).is_dir()


def request_of(document: Document) -> "PlanRequest":
    """Return the validated request of a document.

    Raises:
        CliError: a field is unknown, or its value is out of range; the message names it.
    """
    from planner.api import parse_model
    from planner.specs.base import PlannerError
    from planner.specs.estimate import PlanRequest

    try:
        return parse_model(PlanRequest, json.dumps(document, default=str))
    except PlannerError as error:
        raise planner_error(error) from error


def answer_of(request: "PlanRequest") -> "PlanAnswer":
    """Return the planner's answer; a slow search shows that it runs.

    Raises:
        CliError: a name is unknown, or a pin is impossible.
    """
    with progress("Searching strategies"):
        from planner.api import plan
        from planner.specs.base import PlannerError

        try:
            return plan(request)
        except PlannerError as error:
            raise planner_error(error) from error


# The commands: one for each goal, with the options of its table.


class PlanGroup(TyperGroup):
    """The goals; an option of a goal that stands without one is refused with the way out."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the options before the goal.

        Raises:
            NoSuchOption: an option is unknown here.
        """
        try:
            return super().parse_args(ctx, args)
        except NoSuchOption as error:
            goals = [
                name
                for name, goal in GOALS.items()
                if any(error.option_name in each.names for each in (*goal.options, *SEARCH))
            ]
            if goals:
                error.message += (
                    f". It needs a GOAL: `slipway plan GOAL --from FILE {error.option_name} …`, "
                    f"where GOAL is {' or '.join(goals)}"
                )
            raise


app = typer.Typer(
    cls=PlanGroup,
    help="Find the best plan for a goal, a model and hardware; no server is needed.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


def complete_model(incomplete: str) -> list[str]:
    """Return the catalog's models that a name begins, with or without their owner."""
    from planner.catalog.models import list_models

    names = [name for entry in list_models() for name in (entry.id, entry.id.rpartition("/")[2])]
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def complete_hardware(incomplete: str) -> list[str]:
    """Return the catalog's devices that a text begins, else the server's hosts; a count stays."""
    from planner.catalog.devices import devices_of_every_size
    from planner.catalog.hardware_names import COUNT_FIRST

    match = COUNT_FIRST.fullmatch(incomplete)
    name = match[2] if match else incomplete
    before = incomplete.removesuffix(name)
    found = [each.id for each in devices_of_every_size() if each.id.startswith(name.lower())]
    names = [*(f"{before}{each}" for each in found), *(["this"] if incomplete in "this" else [])]
    if names:
        return names
    from runners.cli.server import complete_host

    return [name for name, _ in complete_host(incomplete)]


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A catalog id (llama-3.1-8b), or the path of a config.json.",
        autocompletion=complete_model,
    ),
]
HardwareOption = Annotated[
    list[str] | None,
    typer.Option(
        "--on",
        "--hardware",
        metavar="HARDWARE",
        help="8xh200, 2x8xh100 (nodes x devices), a cloud offer, a host or pool of the server, or "
        "this (machine), which is the default. Repeat it to choose among several.",
        autocompletion=complete_hardware,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Any field of the request, by its path."),
]
FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="A request or an answer in JSON or YAML, or another tool's command line or file; "
        "- reads.",
    ),
]


PasteOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Without a GOAL: a command line or a file of another tool, such as vLLM, SGLang, "
        "llama.cpp, torchrun, Axolotl or LLaMA-Factory, or a config.json; - reads.",
    ),
]


@app.callback(invoke_without_command=True)
def plan_from(
    context: typer.Context,
    from_: PasteOption = None,
    hardware: HardwareOption = None,
    set_: SetOption = None,
    output: OutputOption = "table",
) -> None:
    """Find the best plan for a goal, a model and hardware; no server is needed."""
    if context.invoked_subcommand is not None:
        return
    if from_ is None:
        raise CliError(f"GOAL is missing: one of {', '.join(GOALS)}, or --from FILE", field="GOAL")
    base, words = _imported(read_text(from_), hardware or ())
    workload = base.get("workload", {})
    goal = workload.get("kind", "serve")
    if goal == "train" and workload.get("method", "full") != "pretrain":
        goal = "tune"
    _plan_documents(
        partial(build_document, goal, None, {}, settings=set_ or (), base=base, is_draft=True),
        hardware or (),
        output,
        words,
    )


def _imported(text: str, hardware: Sequence[str] = ()) -> tuple[Document, tuple[str, ...]]:
    """Return the draft request of another tool's text, and what it plans in place of the text.

    A table of what became of each setting is printed. Hardware that is named is no longer missing.

    Raises:
        CliError: the text is of no tool that is known.
    """
    from planner.imports import import_table, read_paste
    from planner.specs.base import PlannerError

    try:
        imported = read_paste(text)
    except PlannerError as error:
        raise planner_error(error) from error
    missing = tuple(
        each for each in imported.missing if not (hardware and each.startswith("cluster."))
    )
    typer.echo(import_table(imported.model_copy(update={"missing": missing})), err=True)
    base: Document = json.loads(imported.model_dump_json())["request"]
    if imported.goal:
        _object(base, "workload").setdefault("kind", imported.goal)
    return base, imported.assumptions


def _plan_command(goal_name: str) -> Callable[..., None]:
    """Return the command of a goal; its parameters are the rows of the goal's table."""

    def command(**given: Any) -> None:
        texts = {key: value for key, value in given.items() if key not in PLAIN}
        run_plan(
            goal_name,
            given["model"],
            {key: text for key, text in texts.items() if text is not None},
            hardware=given["hardware"] or (),
            settings=given["set_"] or (),
            source=given["from_"],
            output=given["output"],
        )

    own = [
        inspect.Parameter(
            option.key,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None, typer.Option(*option.names, metavar=option.metavar, help=option.words)
            ],
        )
        for option in (*GOALS[goal_name].options, *SEARCH)
    ]
    plain = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, (annotation, default) in PLAIN.items()
    ]
    command.__signature__ = inspect.Signature([*plain[:2], *own, *plain[2:]])  # type: ignore[attr-defined]
    command.__doc__ = GOALS[goal_name].words
    return command


PLAIN: dict[str, tuple[Any, Any]] = {
    "model": (ModelArgument, None),
    "hardware": (HardwareOption, None),
    "set_": (SetOption, None),
    "from_": (FromOption, None),
    "output": (OutputOption, "table"),
}
for _name in GOALS:
    app.command(_name)(_plan_command(_name))


def run_plan(
    goal_name: str,
    model: str | None,
    options: Mapping[str, str],
    *,
    hardware: Sequence[str],
    settings: Sequence[str],
    source: str | None,
    output: str,
) -> None:
    """Plan, keep the answer, and print it.

    Raises:
        CliError: the request is wrong, or nothing fits: then after the reasons are printed.
    """
    base, is_draft, words = _read_base(source, hardware) if source else (None, False, ())
    build = partial(
        build_document,
        goal_name,
        model,
        options,
        settings=settings,
        base=base,
        is_draft=is_draft,
    )
    _plan_documents(build, hardware, output, words)


# Keys of a request or an answer, of which another tool's file has none or the model alone.
OWN_KEYS = frozenset({"workload", "plans", "cluster", "pins", "constraints", "objective"})


def _read_base(
    source: str, hardware: Sequence[str]
) -> tuple[Document | None, bool, tuple[str, ...]]:
    """Return the request of a file, whether it is a draft of another tool's text, and its words.

    Raises:
        CliError: it cannot be read, or is neither a request nor of a tool that is known.
    """
    text = read_text(source)
    try:
        base = parse_document(text, source)
    except CliError as error:
        try:
            draft, words = _imported(text, hardware)
        except CliError as other:
            raise CliError(
                f"{error}; as another tool's text: {other}", field=other.field
            ) from other
        return draft, True, words
    if "plans" in base:  # an answer holds its request
        return base.get("request"), False, ()
    if OWN_KEYS & base.keys() or set(base) <= {"model", "engine"}:
        return base, False, ()
    draft, words = _imported(text, hardware)
    return draft, True, words


def _with_words(answer: "PlanAnswer", words: Sequence[str]) -> "PlanAnswer":
    """Return an answer whose plans say what they leave out of another tool's text."""
    said = tuple(f"not as in the text: {each}" for each in words)
    plans = [
        tuple(each.model_copy(update={"warnings": (*each.warnings, *said)}) for each in listed)
        for listed in (answer.plans, answer.pareto)
    ]
    return answer.model_copy(update={"plans": plans[0], "pareto": plans[1]})


def _plan_documents(
    build: Callable[..., Requested],
    hardware: Sequence[str],
    output: str,
    words: Sequence[str] = (),
) -> None:
    """Plan the request that ``build`` makes for the hardware, keep the answer, and print it.

    ``words`` are what the plans leave out of the text that the request was made of. Hardware that
    no catalog knows is looked up among the server's hosts and pools.

    Raises:
        CliError: the request is wrong, or nothing fits: then after the reasons are printed.
    """
    try:
        requested = build(hardware=hardware)
    except CliError as error:
        if (error.code, error.field) != ("unknown_device", "--on"):
            raise
        from runners.cli.launch import plan_on_server

        requested = build(has_cluster=False)
        answer = plan_on_server(requested.document, hardware, unknown=error)
    else:
        answer = answer_of(request_of(requested.document))
    answer = keep_plan(_with_words(answer, words))
    if output == "table":
        from runners.cli.report import print_plan

        print_plan(answer, requested.assumed)
    else:
        write_document(answer.model_dump_json(), output)
    if not answer.plans:
        from runners.cli.report import nothing_fits

        raise nothing_fits(answer)
