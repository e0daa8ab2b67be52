"""The export formats, with a measuring script of the plan's figures."""

import json
from importlib.resources import files

from planner.catalog.models import is_known_model
from planner.exports.export import (
    Export,
    ExportCase,
    Format,
    Notes,
    claims_of,
    configuration_of,
    formats_for,
    heterogeneous_body,
    heterogeneous_notes,
    heterogeneous_parts,
    is_heterogeneous,
)
from planner.exports.kubernetes import COMPOSE, KUBERNETES
from planner.exports.launch import SLURM, runs_megatron
from planner.exports.llama_cpp import LLAMA_CPP
from planner.exports.megatron import MEGATRON, as_run
from planner.exports.sglang import SGLANG
from planner.exports.tensorrt_llm import TENSORRT_LLM
from planner.exports.train_script import ACCELERATE, DEEPSPEED, TORCHRUN, TORCHTITAN
from planner.exports.vllm import VLLM
from planner.specs.base import BadRequestError, JsonObject
from planner.specs.estimate import PlannedStrategy, PlanRequest
from planner.specs.model import ModelSpec
from planner.specs.workload import GenerateWorkload, ServeWorkload, TrainWorkload
from planner.techniques.registry import Case
from planner.workload.cluster import resolve_cluster, resolve_device
from planner.workload.resolve import resolve_model

# The measuring script of an export: a probe that contains the prediction.


PROBES = {"serve": "serving.py", "generate": "serving.py", "train": "training.py"}
IMPORT = "from planner.exports.probes.report import report\n"
EMPTY_CLAIM = "CLAIM: dict[str, Any] = {}"
# Rounds of a closed loop: enough that ramp-up and ramp-down have little weight.
ROUNDS = 4


def measure_text(case: ExportCase) -> str:
    """Return the script, empty for work that only the product's runner measures."""
    probe = PROBES.get(case.workload.kind)
    if probe is None:
        return ""
    report = _source("report.py").split("from typing import Any\n")[1].strip("\n")
    text = _source(probe).replace(IMPORT, f"\n{report}\n\n")
    claim = json.dumps(verification_input(case), indent=1, ensure_ascii=False)
    return text.replace(
        EMPTY_CLAIM, f"CLAIM: dict[str, Any] = json.loads(r'''{claim}''')"
    ).replace(
        "import re\n", "import json\nimport re\n" if probe == "training.py" else "import re\n"
    )


def _source(name: str) -> str:
    return files("planner.exports").joinpath("probes", name).read_text("utf-8")


def verification_input(case: ExportCase) -> JsonObject:
    """Return the script's input: the figures with their bounds, and the load to send."""
    load, requests = _load(case)
    return {
        "title": f"{case.model} on {case.hardware}",
        "model": case.model,
        "figures": claims_of(case.plan, case.workload.kind),
        "load": load,
        "requests": requests,
    }


def _load(case: ExportCase) -> tuple[JsonObject, int]:
    workload = case.workload
    if isinstance(workload, TrainWorkload):
        batch = {"global_batch_size": workload.global_batch_size}
        return {
            **batch,
            "sequence_length": workload.sequence_length,
            "devices": case.devices,
        }, 0
    if not isinstance(workload, ServeWorkload | GenerateWorkload):
        return {}, 0
    lengths = {"input_tokens": workload.input_tokens, "output_tokens": workload.output_tokens}
    load: JsonObject = {**lengths, "vocab_size": case.shape.vocab_size}
    if isinstance(workload, GenerateWorkload):
        return {**load, "concurrency": workload.batch_size}, workload.batch_size
    load["prefix_share_ratio"] = workload.prefix_share_ratio
    if workload.length_variation:
        load["length_variation"] = workload.length_variation
    if workload.length_variation and workload.max_request_tokens:
        load["max_request_tokens"] = workload.max_request_tokens
    if workload.request_rate_per_second:
        rate = workload.request_rate_per_second
        return {**load, "request_rate_per_second": rate}, max(100, int(60 * rate))
    concurrency = workload.concurrency or case.plan.performance.max_concurrency or 1
    return {**load, "concurrency": concurrency}, ROUNDS * concurrency


SERVERS = (VLLM, SGLANG, TENSORRT_LLM, LLAMA_CPP)
TRAINERS = (TORCHRUN, ACCELERATE, DEEPSPEED, TORCHTITAN, MEGATRON)
MANAGERS = (SLURM, KUBERNETES, COMPOSE)
FORMATS: dict[str, Format] = {one.key: one for one in (*SERVERS, *TRAINERS, *MANAGERS)}
LOCAL_MODEL = "./model"


def export_case(request: PlanRequest, plan: PlannedStrategy) -> ExportCase:
    """Return the input of an export: a request with resolved names, and one of its plans.

    Raises:
        PlannerError: the model or the device is unknown.
    """
    return ExportCase(
        model=_name_of(request.model),
        shape=resolve_model(request.named_model),
        device=resolve_device(resolve_cluster(plan.cluster).device),
        plan=plan,
        workload=request.workload,
    )


def _name_of(model: str | ModelSpec | JsonObject) -> str:
    """Return the name by which an engine loads a model: a config alone has none."""
    if isinstance(model, str):
        return model
    return model.id if isinstance(model, ModelSpec) and is_known_model(model.id) else LOCAL_MODEL


def possible_formats(case: ExportCase) -> tuple[str, ...]:
    """Return the formats that express a plan whole."""
    return tuple(
        formats_for(
            Case(case.shape, case.device, case.plan.cluster, case.workload),
            case.strategy,
            case.plan.engine,
        )
    )


def export(format_name: str, case: ExportCase) -> Export:
    """Return a plan in another tool's format, with its notes and measuring script.

    Raises:
        BadRequestError: the format is unknown, or cannot express this plan.
    """
    if format_name not in FORMATS:
        raise BadRequestError(
            f"no export format {format_name!r}: choose among {', '.join(FORMATS)}", "format"
        )
    chosen = FORMATS[format_name]
    possible = possible_formats(case)
    if format_name not in (*possible, *_lossy_formats(case)):
        raise BadRequestError(
            f"{format_name} cannot express this plan ({case.workload.kind} on {case.device.id}): "
            f"choose among {', '.join(possible) or 'none'}",
            "format",
        )
    offered = format_name in possible
    more: Notes = () if offered else (f"{chosen.title} cannot express or run all of this plan",)
    if chosen is MEGATRON or (chosen in MANAGERS and runs_megatron(case)):
        case, schedule_notes = as_run(case)
        more += schedule_notes
    parts = heterogeneous_parts(case)
    notes = (*more, *heterogeneous_notes(chosen, case, parts))
    return Export(
        key=chosen.key,
        title=chosen.title,
        file_name=chosen.file_name,
        text=chosen.with_body(case, heterogeneous_body(chosen, case, parts), notes),
        notes=notes,
        measure=measure_text(case),
    )


def _lossy_formats(case: ExportCase) -> set[str]:
    """Return the formats that express only part of such plans, available on request."""
    if case.workload.kind == "compress" or is_heterogeneous(case.plan.cluster, case.workload):
        return set()
    if not isinstance(case.workload, TrainWorkload):
        return {one.key for one in (*SERVERS, *MANAGERS)}
    if case.workload.compares:
        return set()
    trainers = {one.key for one in (*TRAINERS, *MANAGERS)}
    return trainers if configuration_of(case.shape.id) else trainers - {TORCHTITAN.key}
