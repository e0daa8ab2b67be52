"""Published throughput tables as requests: full batches, bursts, static batches, open loops.

All assumptions about unstated conditions are made here and listed on the accuracy page.
"""

import re
from collections.abc import Iterator
from functools import cache

from planner.fitting.evidence import Row, number, table
from planner.fitting.inference_evidence import TABLE, TOTAL, format_of
from planner.specs.base import JsonObject

MLPERF, OPENVINO = "mlperf-inference-v4.1", "openvino-model-server-2025"
LATENCY, TPOT = "batch_latency", "tpot_mean"
# Number of requests per run, by prompt and answer length. The table states 1,000 to 30,000: short
# ones use most, runs of about equal length use 1,000 to 3,000.
REQUESTS = {
    (128, 128): 30_000,
    (128, 2048): 3_000,
    (128, 4096): 1_500,
    (500, 2000): 3_000,
    (1000, 1000): 3_000,
    (1000, 2000): 1_500,
    (2048, 128): 3_000,
    (2048, 2048): 1_500,
    (5000, 500): 1_500,
    (20000, 2000): 1_000,
}
ATTENTION_DATA = "attention data parallelism enabled"
OPEN_RATE = re.compile(r"(?:request rate|Poisson) ([\d.]+)")
SHARED_PREFIX = "shared-prefix"
# Output tokens per request at the lowest rate: tokens per second over requests per second.
OPENVINO_ANSWERS = {"llama-2-7b": 477, "llama-3-8b": 415}
OPENVINO_PROMPT = 256
BLACKWELL = ("b200", "gb200")
BURST_FROM = 1000.0  # a thousand requests in all at a thousand a second are a burst


def kind_of(row: Row) -> str:
    """Return a row's kind as named on the page; empty if no request can be made.

    Excluded are unstated lengths (GPT-J with four beams, Mixtral), prefix sharing without a stated
    share, and rates at the limit of an objective.
    """
    match row["source_id"]:
        case "trtllm-perf-overview-v1.0":
            return "full batch"
        case "modelopt-benchmark":
            return "batch sent at once"
        case "mlperf-inference-v4.1" if _is_offline(row):
            return "full batch, fastest layout"
        case "openvino-model-server-2025" if _is_paced(row):
            return "open loop, gap between tokens"
        case "dstack-405b-h100-mi300x" | "dstack-r1-h200-mi300x":
            return _by_mode(row)
        case _:
            return ""


def _is_offline(row: Row) -> bool:
    return "ffline" in row["mode"] and bool(row["input_len"])


def _is_paced(row: Row) -> bool:
    return row["metric"] == TPOT and "inf" not in row["mode"]


def _by_mode(row: Row) -> str:
    """Return the kind of a row of a source with several kinds.

    A batch sent to an engine with continuous batching is a burst.
    """
    mode, metric = row["mode"], row["metric"]
    if SHARED_PREFIX in mode or metric not in {TOTAL, LATENCY}:
        return ""
    if mode.startswith("closed loop"):
        return "closed loop"
    return "" if mode.startswith("open loop, Poisson 16") else "burst"


@cache
def throughput_rows() -> tuple[Row, ...]:
    """Return the usable rows of the tables."""
    return tuple(row for row in table(TABLE) if kind_of(row) and "SUSPECT" not in row["notes"])


def throughput_request(row: Row) -> JsonObject:
    """Return a row as an estimate's request."""
    devices = int(number(row, "num_gpus", 1))
    return {
        "id": row["row_id"],
        "model": row["model"],
        "cluster": {"device": row["gpu_slug"], "devices_per_node": devices},
        "workload": workload_of(row),
        "strategy": {**formats_of(row), **layout_of(row, devices)},
        "engine": row["engine"] if "CUDA" not in row["engine"] else "tensorrt_llm",
    }


def layouts_of(row: Row) -> Iterator[JsonObject]:
    """Yield the request for each layout that the row leaves open: powers of two of devices."""
    request = throughput_request(row)
    if not kind_of(row).endswith("fastest layout"):
        yield request
        return
    devices = request["cluster"]["devices_per_node"]
    per_node = min(devices, 8)
    request["cluster"] |= {"devices_per_node": per_node, "nodes": devices // per_node}
    tensor = 1
    while devices % tensor == 0 and tensor <= per_node:
        sizes = {"tensor_parallel_size": tensor, "data_parallel_size": devices // tensor}
        yield {**request, "strategy": {**request["strategy"], **sizes}}
        tensor *= 2


def workload_of(row: Row) -> JsonObject:
    """Return the workload of a row: arrivals and lengths."""
    prompt, answer = lengths_of(row)
    lengths: JsonObject = {"input_tokens": prompt, "output_tokens": answer}
    batch = int(number(row, "batch_or_concurrency"))
    rate = OPEN_RATE.search(row["mode"])
    kind = kind_of(row)
    if kind == "closed loop":
        return {"kind": "serve", "concurrency": batch, **lengths}
    if kind.startswith("open loop") and rate:
        return {"kind": "serve", "request_rate_per_second": float(rate[1]), **lengths}
    if row["source_id"] == MLPERF:
        return {"kind": "serve", **lengths}
    sent = batch or REQUESTS.get((prompt, answer), int(BURST_FROM))
    return {"kind": "serve", "burst_requests": sent, **lengths}


def lengths_of(row: Row) -> tuple[int, int]:
    """Return the prompt and answer lengths."""
    if row["source_id"] == OPENVINO:
        answer_tokens = next(
            n for name, n in OPENVINO_ANSWERS.items() if name in row["model"].lower()
        )
        return OPENVINO_PROMPT, answer_tokens
    return int(number(row, "input_len")), int(number(row, "output_len"))


def formats_of(row: Row) -> JsonObject:
    """Return the formats of weights, activations and cache.

    If a log does not state them: 8 bits, and 4 bits on the first chips that support them.
    """
    if row["source_id"] == MLPERF:
        low_bit_dtype = "nvfp4" if row["gpu_slug"].startswith(BLACKWELL) else "fp8"
        return {
            "weight_dtype": low_bit_dtype,
            "activation_dtype": low_bit_dtype,
            "kv_cache_dtype": "fp8",
        }
    formats = format_of(row) or {"weight_dtype": row["weight_dtype"]}
    if row["activation_dtype"]:
        formats["activation_dtype"] = row["activation_dtype"]
    if row["kv_dtype"]:
        formats["kv_cache_dtype"] = row["kv_dtype"]
    return formats


def layout_of(row: Row, devices: int) -> JsonObject:
    """Return the layout as stated, otherwise one tensor-parallel group of all devices."""
    ranks = int(number(row, "tp", devices) or devices)
    if ATTENTION_DATA in row["notes"] and ranks > 1:
        return {
            "tensor_parallel_size": 1,
            "attention_data_parallel_size": ranks,
            "expert_parallel_size": ranks,
        }
    return {"tensor_parallel_size": ranks}


def measured_of(row: Row) -> float:
    """Return the measurement as a rate: token/s, or the inverse of a token time."""
    value = number(row, "value")
    if row["metric"] == TPOT:
        return 1 / value
    if row["metric"] == LATENCY:
        return number(row, "batch_or_concurrency") * lengths_of(row)[1] / value
    return value
