"""The ways out that refusals show are open: each one is taken, and answered."""

import json

import pytest

from planner.api import fields_at, known_fields, parse_model
from planner.catalog.engines import list_engines
from planner.catalog.reading import data_json, data_toml
from planner.specs.base import BadRequestError, PlannerError
from planner.specs.estimate import EstimateRequest, PlanRequest
from tests.planner.asking import GENERATE, LLAMA_70B, MIXTRAL, SERVE, TINY, TRAIN, ask, document

EAGLE = "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B"
DRAFT = {"draft_model": "meta-llama/Llama-3.2-1B"}
ON_CPU = {"cluster": {"device": "cpu-xeon-8480-2s", "disk_capacity_bytes": 2**42}}
LONG = {**SERVE, "input_tokens": 100_000}
CARD = {
    "id": "card",
    "memory_bytes": 80 * 1024**3,
    "memory_bandwidth_bytes_per_second": 2e12,
    "peak_flops_per_second": {"bf16": 5e14},
}
QWEN = data_json("configs/Qwen--Qwen3-8B.json")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


def way(words, fields, *changes):
    """Return a refused request, words of its way out, and the requests that take it."""
    return words, fields, changes


def strategies(*ways):
    return tuple({"strategy": one} for one in ways)


WAYS_OUT = [
    way("smaller model of the target's family.*or leave speculative out",
        {"strategy": {"speculative": {"draft_model": EAGLE}}},
        *strategies({"speculative": DRAFT}, {})),
    way("smaller model of the target's family",
        {"strategy": {"speculative": {"draft_model": "org/no-such-draft"}}},
        *strategies({"speculative": DRAFT}, {})),
    way("choose a draft of the target's family",
        {"strategy": {"speculative": {"draft_model": "Qwen/Qwen3-0.6B"}}},
        *strategies({"speculative": DRAFT})),
    way("use tensor_parallel_size instead",
        {"devices": 2, "engine": "tensorrt_llm",
         "strategy": {"pipeline_parallel_size": 2, "speculative": DRAFT}},
        *strategies({"tensor_parallel_size": 2, "speculative": DRAFT})),
    way("given as its config.json", {"model": "org/none"}, {"model": TINY}),
    way("given as an object", {"device": "h999"}, {"device": CARD}),
    way("a cluster whose device has price_usd_per_hour", {"cluster": {"instance": "nope/none"}},
        {"cluster": {"device": {**CARD, "price_usd_per_hour": 2.0}}}),
    way("shorten the request, or stretch the context with rope_scaling",
        {"model": "Qwen/Qwen3-8B", "workload": LONG, "engine": "vllm", "devices": 8},
        {"workload": SERVE}, {"model": {**QWEN, "rope_scaling": YARN}}),
    way("leave it out$", {**ON_CPU, "engine": "torch", "workload": TRAIN,
                          "strategy": {"offload": {"activations_cpu": 1.0}}},
        *strategies({"offload": {}})),
    way("set offload.optimizer to nvme, or leave",
        {**ON_CPU, "engine": "torch", "workload": TRAIN,
         "strategy": {"offload": {"optimizer": "cpu"}}},
        *strategies({"offload": {"optimizer": "nvme"}}, {})),
    way("set offload.weights_disk, or leave",
        {**ON_CPU, "workload": GENERATE, "strategy": {"offload": {"weights_cpu": 0.5}}},
        *strategies({"offload": {"weights_disk": 0.5}}, {})),
    way("leave it out, or choose vllm, sglang or tensorrt_llm",
        {"model": MIXTRAL, "devices": 8, "engine": "exllamav2",
         "strategy": {"attention_data_parallel_size": 8}},
        {"engine": "vllm"}, {"engine": "sglang"}, {"engine": "tensorrt_llm"}),
    way("leave it out, or choose tensorrt_llm",
        {"devices": 2, "engine": "vllm", "strategy": {"context_parallel_size": 2}},
        {"engine": "tensorrt_llm"}, *strategies({})),
    way("set pipeline_parallel_size instead",
        {"model": "deepseek-ai/DeepSeek-V2-Lite", "devices": 2, "engine": "llama_cpp",
         "strategy": {"tensor_parallel_size": 2}},
        *strategies({"pipeline_parallel_size": 2})),
    way("leave it out", {"engine": "llama_cpp", "strategy": {"gpu_memory_utilization": 0.9}},
        *strategies({})),
    way("choose adamw, or leave it out",
        {"workload": {**TRAIN, "optimizer": "lion"}, "engine": "torch",
         "strategy": {"offload": {"optimizer": "cpu"}}},
        {"workload": TRAIN}, *strategies({})),
    way("set zero_stage to 1, 2 or 3",
        {"workload": TRAIN, "devices": 8, "strategy": {"zero_shard_size": 8}},
        *strategies(*({"zero_shard_size": 8, "zero_stage": stage} for stage in (1, 2, 3)))),
    way("choose llama_cpp", {"device": "m4-max", "engine": "vllm"}, {"engine": "llama_cpp"}),
    way("choose vllm, sglang or llama_cpp",
        {"device": "rx-7900-xtx", "engine": "tensorrt_llm",
         "model": "meta-llama/Llama-3.2-1B"},
        {"engine": "vllm"}, {"engine": "sglang"}, {"engine": "llama_cpp"}),
    way("choose exllamav2 .for EXL2., or take AWQ or GPTQ",
        {"engine": "vllm", "strategy": {"quantization": "exl2:4.0"}},
        {"engine": "exllamav2"}, *strategies({"quantization": "awq"}, {"quantization": "gptq"})),
]  # fmt: skip


def test_every_way_out_that_is_shown_can_be_taken():
    for words, fields, changes in WAYS_OUT:
        with pytest.raises(PlannerError, match=words):
            ask(**fields)
        assert changes, words
        for change in changes:
            assert ask(**{**fields, **change}).memory, (words, change)


def parsed(spec, **fields):
    """Return the refusal of a document with an unknown field."""
    with pytest.raises(BadRequestError) as refused:
        parse_model(spec, json.dumps(document(**fields)))
    return refused.value


def test_adapters_at_serving_time_are_refused_by_name_and_a_smaller_share_is_planned():
    for field in ("max_loras", "max_lora_rank", "enable_lora"):
        refused = parsed(EstimateRequest, engine="vllm", strategy={field: 8})
        assert "adapters at serving time are not modelled" in refused.message
        assert refused.field == f"strategy.{field}"
        assert "lower" in refused.message
    smaller = {"tensor_parallel_size": 8, "gpu_memory_utilization": 0.8}
    assert ask(model=LLAMA_70B, device="a100-sxm4-40gb", devices=8, engine="vllm",
               strategy=smaller).fits  # fmt: skip


def test_a_hint_names_fields_that_are_valid_at_the_very_path():
    for spec, fields, parents in (
        (EstimateRequest, {"cluster": {"device": "t4", "foo": 1}}, ["cluster"]),
        (EstimateRequest, {"workload": {**SERVE, "sequence_length": 1}}, ["workload", "serve"]),
        (PlanRequest, {"pins": {"prefill_devices": 4}}, ["pins"]),
        (PlanRequest, {"pins": {"lora_rank": 8}}, ["pins"]),
        (EstimateRequest, {"strategy": {"offload": {"disk": 1}}}, ["strategy", "offload"]),
        (EstimateRequest, {"cluster": {"device": {**CARD, "memory": 1}}}, ["cluster", "device"]),
        (PlanRequest, {"objectiv": "cost"}, []),
    ):
        refused = parsed(spec, **fields)
        valid = fields_at(spec, parents) if parents else set(known_fields(spec).values())
        hinted = refused.message.rpartition("nearest: ")[2] or refused.message
        named = {word.strip() for word in hinted.rpartition("among ")[2].split(",")}
        assert named <= set(valid), (fields, named)

    # A field at the top is named with its place in this very request.
    misplaced = {"tensor_parallel_size": 2}
    assert "pins.tensor_parallel_size" in parsed(PlanRequest, **misplaced).message
    assert "strategy.tensor_parallel_size" in parsed(EstimateRequest, **misplaced).message


def test_engines_that_limits_name_as_a_way_out_exist():
    names = set(list_engines())
    for row in data_toml("engine_limits.toml")["limit"]:
        _, chooses, rest = row["instead"].partition("choose ")
        if not chooses:
            continue
        listed = rest.split(",", 1)[0] if " or take" in rest else rest
        words = listed.replace(" or ", ", ").replace(";", ",").split(",")
        first = [word.strip().split(" ")[0] for word in words if word.strip()]
        assert set(first) <= names, row
