"""Asks one planner one question; run by that planner's own Python, which knows nothing of ours.

Reads the question as JSON on standard input and writes the answer as JSON on the last line of
standard output. Only the standard library is imported here, the planner by its name, so that the
seconds of the first answer include loading it.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

MIBI, GIBI, KILO = 2**20, 2**30, 1e3
Question = dict[str, Any]
Figures = dict[str, float]
Ask = Callable[[int, int], Figures]


def slipway(question: Question) -> Ask:
    """Return how our own planner is asked for a layout and a batch."""
    api, specs = import_module("planner.api"), import_module("planner.specs.estimate")

    def ask(tensor: int, batch: int) -> Figures:
        document = {
            "model": question["model"],
            "cluster": {"device": question["device"], "devices_per_node": question["devices"]},
            "workload": {
                "kind": "generate",
                "batch_size": batch,
                "input_tokens": question["input_tokens"],
                "output_tokens": question["output_tokens"],
            },
            "strategy": {
                "weight_dtype": question["dtype"],
                "tensor_parallel_size": tensor,
                "data_parallel_size": 1,
            },
            "engine": question["engine"],
        }
        found = api.estimate(specs.EstimateRequest.model_validate(document))
        return {
            "prefill_s": found.performance.ttft_seconds,
            "decode_s": found.performance.tpot_seconds,
            "device_bytes": float(found.memory.per_device_peak_bytes),
        }

    return ask


def llm_analysis(question: Question) -> Ask:
    """Return how llm-analysis is asked; its release knows two matrices a layer, not three gated.

    The feed-forward width is given half as much again, so that the layer has its parameters.
    """
    config = import_module("llm_analysis.config")
    analysis = import_module("llm_analysis.analysis").LLMAnalysis
    shape = question["shape"]
    width = 3 * shape["feed_forward"] // 2
    model = config.ModelConfig(
        name=question["model"],
        num_layers=shape["layers"],
        n_head=shape["heads"],
        hidden_dim=shape["hidden"],
        vocab_size=shape["vocabulary"],
        num_key_value_heads=shape["key_value_heads"],
        ffn_embed_dim=width,
        expansion_ratio=width / shape["hidden"],
    )

    def ask(tensor: int, batch: int) -> Figures:
        found = analysis(
            model,
            config.get_gpu_config_by_name(question["device"]),
            config.get_dtype_config_by_name("w16a16e16"),
            config.ParallelismConfig(tp_size=tensor),
            flops_efficiency=0.7,
            hbm_memory_efficiency=0.9,
        ).inference(
            batch_size_per_gpu=batch,
            seq_len=question["input_tokens"],
            num_tokens_to_generate=question["output_tokens"],
        )
        held = ("weight_memory_per_gpu", "kv_cache_memory_per_gpu")
        widest = found["prefill_activation_memory_per_gpu"]
        return {
            "prefill_s": found["prefill_latency"],
            "decode_s": found["decode_latency"],
            "device_bytes": sum(found[name] for name in held) + widest,
        }

    return ask


def aiconfigurator(question: Question) -> Ask:
    """Return how aiconfigurator is asked: a static batch, with its measured kernels."""
    api = import_module("aiconfigurator.cli.api")

    def ask(tensor: int, batch: int) -> Figures:
        found = api.cli_estimate(
            question["model"].replace("/Llama-3.1", "/Meta-Llama-3.1"),
            "h100_sxm",
            mode="static",
            backend_name=question["engine"],
            isl=question["input_tokens"],
            osl=question["output_tokens"],
            batch_size=batch,
            tp_size=tensor,
        )
        return {
            "prefill_s": found.ttft / KILO,
            "decode_s": found.tpot / KILO,
            "device_bytes": found.raw["memory"] * GIBI,
        }

    return ask


def genz(question: Question) -> Ask:
    """Return how GenZ is asked; the mean step is the one in the middle of the answer."""
    planner = import_module("GenZ")
    system = question["system"]
    card = {
        "Flops": system["peak_flops_per_s"] / 1e12,
        "Memory_size": system["memory_bytes"] / GIBI,
        "Memory_BW": system["memory_bytes_per_s"] / 1e9,
        "ICN": system["link_bytes_per_s"] / 1e9,
        "real_values": True,
    }

    def ask(tensor: int, batch: int) -> Figures:
        shared = {
            "model": question["model"],
            "batch_size": batch,
            "input_tokens": question["input_tokens"],
            "system_name": card,
            "system_eff": 0.8,
            "bits": question["dtype"],
            "tensor_parallel": tensor,
        }
        prefill = planner.prefill_moddeling(**shared)
        half = question["output_tokens"] // 2
        decode = planner.decode_moddeling(**shared, Bb=1, output_tokens=half)
        table = decode["summary_table"].iloc[0]
        names = ("Total Weights (MB)", "KV Cache (MB)", "On-chip Memory Footprint (MB)")
        return {
            "prefill_s": float(prefill["Latency"]) / KILO,
            "decode_s": float(decode["Latency"]) / KILO,
            "device_bytes": sum(float(table[name]) for name in names) * MIBI,
        }

    return ask


# How each planner is asked, and the distribution that has its version.
PLANNERS: dict[str, tuple[Callable[[Question], Ask], str]] = {
    "slipway": (slipway, "slipway"),
    "llm-analysis": (llm_analysis, "llm-analysis"),
    "aiconfigurator": (aiconfigurator, "aiconfigurator"),
    "GenZ": (genz, "genz-llm"),
}


def measured(name: str, question: Question) -> dict[str, Any]:
    """Return a planner's answer with the seconds of the first, of a later one, and the rate.

    The rate counts answers for layouts and batches that differ from the question's; a strategy
    that a planner refuses counts as answered.
    """
    prepare, distribution = PLANNERS[name]
    started = time.perf_counter()
    ask = prepare(question)
    figures = ask(question["devices"], question["batch_size"])
    cold = time.perf_counter() - started
    again = [_seconds(lambda: ask(question["devices"], question["batch_size"])) for _ in range(3)]
    others = [(tensor, batch) for tensor in (2, 4, 8) for batch in (1, 2, 4, 8, 16)]
    swept = _seconds(lambda: [_tolerant(ask, *other) for other in others])
    return {
        "version": _version(distribution),
        "cold_s": cold,
        "warm_s": median(again),
        "strategies_per_s": len(others) / swept,
        **figures,
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "from source"


def _tolerant(ask: Ask, tensor: int, batch: int) -> Figures:
    try:
        return ask(tensor, batch)
    except Exception as error:  # noqa: BLE001 - any planner, any of its errors: a refusal
        sys.stderr.write(f"refused tensor {tensor}, batch {batch}: {error}\n")
        return {}


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measured(sys.argv[1], json.load(sys.stdin))) + "\n")
