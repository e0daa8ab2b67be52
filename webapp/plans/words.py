"""Text for drafts and strategies: names, summaries, one line per strategy."""

from typing import Any

from planner.catalog.devices import get_device
from planner.errors import PlannerError
from planner.specs.workload import Strategy
from webapp.core.units import TIMES, clock, tokens, whole
from webapp.modelhub.shapes import DEMO_NAME

GOAL_WORDS = {
    "serve": "Serve",
    "generate": "Generate in batch",
    "finetune": "Fine-tune",
    "pretrain": "Pre-train",
    "compress": "Compress",
}
SLO_WORDS = {"chat": "chat", "code": "code", "none": "no target"}
METHOD_WORDS = {
    "pretrain": "all weights",
    "full": "all weights",
    "classification": "classification",
    "lora": "LoRA",
    "qlora": "QLoRA",
    "int8_weight_only": "8-bit weights",
    "int8_dynamic": "8-bit weights and activations",
    "fp8": "8-bit floats",
    "gguf": "GGUF",
    "int4_weight_only": "4-bit weights",
    "nf4": "NormalFloat 4",
    "gptq": "GPTQ",
    "quantease": "QuantEase",
    "awq": "AWQ",
    "fptq": "FPTQ",
    "norm_tweaking": "norm tweaking",
    "finequant": "FineQuant",
    "llm_pruner": "LLM-Pruner",
    "sheared_llama": "Sheared LLaMA",
    "qmoe": "QMoE",
    "autoround": "AutoRound",
    "sparsegpt": "SparseGPT",
}
FIELD_WORDS = {  # draft field -> label in the wizard
    "objective": "What matters most",
    "slo": "How quick it must feel",
    "percentile": "Judged at",
    "engine": "Engine",
    "catalog_id": "Model",
    "concurrency": "People at once",
    "input_tokens": "Prompt length",
    "output_tokens": "Answer length",
    "max_request_tokens": "Longest request",
    "prefix_share_percent": "Shared beginning",
    "batch_size": "Batch size",
    "sequence_length": "Sequence length",
    "global_batch_size": "Batch size",
    "optimizer": "Optimiser",
    "time_budget_minutes": "Time budget",
    "lora_rank": "Adapter rank",
    "devices_per_node": "Devices in one machine",
    "nodes": "Machines",
    "memory_limit_gib": "Fill at most",
    "weight_dtype": "Weights",
    "kv_cache_dtype": "KV cache",
    "tensor_parallel_size": "Tensor parallel",
    "pipeline_parallel_size": "Pipeline parallel",
}
DTYPE_WORDS = {
    "fp32": "FP32",
    "bf16": "BF16",
    "fp16": "FP16",
    "fp8": "FP8",
    "int8": "INT8",
    "int4": "INT4",
    "nf4": "NF4",
}
BOUND_WORDS = {
    "compute": "arithmetic",
    "memory_bandwidth": "memory bandwidth",
    "communication": "communication",
    "overhead": "the engine's own overhead",
    "memory": "memory size",
}
PARALLEL_NAMES = (
    ("tensor_parallel_size", "tensor parallel"),
    ("pipeline_parallel_size", "pipeline parallel"),
    ("data_parallel_size", "data parallel"),
    ("expert_parallel_size", "expert parallel"),
    ("context_parallel_size", "context parallel"),
)
OPTIMISER_WORDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "cpu": ("optimiser in host memory",),
    "nvme": ("optimiser on disk",),
}
Draft = dict[str, Any]
# Methods that imply their format, and methods that keep the weights' dtype.
OWN_WIDTHS = ("int8_weight_only", "int8_dynamic", "fp8", "int4_weight_only", "nf4", "qmoe")
UNPACKED = ("sparsegpt", "llm_pruner", "sheared_llama")
USUAL_BITS = 4


def dtype_words(dtype: str | None) -> str:
    """Return the display name of a dtype."""
    return DTYPE_WORDS.get(dtype or "", (dtype or "").upper())


def compression_words(draft: Draft) -> str:
    """Return a compression's method with its output format."""
    values = draft["workload"]["compress"]
    method = values["method"]
    if method in OWN_WIDTHS:  # the method implies the format
        return METHOD_WORDS[method]
    if method in UNPACKED:
        return f"{METHOD_WORDS[method]}, weights in {dtype_words('bf16')}"
    bits = values.get("bits") or USUAL_BITS
    group = f" in groups of {values['group_size']}" if values.get("group_size") else ""
    return f"{METHOD_WORDS[method]}, {bits}-bit weights{group}"


def strategy_words(strategy: Strategy) -> str:
    """Return a strategy in one line: its differences from one device with plain weights."""
    parts = [f"{_weights(strategy)} weights"]
    parts += [
        f"{name} {TIMES} {getattr(strategy, field)}"
        for field, name in PARALLEL_NAMES
        if (getattr(strategy, field) or 1) > 1
    ]
    if strategy.kv_cache_dtype and strategy.kv_cache_dtype != strategy.activation_dtype:
        parts.append(f"{dtype_words(strategy.kv_cache_dtype)} KV cache")
    if strategy.zero_stage:
        parts.append(f"ZeRO-{strategy.zero_stage}")
    if (strategy.gradient_accumulation_steps or 1) > 1:
        parts.append(f"{strategy.gradient_accumulation_steps} accumulation steps")
    if strategy.activation_recomputation not in {None, "none"}:
        parts.append(f"{strategy.activation_recomputation} recomputation")
    return " · ".join(parts + _offload_words(strategy))


def _weights(strategy: Strategy) -> str:
    words = dtype_words(strategy.weight_dtype)
    return f"{strategy.quantization.upper()} {words}" if strategy.quantization else words


def _offload_words(strategy: Strategy) -> list[str]:
    offload = strategy.offload
    if offload is None:
        return []
    shares = (
        (offload.weights_cpu, "weights in host memory"),
        (offload.weights_disk, "weights on disk"),
        (offload.kv_cpu, "KV cache in host memory"),
        (offload.kv_disk, "KV cache on disk"),
        (offload.activations_cpu, "activations in host memory"),
    )
    words = [f"{share:.0%} of {name}" for share, name in shares if share]
    return [*words, *OPTIMISER_WORDS[offload.optimizer]]


def model_words(draft: Draft, team_model_name: str = "") -> str:
    """Return the chosen model's short name."""
    chosen = draft["model"]
    if chosen["source"] == "demo":
        return DEMO_NAME
    if chosen["source"] == "team":
        return team_model_name or "a model of the team"
    if chosen["source"] == "catalog":
        return str(chosen["catalog_id"]).rsplit("/", 1)[-1].replace("-", " ")
    if chosen["source"] == "folder":
        return str(chosen.get("path") or "folder").rstrip("/").rsplit("/", 1)[-1]
    config = chosen.get("config") or {}
    return str(config.get("_name_or_path") or config.get("model_type") or "pasted config")


def hardware_words(draft: Draft, host_name: str = "", device_name: str = "") -> str:
    """Return the hardware of a plan: a host's name, or a number of devices."""
    if host_name:
        return host_name
    hardware = draft["hardware"]
    count = hardware["devices_per_node"] * hardware["nodes"]
    name = device_name or device_words(hardware["device"])
    return f"{count} {TIMES} {name}" if count > 1 else name


def device_words(device: str) -> str:
    """Return a catalog device's name without vendor prefixes."""
    try:
        name = get_device(device).name or device
    except PlannerError:
        return device
    return short_name(name)


def short_name(device_name: str) -> str:
    """Return a device's name without vendor prefixes."""
    return device_name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def workload_words(draft: Draft) -> str:
    """Return the workload in short."""
    goal = draft["goal"]["goal"]
    values = draft["workload"][goal]
    if goal == "serve":
        each = values["input_tokens"] + values["output_tokens"]
        people = "1 person" if values["concurrency"] == 1 else f"{values['concurrency']} people"
        return f"{people} · {whole(each)} tokens each"
    if goal == "generate":
        return f"batch of {values['batch_size']}"
    if goal == "compress":
        return METHOD_WORDS[values["method"]]
    end = values.get("time_budget_minutes")
    length = clock(end * 60) if end else str(tokens((values.get("million_tokens") or 0) * 1e6))
    rows, row = values["global_batch_size"], whole(values["sequence_length"])
    return f"{rows} {TIMES} {row} tokens · {length}"


def plan_title(draft: Draft, model: str, hardware: str) -> str:
    """Return a plan's derived title: goal, model, hardware."""
    return f"{GOAL_WORDS[draft['goal']['goal']]} {model} on {hardware}"[:120]
