"""Plans that compare engines: ``engine = "auto"``, GGUF types, and layers on the host's cores."""

import pytest

from planner.api import estimate, inverse, plan
from planner.catalog.engines import compared_engines
from planner.specs.base import BadRequestError, NotPossibleError
from planner.specs.estimate import EstimateRequest, InverseRequest, PlanRequest

SERVE = {"kind": "serve", "input_tokens": 1024, "output_tokens": 256, "concurrency": 1}
GENERATE = {"kind": "generate", "input_tokens": 1024, "output_tokens": 256, "batch_size": 64}
GPU_ENGINES = {"vllm", "sglang", "llama_cpp"}


def request(model, device, *, devices=1, workload=SERVE, engine="auto", **more):
    cluster = {"device": device, "devices_per_node": devices, "nodes": 1}
    return {
        "model": model,
        "cluster": cluster,
        "workload": workload,
        "engine": engine,
        **more,
    }


def planned(*arguments, **more):
    return plan(PlanRequest.model_validate(request(*arguments, **more)))


def test_auto_shows_the_best_plan_of_every_engine_that_fits():
    """The plans are those of the engines alone, and each engine's best precedes any second."""
    for model, device, devices, workload in (
        ("meta-llama/Llama-3.1-8B", "h100-sxm-80gb", 1, SERVE | {"concurrency": 16}),
        ("Qwen/Qwen3-30B-A3B", "h100-sxm-80gb", 4, SERVE | {"concurrency": 16}),
        ("Qwen/Qwen3-8B", "l40s", 1, GENERATE),
    ):
        case = (model, device, devices)
        found = planned(model, device, devices=devices, workload=workload, top=8)
        assert {each.engine for each in found.plans[:3]} == GPU_ENGINES, case
        alone = [
            planned(model, device, devices=devices, workload=workload, engine=engine).plans[0]
            for engine in ("vllm", "sglang")
        ]
        speeds = [each.performance.tokens_per_second for each in alone]
        assert found.plans[0].performance.tokens_per_second == max(speeds), case
        assert [each.rank for each in found.plans] == list(range(1, len(found.plans) + 1)), case


def test_nothing_fits_only_if_no_engine_fits():
    """A model that the usual engine does not hold is planned on another, whole or with a share."""
    for model, device, workload, engine, on_host in (
        ("openai/gpt-oss-20b", "rtx-4080-super", SERVE, "llama_cpp", False),
        ("Qwen/Qwen3-30B-A3B", "rtx-4060", SERVE, "llama_cpp", True),
        ("Qwen/Qwen3-30B-A3B", "rtx-4060", GENERATE | {"batch_size": 1}, "llama_cpp", True),
    ):
        found = planned(model, device, workload=workload)
        best = found.plans[0]
        offload = best.strategy.offload
        assert (best.engine, offload is not None) == (engine, on_host), (model, device)
        named = planned(model, device, workload=workload, engine="vllm")
        assert not named.plans, (model, device)
        titles = [each.title for each in named.suggestions]
        assert any("instead of vLLM" in title for title in titles), titles
        if on_host:
            assert offload.weights_cpu > 0
            shown = f"with {offload.weights_cpu:.0%} of the weights in host memory"
            assert any(shown in title for title in titles), titles


def test_an_engine_that_cannot_is_named_with_its_reason():
    """Alone if another can, and with all others, each after its name, if none can."""
    found = planned("Qwen/Qwen3-32B", "t4", pins={"weight_dtype": "nvfp4"})
    assert {each.engine for each in found.plans} == {"llama_cpp"}
    assert "vLLM refuses" in found.rejected["vllm"].reason
    assert "llama_cpp" not in found.rejected

    split = {"pins": {"context_parallel_size": 2}}
    with pytest.raises(NotPossibleError) as caught:
        planned("Qwen/Qwen3-8B", "h100-sxm-80gb", devices=4, **split)
    for engine in GPU_ENGINES:
        assert f". {engine}: context_parallel_size is 2, which" in caught.value.message, engine
    with pytest.raises(NotPossibleError, match=r"^context_parallel_size is 2, which vLLM"):
        planned("Qwen/Qwen3-8B", "h100-sxm-80gb", devices=4, engine="vllm", **split)


def test_the_first_export_of_a_plan_is_that_of_its_engine():
    found = planned("Qwen/Qwen3-8B", "h100-sxm-80gb", workload=GENERATE, top=8)
    for each in found.plans:
        assert each.exports[0] == each.engine, each.engine
    assert {each.engine for each in found.plans} == GPU_ENGINES


def test_the_share_on_the_host_is_the_smallest_of_its_ladder():
    """One step less on the host does not fit."""
    best = planned("Qwen/Qwen3-30B-A3B", "rtx-4060", engine="llama_cpp").plans[0]
    document = request("Qwen/Qwen3-30B-A3B", "rtx-4060", engine="llama_cpp")
    document["strategy"] = best.strategy.model_dump(exclude_none=True)
    assert estimate(EstimateRequest.model_validate(document)).fits
    document["strategy"]["offload"] = {"weights_cpu": best.strategy.offload.weights_cpu - 0.1}
    assert not estimate(EstimateRequest.model_validate(document)).fits


def test_llama_cpp_is_planned_in_the_types_of_gguf_files():
    """No plan has a format that no GGUF file holds; a stored or pinned format stays."""
    for model, device, pins, kinds in (
        ("meta-llama/Llama-3.1-8B", "rtx-4090", {}, {None, "q8_0", "q6_k", "q5_k_m", "q4_k_m"}),
        (
            "meta-llama/Llama-3.1-8B",
            "apple-m4-max-40-core-gpu",
            {},
            {None, "q8_0", "q6_k", "q5_k_m", "q4_k_m"},
        ),
        ("openai/gpt-oss-20b", "rtx-4090", {}, {None}),
        ("meta-llama/Llama-3.1-8B", "rtx-4090", {"quantization": "gguf:q2_k"}, {"q2_k"}),
    ):
        found = planned(model, device, engine="llama_cpp", pins=pins, top=10)
        named = [each.strategy.quantization for each in found.plans]
        assert {name and name.removeprefix("gguf:") for name in named} == kinds, (model, device)
        plain = [
            each.strategy.weight_dtype for each in found.plans if not each.strategy.quantization
        ]
        assert set(plain) <= {"bf16", "fp16", "mxfp4"}, (model, device)


def test_files_in_gguf_are_of_llama_cpp_and_other_formats_of_the_others():
    """An FP8 checkpoint is converted for llama.cpp, not loaded; a pin picks engines."""
    for model, devices, pins, engines, weights in (
        ("deepseek-ai/DeepSeek-R1", 8, {}, {"llama_cpp"}, {"q6_k", "q5_k_m", "q4_k_m"}),
        ("deepseek-ai/DeepSeek-R1", 8, {"quantization": "gguf:q4_k_m"}, {"llama_cpp"}, {"q4_k_m"}),
        ("Qwen/Qwen3-8B", 1, {"quantization": "awq"}, {"vllm", "sglang"}, {"awq"}),
        ("Qwen/Qwen3-8B", 1, {"weight_dtype": "fp8"}, {"vllm", "sglang"}, {None}),
    ):
        found = planned(model, "h100-sxm-80gb", devices=devices, pins=pins, top=10)
        assert {each.engine for each in found.plans} == engines, (model, pins)
        named = {each.strategy.quantization for each in found.plans}
        assert {name and name.removeprefix("gguf:") for name in named} == weights, (model, pins)
        assert not any(each.strategy.offload for each in found.plans), (model, pins)


def test_rejections_name_the_engine_of_several():
    rejected = planned("Qwen/Qwen3-30B-A3B", "rtx-4060").rejected
    families = [each.family for each in rejected.values() if each.constraint == "memory"]
    assert {family.rpartition(", ")[2] for family in families} == GPU_ENGINES


def test_an_estimate_is_of_one_engine():
    document = request("Qwen/Qwen3-8B", "rtx-4090") | {"strategy": {}}
    with pytest.raises(BadRequestError, match="name it, such as vllm"):
        estimate(EstimateRequest.model_validate(document))


def test_a_limit_over_engines_is_the_largest_of_each():
    question = {"question": "most_users"}
    values = {
        engine: inverse(
            InverseRequest.model_validate(
                request("Qwen/Qwen3-8B", "rtx-4090", engine=engine) | question
            )
        )
        .limits[0]
        .value
        for engine in ("auto", *compared_engines("gpu", training=False))
    }
    assert values["auto"] == max(value for name, value in values.items() if name != "auto"), values
