"""Published throughput tables as requests: full batches, bursts, static batches, open loops.

What a table does not say is assumed here, in one place, and told on the accuracy page.
"""

import re
from collections.abc import Iterator
from functools import cache

from planner.evidence import Row, number, table
from planner.inference_evidence import TABLE, TOTAL, format_of
from planner.specs.base import JsonObject

MLPERF, OPENVINO = "mlperf-inference-v4.1", "openvino-model-server-2025"
LATENCY, TPOT = "batch_latency", "tpot_mean"
# How many requests the runs of a table sent, by the lengths of prompt and answer. The table says
# 1,000 to 30,000: short ones take most, runs of about equal length take 1,000 to 3,000.
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
# Answers per second over requests per second at the lowest rate; prompts are not stated.
OPENVINO_ANSWERS = {"llama-2-7b": 477, "llama-3-8b": 415}
OPENVINO_PROMPT = 256
BLACKWELL = ("b200", "gb200")
BURST_FROM = 1000.0  # a thousand requests a second, a thousand in all: a burst


def kind_of(row: Row) -> str:
    """Return what a row measures as the page names it; empty where it cannot be asked.

    Left out: lengths that are not stated (GPT-J with four beams, Mixtral), a shared prefix whose
    share is not stated, and rates at the edge of an objective.
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
    """Return the kind of a row of a source that measured several.

    A batch that is sent to an engine that batches by itself is a burst.
    """
    mode, metric = row["mode"], row["metric"]
    if SHARED_PREFIX in mode or metric not in {TOTAL, LATENCY}:
        return ""
    if mode.startswith("closed loop"):
        return "closed loop"
    return "" if mode.startswith("open loop, Poisson 16") else "burst"


@cache
def throughput_rows() -> tuple[Row, ...]:
    """Return the rows of the tables that can be asked."""
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
    """Yield the request with each layout that the row leaves open: powers of two of devices."""
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
    """Return how the requests of a row come, and how long they are."""
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
    """Return how long prompt and answer are."""
    if row["source_id"] == OPENVINO:
        known = next(n for name, n in OPENVINO_ANSWERS.items() if name in row["model"].lower())
        return OPENVINO_PROMPT, known
    return int(number(row, "input_len")), int(number(row, "output_len"))


def formats_of(row: Row) -> JsonObject:
    """Return in which formats weights, activations and cache are.

    Where a log is silent: 8 bits, and 4 on the chips that were the first to have them.
    """
    if row["source_id"] == MLPERF:
        narrow = "nvfp4" if row["gpu_slug"].startswith(BLACKWELL) else "fp8"
        return {"weight_dtype": narrow, "activation_dtype": narrow, "kv_cache_dtype": "fp8"}
    found = format_of(row) or {"weight_dtype": row["weight_dtype"]}
    if row["activation_dtype"]:
        found["activation_dtype"] = row["activation_dtype"]
    if row["kv_dtype"]:
        found["kv_cache_dtype"] = row["kv_dtype"]
    return found


def layout_of(row: Row, devices: int) -> JsonObject:
    """Return how the devices share the model: as stated, else one group of all of them."""
    ranks = int(number(row, "tp", devices) or devices)
    if ATTENTION_DATA in row["notes"] and ranks > 1:
        return {
            "tensor_parallel_size": 1,
            "attention_data_parallel_size": ranks,
            "expert_parallel_size": ranks,
        }
    return {"tensor_parallel_size": ranks}


def measured_of(row: Row) -> float:
    """Return what was measured as a rate: token/s, or the inverse of a gap."""
    value = number(row, "value")
    if row["metric"] == TPOT:
        return 1 / value
    if row["metric"] == LATENCY:
        return number(row, "batch_or_concurrency") * lengths_of(row)[1] / value
    return value
