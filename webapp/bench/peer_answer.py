"""Script that runs one planner on one question, in that planner's own Python environment.

It reads the question as JSON from standard input and writes the answer as JSON to the last line of
standard output. Only the standard library is imported at the top; the planner is imported later,
so that the time of the first answer includes loading it.
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
    """Return a function that runs our planner for a tensor parallel size and a batch."""
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
        result = api.estimate(specs.EstimateRequest.model_validate(document))
        return {
            "prefill_s": result.performance.ttft_seconds,
            "decode_s": result.performance.tpot_seconds,
            "device_bytes": float(result.memory.per_device_peak_bytes),
        }

    return ask


def llm_analysis(question: Question) -> Ask:
    """Return a function that runs llm-analysis for a tensor parallel size and a batch.

    Its release models two feed-forward matrices per layer instead of three gated ones, so the
    width is multiplied by 1.5 to get the same number of parameters.
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
        result = analysis(
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
        constant = ("weight_memory_per_gpu", "kv_cache_memory_per_gpu")
        widest = result["prefill_activation_memory_per_gpu"]
        return {
            "prefill_s": result["prefill_latency"],
            "decode_s": result["decode_latency"],
            "device_bytes": sum(result[name] for name in constant) + widest,
        }

    return ask


def aiconfigurator(question: Question) -> Ask:
    """Return a function that runs aiconfigurator on a static batch, with its measured kernels."""
    api = import_module("aiconfigurator.cli.api")

    def ask(tensor: int, batch: int) -> Figures:
        result = api.cli_estimate(
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
            "prefill_s": result.ttft / KILO,
            "decode_s": result.tpot / KILO,
            "device_bytes": result.raw["memory"] * GIBI,
        }

    return ask


def genz(question: Question) -> Ask:
    """Return a function that runs GenZ; the decode step is taken in the middle of the output."""
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


# Time per output token of a closed loop, of the cohort's questions: seconds, or an error.


def slipway_tpot(question: Question) -> float:
    """Return our planner's time per output token, asked as the row was measured."""
    api, specs = import_module("planner.api"), import_module("planner.specs.estimate")
    result = api.estimate(specs.EstimateRequest.model_validate(question["request"]))
    return float(result.performance.tpot_seconds)


def llm_analysis_tpot(question: Question) -> float:
    """Return llm-analysis's decode step; it knows dense models alone, and no engine.

    Raises:
        ValueError: the model is a mixture of experts.
    """
    if question["shape"] is None:
        raise ValueError("no mixtures of experts of unlike widths")
    config = import_module("llm_analysis.config")
    analysis = import_module("llm_analysis.analysis").LLMAnalysis
    shape, system = question["shape"], question["system"]
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
    bits = {"nvfp4": 4, "mxfp4": 4, "int4": 4, "fp8": 8}.get(question["dtype"], 16)
    gpu = config.GPUConfig(
        name=question["device"],
        mem_per_GPU_in_GB=system["memory_bytes"] / 1e9,
        hbm_bandwidth_in_GB_per_sec=system["memory_bytes_per_s"] / 1e9,
        intra_node_bandwidth_in_GB_per_sec=system["link_bytes_per_s"] / 1e9,
        intra_node_min_message_latency=8e-6,
        peak_fp16_TFLOPS=system["peak_flops_per_s"] / 1e12,
        peak_i8_TFLOPS=system["peak_flops_per_s"] / 1e12,
        peak_i4_TFLOPS=system["peak_flops_per_s"] / 1e12,
    )
    dtype = config.DtypeConfig(
        name="cohort", weight_bits=bits, activation_bits=16, embedding_bits=16
    )
    result = analysis(
        model,
        gpu,
        dtype,
        config.ParallelismConfig(tp_size=question["tensor_parallel"]),
        flops_efficiency=0.7,
        hbm_memory_efficiency=0.9,
    ).inference(
        batch_size_per_gpu=question["batch_size"],
        seq_len=question["input_tokens"],
        num_tokens_to_generate=question["output_tokens"],
    )
    return float(result["decode_latency"])


def aiconfigurator_tpot(question: Question) -> float:
    """Return aiconfigurator's time per output token, as it aggregates a closed loop."""
    api = import_module("aiconfigurator.cli.api")
    system = "_".join(question["device"].split("-")[:2])
    backend = {"tensorrt_llm": "trtllm"}.get(question["engine"], question["engine"])
    experts = question["expert_parallel"]
    formats: dict[str, str] = {}
    if question["shape"] and question["dtype"] in {"fp8", "nvfp4"}:
        formats = {"gemm_quant_mode": question["dtype"], "kvcache_quant_mode": "fp8"}
    mixture: dict[str, int] = {}
    if question["shape"] is None:
        whole = question["tensor_parallel"] // experts
        mixture = {"moe_ep_size": experts, "moe_tp_size": whole}
    result = api.cli_estimate(
        question["model"].replace("/Llama-3.1", "/Meta-Llama-3.1"),
        system,
        backend_name=backend,
        isl=question["input_tokens"],
        osl=question["output_tokens"],
        batch_size=question["batch_size"],
        tp_size=question["tensor_parallel"],
        **mixture,
        **formats,
    )
    return float(result.tpot) / KILO


def genz_tpot(question: Question) -> float:
    """Return GenZ's decode step in the middle of the output."""
    planner = import_module("GenZ")
    system = question["system"]
    bits = {"nvfp4": "int4", "mxfp4": "int4", "fp8": "int8"}.get(question["dtype"], "bf16")
    decode = planner.decode_moddeling(
        model=question["model"],
        batch_size=question["batch_size"],
        input_tokens=question["input_tokens"],
        output_tokens=question["output_tokens"] // 2,
        Bb=1,
        system_name={
            "Flops": system["peak_flops_per_s"] / 1e12,
            "Memory_size": system["memory_bytes"] / GIBI,
            "Memory_BW": system["memory_bytes_per_s"] / 1e9,
            "ICN": system["link_bytes_per_s"] / 1e9,
            "real_values": True,
        },
        system_eff=0.8,
        bits=bits,
        tensor_parallel=question["tensor_parallel"],
    )
    return float(decode["Latency"]) / KILO


COHORT: dict[str, Callable[[Question], float]] = {
    "slipway": slipway_tpot,
    "llm-analysis": llm_analysis_tpot,
    "aiconfigurator": aiconfigurator_tpot,
    "GenZ": genz_tpot,
}


def answer_cohort(name: str, questions: list[Question]) -> dict[str, Any]:
    """Return a planner's time per output token of each question, None where it refuses."""
    started = time.perf_counter()
    found: list[float | None] = []
    for question in questions:
        try:
            found.append(COHORT[name](question))
        except Exception as error:  # noqa: BLE001 - any error of any planner is a refusal
            asked = f"{question['model']} on {question['device']}"
            sys.stderr.write(f"refused {asked}: {error!r}\n")
            found.append(None)
    seconds = time.perf_counter() - started
    return {"version": _version(PLANNERS[name][1]), "tpot_s": found, "seconds": seconds}


# Planner -> its function, and the distribution name for its version.
PLANNERS: dict[str, tuple[Callable[[Question], Ask], str]] = {
    "slipway": (slipway, "slipway"),
    "llm-analysis": (llm_analysis, "llm-analysis"),
    "aiconfigurator": (aiconfigurator, "aiconfigurator"),
    "GenZ": (genz, "genz-llm"),
}


def measure_planner(name: str, question: Question) -> dict[str, Any]:
    """Return a planner's answer, with the seconds of the first and of later runs, and the rate.

    The rate counts runs with other layouts and batches than the question's; a strategy that a
    planner rejects counts as answered.
    """
    prepare, distribution = PLANNERS[name]
    started = time.perf_counter()
    ask = prepare(question)
    figures = ask(question["devices"], question["batch_size"])
    cold = time.perf_counter() - started
    again = [_seconds(lambda: ask(question["devices"], question["batch_size"])) for _ in range(3)]
    others = [(tensor, batch) for tensor in (2, 4, 8) for batch in (1, 2, 4, 8, 16)]
    swept = _seconds(lambda: [_ask_or_skip(ask, *other) for other in others])
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


def _ask_or_skip(ask: Ask, tensor: int, batch: int) -> Figures:
    try:
        return ask(tensor, batch)
    except Exception as error:  # noqa: BLE001 - any error of any planner is a refusal
        sys.stderr.write(f"refused tensor {tensor}, batch {batch}: {error}\n")
        return {}


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    if "cohort" in asked:
        answer = answer_cohort(sys.argv[1], asked["cohort"])
    else:
        answer = measure_planner(sys.argv[1], asked)
    sys.stdout.write(json.dumps(answer) + "\n")
