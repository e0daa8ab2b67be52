"""Published deployments of three engines: the planner takes what runs and refuses what does not.

``published/commands.csv`` holds facts alone (model, GPU, degrees, formats, result, source), from
vllm-project/recipes, SGLang's cookbook and TensorRT-LLM's documentation in November 2026. Rows of
models that the catalog does not hold are counted, not checked; nineteen of twenty are held.
"""

import csv
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from planner.api import estimate
from planner.catalog.models import get_model
from planner.errors import PlannerError, UnknownModelError
from planner.specs.estimate import EstimateRequest

ROWS = Path(__file__).parent / "published" / "commands.csv"
STORED = {"awq": "int4", "gptq": "int4"}
LIKE = {"bf16": "16", "fp16": "16"}
SHORT = 2304  # tokens of the one request of a row
# Rows whose reason the planner cannot know from model, GPU and degrees.
BEYOND = (
    "--kv-cache-dtype",  # a value that the engine's own parser refuses
    "below the stated minimum",  # of a table, not of memory
    "marks this hardware unsupported",  # by kernels that a release lacks
    "in that snapshot",  # a format that came later
    "defaults OOM",  # the default number of requests; with the stated one it starts
    "engine itself",  # falls back on weight-only kernels where the recipe refuses
    "weights plus KV cache",  # of the default context; one short request fits
    "mismatch",  # of a checkpoint whose fused projections are stored for four ranks
)
# What is stated to run, by model and GPU, and why the planner says no.
UNEXPLAINED = {
    ("moonshotai/Kimi-K3", "b300-sxm"): "the size of a model that is announced, not published",
    ("inclusionAI/Ring-2.5-1T", "gb200-nvl72"): "1 TB of weights on four devices of a made table",
    ("internlm/Intern-S1-FP8", "mi300x"): "experts cut into 192 columns (vllm pull request 48173)",
    ("internlm/Intern-S1-FP8", "mi355x"): "experts cut into 192 columns (vllm pull request 48173)",
    ("Inferact/Qwen3.8-27B-NVFP4", "rtx-5090"): "which parts stay in 16 bits is not published",
}


def request_of(row):
    """Return the request of a row: one caller, with the published degrees and formats."""
    spec, number = get_model(row["model"]), {}
    for name in ("gpus", "nodes", "tensor", "pipeline", "data", "attention_data", "expert"):
        number[name] = int(row[name] or 1)
    strategy = {f"{name}_parallel_size": number[name] for name in ("tensor", "pipeline", "data")}
    if spec.is_moe:
        strategy["expert_parallel_size"] = number["expert"]
    if number["attention_data"] > 1:
        strategy["attention_data_parallel_size"] = number["attention_data"]
    if "fp8" in row["kv_cache_dtype"]:
        strategy["kv_cache_dtype"] = "fp8"
    stored = STORED.get(row["checkpoint"], row["checkpoint"])
    own = spec.weight_dtype or "bf16"
    # A checkpoint that holds few bits is loaded as it is: recipes call FP4 beside FP8 "fp8".
    if stored and own in LIKE and LIKE.get(stored, stored) != LIKE[own]:
        strategy["weight_dtype"] = stored
    # vLLM's "auto" takes what fits. What is stated not to hold one request gets that one.
    stated = int(row["max_model_len"].replace("auto", "") or SHORT)
    most = stated if row["result"] == "impossible" else SHORT
    longest = min(stated, spec.max_position_embeddings, most)
    answer = min(256, longest // 2)
    return EstimateRequest.model_validate(
        {
            "model": row["model"],
            "engine": f"{row['engine']} {row['release']}".strip(),
            "cluster": {
                "device": row["gpu"],
                "devices_per_node": number["gpus"] // number["nodes"],
                "nodes": number["nodes"],
            },
            "workload": {
                "kind": "serve",
                "input_tokens": longest - answer,
                "output_tokens": answer,
                "concurrency": 1,
            },
            "strategy": strategy,
        }
    )


def result_of(row):
    """Return what the planner answers to a row: unread, refused, too large or fits."""
    try:
        return "fits" if estimate(request_of(row)).fits else "too large"
    except UnknownModelError:
        return "unread"
    except PlannerError as error:
        return f"refused: {error}"


@cache
def checked(engine):
    with ROWS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["engine"] == engine]
    found = defaultdict(list)
    for row in rows:
        found[row["result"]].append((row, result_of(row)))
    return found


ENGINES = ("vllm", "sglang", "tensorrt_llm")


@pytest.mark.parametrize("engine", ENGINES)
def test_every_published_deployment_of_a_known_model_fits_and_is_accepted(engine):
    read = [(row, result) for row, result in checked(engine)["verified"] if result != "unread"]
    wrong = [
        (row["source"], row["model"], row["gpu"], result)
        for row, result in read
        if result != "fits" and (row["model"], row["gpu"]) not in UNEXPLAINED
    ]

    assert len(read) >= 40
    assert len(read) >= 0.95 * len(checked(engine)["verified"])
    assert wrong == []


@pytest.mark.parametrize("engine", ENGINES)
def test_stated_impossibilities_are_refused_or_do_not_fit(engine):
    wrong = [
        (row["source"], row["model"], row["gpu"], row["reason"])
        for row, result in checked(engine)["impossible"]
        if result == "fits" and not any(words in row["reason"] for words in BEYOND)
    ]

    assert wrong == []
