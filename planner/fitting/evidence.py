"""Published measurements as requests: the rows of the validation tables."""

import csv
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from planner.catalog.engines import get_engine
from planner.specs.base import JsonObject

FOLDER = Path(__file__).parents[1] / "validation"
Row = dict[str, str]
TRAINING_DEVICES = {"a800-sxm-80gb": "a100-sxm-80gb", "titan-rtx": "rtx-2080-ti"}
NVLINK_A800_BYTES_PER_S = 200e9  # an A100 with 400 GB/s of NVLink, both directions together
# Inter-node bandwidth of each source, in bytes per second per device and direction.
INTER_NODE_BYTES_PER_S = {"dlperf-v100": 1.5e9, "bigscience-tr11": 6.25e9, "internevo": 6.25e9}
# Unpublished models, replaced by the model that they derive from.
SAME_SHAPE = {"OpenBuddy/openbuddy-zephyr-7b-v14.1": "mistralai/Mistral-7B-v0.1"}
FUSED_NORMS = "RMS kernel"
# Transformer Engine's kernels are norms, linear layers and attention (NVIDIA-NeMo/Automodel,
# docs/performance-summary.mdx, glossary).
TRANSFORMER_ENGINE = "TE"
# What FSDP's offload of parameters keeps on the host: weights, and states, updated there.
OFFLOADED: dict[str, JsonObject] = {
    "params_cpu": {"weights_cpu": 1.0, "optimizer": "cpu"},
    "params_cpu+activations_cpu": {
        "weights_cpu": 1.0, "optimizer": "cpu", "activations_cpu": 1.0,
    },
}  # fmt: skip
# Attention kernels older than the engines' present defaults.
KERNELS = {"flash_attentionv1.0.8": "flash_1", "torch": "single_operators"}
FP32_GRADIENTS = "fp32 gradient accumulation"
SHARDED_INSIDE = "FSDP inside the node, data parallel across"
ZERO_GROUP = re.compile(r"zero1=(\d+)")
ATTENTION_ALONE = (
    "LoRA on: query,value;",
    "LoRA on q,v",
    "c_attn",
    "; DEFAULT;",
    "attention targets",
    "'v_proj'",
)
# Sources with one table per release: a later release's measurement of a model on a chip supersedes
# the earlier one, for any layout. Mixtures of experts became up to twice as fast between releases.
RELEASE = re.compile(r"release (\d\d\.\d\d(?:\.\d\d)?)")
RELEASED = ("source_id", "model", "gpu", "precision", "method", "sequence_length")
# The 2021 code, a tenth slower than the same project's later tables.
SUPERSEDED = {"narayanan2021-t1", "narayanan2021-t2"}
# Models covered since the last fit; their memory and serving rows join the next fit.
COVERED_SINCE_THE_FIT = frozenset(
    {
        "DeepSeekV4 Flash",
        "GPT3-20B",
        "GPT3-5B",
        "Mixtral 46.7B",
        "Nemotron-22B",
        "Nemotron-340B",
        "Nemotron-8B",
        "Nemotron_3_5_Lightning",
        "Nemotron_3_Nano",
        "Nemotron_3_Super",
        "Nemotron_3_Ultra",
        "OpenLlama-3B",
        "Qwen/Qwen2-57B-A14B-Instruct",
        "bigscience/bloomz-7b1",
        "deepseek-ai/DeepSeek-R1",
        "deepseek-ai/DeepSeek-R1-0528",
        "deepseek-ai/DeepSeek-V3",
        "meta-llama/Llama-4-Maverick-17B-128E",
        "meta-llama/Llama-4-Scout-17B-16E",
        "moonshotai/Kimi-K2-Base",
        "moss-moon-16b",
        "openai/gpt-oss-120b",
        "openai/gpt-oss-20b",
    }
)
# Shares of memory in launch scripts of published sweeps, where weights leave little of a device:
# by model, device, weights and tensor parallel size.
# Source: InferenceX, benchmarks/single_node/fixed_seq_len/dsr1_fp8_b200.sh, 2026-08.
LAUNCH_SHARES = {("deepseek-ai/DeepSeek-R1", "b200-sxm", "fp8", "4"): 0.95}
# The format of sources whose tables have no column for it: Qwen's recipe tunes its Int4 releases.
# Source: QwenLM/Qwen, finetune/finetune_qlora_single_gpu.sh (Qwen-7B-Chat-Int4, made by GPTQ).
PACKED_BY = {("qwen-finetune", "qlora"): "gptq-int4"}
# Training tools of rows that name only the underlying engine.
HARNESSES = {
    "ms-swift": "ms_swift",
    "qwen-finetune": "qwen_scripts",
    "peft-metamath": "peft",
    "peft-readme": "peft",
}
# Parts that an allocator's own count omits, by the word in the row's definition: the device
# context, and for "allocated" also unfilled blocks.
NOT_COUNTED = {
    "allocated": ("training_overhead_bytes", "unfilled_ratio"),
    "reserved": ("training_overhead_bytes",),
}
BESIDE_EMBEDDINGS = "method 'LoRA (emb)'"
SUPERSEDED_ROW = "a later release measured the same model on the same chip anew"
NO_STEP = "FLOP/s alone, for a layout whose sizes do not multiply to its devices"
NOT_ASKED = "adapters beside trained embeddings, which no request can name"
A100_PORT_BYTES_PER_S = 25e9  # 200 Gbit/s a device
# Of a rack of 72 devices: those of a tray, and those that layouts use of its NVLink domain.
RACK_TRAY, RACK_DOMAIN = 4, 64
ADAPTERS = {"lora", "qlora"}
METHODS = {"pretrain", "full", "lora", "qlora"}
COUNTS = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "vpp": "virtual_pipeline_size",
    "zero_stage": "zero_stage",
    "micro_batch_size": "micro_batch_size",
}
HALVES = {"bf16", "fp16"}
EIGHT_BIT = {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "nvfp4"}
DIGITS = 4  # significant digits of stored factors and spreads
DTYPES = {"optimizer_dtype": "optimizer_dtype", "gradient_dtype": "gradient_dtype"}


def round_factor(value: float) -> float:
    """Return a value rounded to the significant digits of stored factors and spreads.

    >>> round_factor(0.123456)
    0.1235
    """
    return float(f"{value:.{DIGITS}g}")


@cache
def table(name: str) -> tuple[Row, ...]:
    """Return the rows of a validation table; blank cells are empty strings."""
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


CaseT = TypeVar("CaseT")


def leave_one_group_out(
    cases: Sequence[CaseT], group_of: Callable[[CaseT], str]
) -> Iterator[tuple[str, list[CaseT], list[CaseT]]]:
    """Yield the name of each group, its cases, and the rest to fit without them."""
    for group in sorted({group_of(case) for case in cases}):
        own = [case for case in cases if group_of(case) == group]
        rest = [case for case in cases if group_of(case) != group]
        yield group, own, rest


def number(row: Row, name: str, default: float = 0.0) -> float:
    """Return a cell as a number, or the default if it is blank."""
    return float(row[name]) if row.get(name) else default


def model_of(row: Row) -> str | JsonObject:
    """Return the model of a row: a catalog id, or the dimensions given in the row."""
    if not row["hidden_size"]:
        return SAME_SHAPE.get(row["model"], row["model"])
    gated = row["gated_mlp"] == "1"
    heads, hidden = int(row["num_attention_heads"]), int(row["hidden_size"])
    learned = not gated and row["engine"] != "internevo"
    return {
        "id": row["model"],
        "model_type": "llama" if gated else "gpt2",
        "hidden_size": hidden,
        "intermediate_size": int(row["intermediate_size"]),
        "num_hidden_layers": int(row["num_layers"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(row["num_key_value_heads"] or heads),
        "head_dim": hidden // heads,
        "vocab_size": int(row["vocab_size"]),
        "max_position_embeddings": int(number(row, "sequence_length", 2048)),
        "tie_word_embeddings": row["tied_embeddings"] == "1",
        "gated_mlp": gated,
        "norm": "rmsnorm" if gated else "layernorm",
        "norm_bias": not gated,
        "attention_bias": not gated,
        "attention_output_bias": not gated,
        "mlp_bias": not gated,
        "learned_positions": int(number(row, "sequence_length")) if learned else 0,
    }


def nodes_of(gpu: str, devices: int, per_node: int) -> JsonObject:
    """Return the nodes of a row's devices; those of an NVL72 rack share its NVLink domain."""
    is_rack = gpu.startswith("gb")
    each = min(RACK_TRAY if is_rack else per_node, devices)
    nodes = {"devices_per_node": each, "nodes": max(1, devices // each)}
    return {**nodes, "nvlink_domain_devices": RACK_DOMAIN} if is_rack else nodes


def cluster_of(row: Row) -> JsonObject:
    """Return the hardware of a training row."""
    gpu = row["gpu"].lower()
    devices, per_node = int(number(row, "num_gpus", 1)), int(number(row, "gpus_per_node", 8))
    cluster: JsonObject = {
        "device": TRAINING_DEVICES.get(gpu, gpu),
        **nodes_of(gpu, devices, per_node),
    }
    if gpu.startswith(("a100", "a800")):
        cluster["inter_node_bandwidth_bytes_per_second"] = A100_PORT_BYTES_PER_S
    if row["source_id"] in INTER_NODE_BYTES_PER_S:
        cluster["inter_node_bandwidth_bytes_per_second"] = INTER_NODE_BYTES_PER_S[row["source_id"]]
    if gpu == "a800-sxm-80gb":
        cluster["intra_node_bandwidth_bytes_per_second"] = NVLINK_A800_BYTES_PER_S
    return cluster


def strategy_of(row: Row) -> JsonObject:
    """Return the layout of a training row, without unstated fields."""
    strategy: JsonObject = {
        ours: int(float(row[theirs])) for theirs, ours in COUNTS.items() if row.get(theirs)
    }
    strategy |= {ours: row[theirs] for theirs, ours in DTYPES.items() if row.get(theirs)}
    if row.get("precision", "") in EIGHT_BIT:
        strategy["compute_dtype"] = EIGHT_BIT[row["precision"]]
        strategy["weight_dtype"] = "bf16"
    elif row.get("precision", "") in HALVES:
        strategy["compute_dtype"] = row["precision"]
    if row.get("dp"):
        strategy["data_parallel_size"] = int(row["dp"])
    if row.get("recompute"):
        strategy["activation_recomputation"] = row["recompute"]
    if row.get("attention"):
        strategy["attention"] = "eager" if row["attention"] == "eager" else "flash"
    if row.get("sequence_parallel"):
        strategy["sequence_parallel"] = row["sequence_parallel"] in {"1", "true", "True"}
    quantization = row.get("quantization") or PACKED_BY.get((row["source_id"], row["method"]))
    if quantization:
        strategy["quantization"] = quantization
    return {**strategy, **_noted_fields(row), **_loaded_as(row, strategy)}


def _loaded_as(row: Row, strategy: JsonObject) -> JsonObject:
    """Return the fp32 weights of a fine-tuning that says nothing of them.

    The releases of the tables' tools loaded every checkpoint so: transformers before 5.
    """
    is_open = not {"weight_dtype", "quantization", "gradient_dtype"} & strategy.keys()
    loads = get_engine(row["engine"], "gpu", training=True).loads_as_stored
    return {"weight_dtype": "fp32"} if is_open and loads and row["method"] == "full" else {}


def _noted_fields(row: Row) -> JsonObject:
    """Return the strategy fields stated in a row's notes and kernel columns."""
    fields: JsonObject = {}
    if row.get("kernel"):
        names = row["kernel"].split(" + ")
        fields["fused_norms"] = FUSED_NORMS in names or TRANSFORMER_ENGINE in names
    if row.get("kernel") in KERNELS:
        fields["attention_kernel"] = KERNELS[row["kernel"]]
    if row.get("offload") in OFFLOADED:
        fields["offload"] = OFFLOADED[row["offload"]]
    if FP32_GRADIENTS in row["notes"]:
        fields["gradient_dtype"] = "fp32"
    if SHARDED_INSIDE in row["notes"]:
        fields["zero_shard_size"] = min(int(row["gpus_per_node"]), int(row["num_gpus"]))
    group = ZERO_GROUP.search(row["notes"])
    if group and int(group.group(1)) < int(row["dp"] or 1):
        fields["zero_shard_size"] = int(group.group(1))
    return fields


def training_request(row: Row) -> JsonObject:
    """Return a row of a training or memory table as an estimate's request."""
    workload: dict[str, Any] = {
        "kind": "train",
        "sequence_length": int(row["sequence_length"]),
        "global_batch_size": int(row["global_batch_size"]),
        "method": row["method"],
    }
    if row.get("lora_rank"):
        workload["lora_rank"] = int(row["lora_rank"])
    if row["method"] in ADAPTERS:
        alone = any(targets in row["notes"] for targets in ATTENTION_ALONE)
        workload["lora_targets"] = "query_value" if alone else "all"
    return {
        "id": row["row_id"],
        "model": model_of(row),
        "cluster": cluster_of(row),
        "workload": workload,
        "strategy": strategy_of(row),
        "engine": row["engine"],
    }


def serving_request(row: Row) -> JsonObject:
    """Return a row of the serving table as an estimate's request."""
    layout = {"tensor_parallel_size": int(row["tp"])}
    if number(row, "moe_ep") > 1:
        layout["expert_parallel_size"] = int(row["moe_ep"])
    if number(row, "attention_dp") > 1:
        layout["attention_data_parallel_size"] = int(row["attention_dp"])
    return {
        "id": row["row_id"],
        "model": row["model"],
        "cluster": {"device": row["gpu_slug"], "devices_per_node": int(row["num_gpus"])},
        "workload": {
            "kind": "serve",
            "input_tokens": int(row["input_len"]),
            "output_tokens": int(row["output_len"]),
            "concurrency": int(row["concurrency"]),
        },
        "strategy": {
            "weight_dtype": row["weight_dtype"],
            "activation_dtype": row["activation_dtype"],
            **layout,
            **_launch_share(row),
            **_recv_interval(row),
        },
        "engine": f"{row['engine']} {row.get('engine_version', '')}".strip(),
    }


def _launch_share(row: Row) -> JsonObject:
    """Return the share of memory that a row's launch script states, if it is not the default."""
    key = row["model"], row["gpu_slug"], row["weight_dtype"], row["tp"]
    share = LAUNCH_SHARES.get(key)
    return {} if share is None else {"gpu_memory_utilization": share}


def states_client(row: Row) -> bool:
    """Return whether it is known how the clients of a serving row sent their requests.

    SGLang's rows of the gap analysis wait a hundred decode steps and more for a first token, which
    no other source shows: two steps in GPUStack's, at most ten in InferenceX's on the same chips.
    """
    return row["engine"] != "sglang" or row["campaign"] == "inferencex"


def _recv_interval(row: Row) -> JsonObject:
    """Return the interval at which a row's launch script lets SGLang look for new requests.

    Source: InferenceX, benchmarks/single_node/fixed_seq_len/dsr1_fp[48]_b200.sh and
    qwen3.5_fp[48]_b200.sh, 2026-08.
    """
    interval = row.get("scheduler_recv_interval")
    return {"scheduler_recv_interval": int(interval)} if interval else {}


def not_counted(row: Row) -> tuple[str, ...]:
    """Return the engine fields that a row's measured peak does not include."""
    definition = row.get("memory_definition", "")
    return next((names for word, names in NOT_COUNTED.items() if word in definition), ())


def latest(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows without those superseded by a later release of the same software."""
    all_rows = tuple(rows)
    newest: dict[tuple[str, ...], str] = {}
    for row in all_rows:
        measured_setting = tuple(row[name] for name in RELEASED)
        newest[measured_setting] = max(newest.get(measured_setting, ""), _release(row))
    return tuple(
        row for row in all_rows if _release(row) == newest[tuple(row[name] for name in RELEASED)]
    )


def _release(row: Row) -> str:
    match = RELEASE.match(row["notes"])
    return match.group(1) if match else ""


def usable(rows: tuple[Row, ...]) -> Iterator[Row]:
    """Yield the training rows that are complete enough for a request.

    Excluded are methods that no request can express, such as adapters with trained embeddings.
    """
    for row in rows:
        is_complete = row["sequence_length"] and row["global_batch_size"]
        is_in_fit = row.get("step_seconds") or row["model"] not in COVERED_SINCE_THE_FIT
        if (
            is_complete
            and is_in_fit
            and row["method"] in METHODS
            and BESIDE_EMBEDDINGS not in row["notes"]
        ):
            yield row


def num_unscored_rows(rows: tuple[Row, ...]) -> dict[str, int]:
    """Return the number of training rows without a comparison, by reason."""
    newest = {row["row_id"] for row in latest(rows)}
    usable_ids = {row["row_id"] for row in usable(rows)}
    counts = dict.fromkeys((SUPERSEDED_ROW, NO_STEP, NOT_ASKED), 0)
    for row in rows:
        if row["row_id"] not in newest:
            counts[SUPERSEDED_ROW] += 1
        elif not row["step_seconds"]:
            counts[NO_STEP] += 1
        elif row["row_id"] not in usable_ids:
            counts[NOT_ASKED] += 1
    return counts


def digest(name: str) -> str:
    """Return the digest of a validation table, which identifies the inputs of a fit."""
    return hashlib.sha256((FOLDER / f"{name}.csv").read_bytes()).hexdigest()[:12]


# Published inference measurements as requests: decode and prefill of one stream or batch.
#
# The table holds one metric per row. ``speed_rows`` yields the complete rows;
# ``inference_request`` builds a request with the row's measurement conditions.


TABLE = "inference_other"
# Single streams on hardware that people own: each question's median over back ends and runs.
OWNED = "inference_owned"
DECODE, PREFILL, TPOT, TTFT = (
    "decode_tokens_per_second",
    "prefill_tokens_per_second",
    "tpot",
    "ttft",
)
TOTAL = "output_throughput_total"
SPEEDS = frozenset({DECODE, PREFILL, TPOT, TTFT})
# Used if a source states neither prompt nor answer length.
USUAL_TOKENS = 128
# Sources' names of models, mapped to catalog ids.
MODELS = {
    "llama-7b": "huggyllama/llama-7b",
    "llama-13b": "huggyllama/llama-13b",
    "llama-33b": "huggyllama/llama-30b",
    "llama2-7b": "meta-llama/Llama-2-7b",
    "llama2-70b": "meta-llama/Llama-2-70b",
    "llama-2-7b": "meta-llama/Llama-2-7b",
    "llama-2-13b": "meta-llama/Llama-2-13b",
    "llama 2 13b": "meta-llama/Llama-2-13b",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "vicuna 7b": "meta-llama/Llama-2-7b",
    "vicuna-7b": "meta-llama/Llama-2-7b",
    "mistral 7b": "mistralai/Mistral-7B-v0.1",
    "tinyllama 1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "falcon 7b": "tiiuae/falcon-7b",
    "mpt 7b": "mosaicml/mpt-7b",
    "codellama 34b": "codellama/CodeLlama-34b-hf",
    "codellama-34b": "codellama/CodeLlama-34b-hf",
    "phind codellama 34b": "codellama/CodeLlama-34b-hf",
    "deepseek 33b": "deepseek-ai/deepseek-coder-33b",
    "deepseek coder 33b": "deepseek-ai/deepseek-coder-33b",
    "gpt-j-6b": "EleutherAI/gpt-j-6b",
    "meta-llama/llama-3.1-8b (8b class, id not stated)": "meta-llama/Llama-3.1-8B",
}
# Plain dtypes named by sources, and the packed formats with their group sizes.
PLAIN = frozenset({"fp32", "fp16", "bf16", "fp8", "int8", "int4", "mxfp4", "nvfp4"})
GROUPED = {
    "int4 (awq g128)": ("awq", 128),
    "gptq int4 g128": ("gptq", 128),
    "gptq int4": ("gptq", 128),
}
EXL2 = re.compile(r"exl2 ([\d.]+) bpw")
# MLX packs 2 to 8 bits in groups with a scale and a bias of 16 bits; widths without a dtype of
# their own are asked as a mix of the same mean (mlx/ops.cpp, affine_quantize).
BUILD = re.compile(r"\bb(\d{4,5})\b|\((\d{4,5})\)")
BUILDS_BEFORE = (("2024-05-08", "b2800"), ("2025-08-30", "b6000"), ("2025-10", "b6500"))
MLX = re.compile(r"mlx q(\d)(?: g(\d+))?")
MLX_GROUP, MLX_GROUP_BITS = 64, 32
TWO_BIT = {"aqlm 2-bit": "aqlm:2.07", "quip# 2-bit": "quip:2.0"}
# Engines that place whole layers on each GPU instead of splitting every matrix.
BY_LAYERS = frozenset({"llama_cpp", "ik_llama_cpp", "ollama/llama_cpp", "autoawq", "transformers"})
MOST_THREADS = re.compile(r"CPU, (\d+) threads")
# Threads below which a desktop's memory is not saturated: mainline's Q5_0 on a Ryzen 7950X goes
# from 5.2 to 9.2 tokens per second between two and four (ikawrakow/ik_llama.cpp#55).
ENOUGH_THREADS = 4


def model_named(name: str) -> str:
    """Return the catalog id of a source's model name."""
    return MODELS.get(name.lower(), name)


def format_of(row: Row) -> JsonObject:
    """Return the strategy fields of a row's weight format; empty if unsupported."""
    named = row["weight_dtype"].split(" (ollama")[0].split(" (experts")[0].strip()
    if named in PLAIN:
        return {"weight_dtype": named}
    if named in GROUPED:
        method, group = GROUPED[named]
        return {"weight_dtype": "int4", "quantization": method, "group_size": group}
    if named.startswith("gguf:"):
        return {"quantization": named}
    bits = EXL2.fullmatch(named)
    if bits:
        return {"quantization": f"exl2:{bits[1]}"}
    packed = MLX.fullmatch(named)
    if packed:
        return _mlx_format(int(packed[1]), int(packed[2] or MLX_GROUP))
    return {"quantization": TWO_BIT[named]} if named in TWO_BIT else {}


def _mlx_format(bits: int, group: int) -> JsonObject:
    if bits in (4, 8):
        return {"weight_dtype": f"int{bits}", "group_size": group}
    return {"quantization": f"gguf:{bits + MLX_GROUP_BITS / group:g}"}


def engine_of(row: Row) -> str:
    """Return a row's engine, with the build of llama.cpp where it is older than a level.

    Builds are read from the row, or stand for those of its date.
    """
    engine = row["engine"]
    if engine != "llama_cpp":
        return engine
    stated = BUILD.search(row["engine_version"])
    if stated:
        return f"{engine} b{stated[1] or stated[2]}"
    build = next((build for day, build in BUILDS_BEFORE if row["date"] < day), None)
    return f"{engine} {build}" if build else engine


def layout_of(row: Row) -> JsonObject:
    """Return a row's layout: whole layers per GPU, or tensor parallelism."""
    devices = int(number(row, "num_gpus", 1))
    if row["engine"] in BY_LAYERS or "layer split" in row["mode"]:
        return {"pipeline_parallel_size": devices, "data_parallel_size": 1}
    return {"tensor_parallel_size": int(number(row, "tp", devices) or devices)}


def inference_request(row: Row) -> JsonObject:
    """Return a row as a request for one offline batch."""
    plain = format_of(row)
    if "weight_dtype" in plain and row["activation_dtype"] in PLAIN:
        plain["activation_dtype"] = row["activation_dtype"]
    if row["kv_dtype"] in PLAIN:
        plain["kv_cache_dtype"] = row["kv_dtype"]
    usual = USUAL_TOKENS if not (row["input_len"] or row["output_len"]) else 1
    return {
        "id": row["row_id"],
        "model": model_named(row["model"]),
        "cluster": {
            "device": row["gpu_slug"],
            "devices_per_node": int(number(row, "num_gpus", 1)),
        },
        "workload": {
            "kind": "generate",
            "batch_size": int(number(row, "batch_or_concurrency", 1)),
            "input_tokens": max(1, int(number(row, "input_len", usual))),
            "output_tokens": max(2, int(number(row, "output_len", usual))),
        },
        "strategy": {**plain, **layout_of(row)},
        "engine": engine_of(row),
    }


def _is_starved(row: Row) -> bool:
    """Return whether a run had too few threads, or the cores alone of a chip with a GPU."""
    threads = MOST_THREADS.fullmatch(row["mode"])
    few = threads is not None and int(threads[1]) < ENOUGH_THREADS
    return few or (row["mode"].endswith("CPU") and not row["gpu_slug"].startswith("cpu-"))


def speed_rows() -> Iterator[Row]:
    """Yield the decode and prefill rows that are complete enough for a request.

    Excluded are rows that the source marks as suspect, other forms of decoding, experts in host
    memory, throttled links, CPU runs with too few threads to saturate memory, and runs on the
    cores of a chip whose GPU the row names.
    """
    covered = (row for row in table(TABLE) if row["model"] not in COVERED_SINCE_THE_FIT)
    for row in (*covered, *table(OWNED)):
        if row["metric"] not in SPEEDS or not format_of(row) or _is_starved(row):
            continue
        odd = ("SUSPECT" in row["notes"], "speculative" in row["mode"], "beams=4" in row["mode"])
        throttled = "Raspberry" in row["notes"] or "experts" in row["weight_dtype"]
        if (
            any(odd)
            or throttled
            or "open loop" in row["mode"]
            or row["source_id"].startswith("mlperf")
        ):
            continue
        yield row
