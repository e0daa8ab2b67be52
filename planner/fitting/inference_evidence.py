"""Published inference measurements as requests: decode and prefill of one stream or batch.

The table holds one metric per row. ``speed_rows`` yields the complete rows; ``inference_request``
builds a request with the row's measurement conditions.
"""

import re
from collections.abc import Iterator

from planner.fitting.evidence import COVERED_SINCE_THE_FIT, Row, number, table
from planner.specs.base import JsonObject

TABLE = "inference_other"
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
PLAIN = frozenset({"fp32", "fp16", "bf16", "fp8", "int8", "int4", "mxfp4"})
GROUPED = {
    "int4 (awq g128)": ("awq", 128),
    "gptq int4 g128": ("gptq", 128),
    "gptq int4": ("gptq", 128),
}
EXL2 = re.compile(r"exl2 ([\d.]+) bpw")
TWO_BIT = {"aqlm 2-bit": "aqlm:2.07", "quip# 2-bit": "quip:2.0"}
# Engines that place whole layers on each GPU instead of splitting every matrix.
BY_LAYERS = frozenset({"llama_cpp", "ik_llama_cpp", "ollama/llama_cpp", "autoawq", "transformers"})
MOST_THREADS = re.compile(r"CPU, (\d+) threads")
FEW_THREADS = 2  # two to four threads saturate a desktop's memory


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
    return {"quantization": TWO_BIT[named]} if named in TWO_BIT else {}


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
        "engine": row["engine"],
    }


def speed_rows() -> Iterator[Row]:
    """Yield the decode and prefill rows that are complete enough for a request.

    Excluded are rows that the source marks as suspect, other forms of decoding, experts in host
    memory, throttled links, and CPU runs with too few threads to saturate memory.
    """
    for row in table(TABLE):
        threads = MOST_THREADS.fullmatch(row["mode"])
        starved = threads is not None and int(threads[1]) < FEW_THREADS
        if row["metric"] not in SPEEDS or not format_of(row) or starved:
            continue
        if row["model"] in COVERED_SINCE_THE_FIT:
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
