"""A search costs its strategies as columns: every question that has an estimate has a search."""

import pytest

from planner.api import estimate, inverse, plan
from planner.specs.estimate import EstimateRequest, InverseRequest, PlanRequest
from tests.planner.asking import LLAMA_8B, document
from tests.planner.laws.checkers import columns_cost_as_numbers

CHAT = {"kind": "serve", "input_tokens": 1024, "output_tokens": 256}
# Model, device, devices, engine, callers, longest request; what is pinned and whether it fits.
LONGEST = {
    "many experts": ("Qwen/Qwen3-30B-A3B", "h100-sxm-80gb", 8, "sglang", 4, 16_384, {}, True),
    "hybrid": (
        *("Qwen/Qwen3.5-35B-A3B", "rtx-5060-ti-16gb", 1, "llama_cpp", 1, 16_384),
        {"quantization": "gguf:q4_k_m"},
        True,  # with a share on the host, which an estimate has to be told
    ),
    "sparse attention": (
        *("deepseek-ai/DeepSeek-V4-Pro", "h200-sxm-141gb", 8, "vllm", 16, 200_000),
        {},
        True,
    ),
    "latent": ("deepseek-ai/DeepSeek-R1", "h100-sxm-80gb", 8, "vllm", 16, 32_768, {}, False),
    "one device": ("openai/gpt-oss-120b", "rtx-4090", 1, "vllm", 1, 8192, {}, False),
    "few experts": (
        *("mistralai/Mixtral-8x7B-v0.1", "h100-sxm-80gb", 4, "vllm", 16, 16_384),
        {},
        True,
    ),
    "large": ("Qwen/Qwen3-235B-A22B", "h200-sxm-141gb", 8, "vllm", 16, 32_768, {}, True),
    "dense": ("Qwen/Qwen3-8B", "h100-sxm-80gb", 8, "vllm", 4, 16_384, {}, True),
}

# Few strategies, so that the many searches of a limit are short.
FEW = {"pipeline_parallel_size": 1, "max_batch_tokens": 8192, "kv_cache_dtype": "fp16"}


@pytest.mark.parametrize("case", LONGEST)
def test_a_stated_longest_request_is_planned_and_estimated(case):
    model, device, count, engine, callers, longest, pins, fits = LONGEST[case]
    fields = {
        "model": model,
        "cluster": {"device": device, "devices_per_node": count},
        "workload": {**CHAT, "concurrency": callers, "max_request_tokens": longest},
        "engine": engine,
    }

    answer = plan(PlanRequest.model_validate({**fields, "pins": pins, "top": 1}))
    alone = estimate(EstimateRequest.model_validate({**fields, "strategy": pins}))

    assert bool(answer.plans) == fits
    assert fits or not alone.fits
    for chosen in answer.plans:
        again = {**fields, "strategy": chosen.strategy.model_dump(exclude_none=True)}
        assert estimate(EstimateRequest.model_validate(again)).fits


@pytest.mark.parametrize(("model", "devices"), [("mistralai/Mixtral-8x7B-v0.1", 4), (LLAMA_8B, 1)])
def test_a_stated_longest_request_limits_the_users(model, devices):
    def most_users(longest):
        load = {**CHAT, "max_request_tokens": longest}
        fields = document(
            model=model, devices=devices, workload=load, engine="vllm", pins=FEW, top=1
        )
        request = InverseRequest.model_validate({**fields, "question": "most_users"})
        return [limit.value for limit in inverse(request).limits]

    assert most_users(2048)[0] > 1
    assert most_users(10**7) == []


def test_a_column_counts_offloaded_caches_and_queued_batches_as_an_estimate_does():
    offloaded = {
        "model": "nvidia/DeepSeek-V4-Flash-NVFP4",
        "cluster": {"device": "mi250", "devices_per_node": 8, "host_memory_bytes": 32 * 1024**3},
        "engine": "qwen_scripts",
        "workload": {"kind": "serve", "input_tokens": 32_768, "output_tokens": 128},
        "strategy": {"tensor_parallel_size": 4, "offload": {"kv_cpu": 1.0}},
    }
    queued = {
        "model": "openai/gpt-oss-120b",
        "cluster": {"device": "rtx-a2000-12gb", "devices_per_node": 1},
        "engine": "exllama",
        "workload": {"kind": "generate", "input_tokens": 1, "output_tokens": 128, "batch_size": 1},
        "strategy": {"max_batch_tokens": 512},
    }
    for fields in (offloaded, queued):
        answer = estimate(EstimateRequest.model_validate(fields))
        assert list(columns_cost_as_numbers(fields, answer)) == [], fields


def test_a_limit_on_a_figure_that_a_workload_lacks_is_refused_in_words():
    request = {
        **document(workload={"kind": "compress", "method": "gguf"}, engine="llama_cpp"),
        "constraints": {"tpot_p95_seconds": {"max": 1.0}},
    }
    answer = plan(PlanRequest.model_validate(request))

    reasons = [rejection.reason for rejection in answer.rejected.values()]
    assert not answer.plans
    assert any("this workload has no TPOT p95" in reason for reason in reasons)
