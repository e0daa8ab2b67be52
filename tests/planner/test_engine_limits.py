"""What engines refuse is refused by name and never ranked: public reports and published rules."""

from itertools import product

import pytest

from planner.catalog.engine_limits import EngineLimit, KernelBlock, serving_engines
from planner.catalog.engines import get_engine, list_engines
from planner.catalog.families import FAMILIES
from planner.catalog.reading import data_toml
from planner.errors import NotPossibleError
from planner.exports.registry import export, export_case
from planner.specs.estimate import PlanRequest
from tests.planner.asking import LLAMA_8B, SERVE, ask, document, search

QWEN_72B = "Qwen/Qwen2.5-72B-Instruct"
SPARSE_FP8 = "Qwen/Qwen3-235B-A22B-FP8"
# (the request, the field, words of the reason)
REFUSED = [
    # Experts of 1536 cut into 192, no multiple of the blocks of 128: vllm 17569.
    (
        {"model": SPARSE_FP8, "devices": 8, "strategy": {"tensor_parallel_size": 8}},
        "tensor_parallel_size",
        "128-wide FP8 block.* expert_parallel_size to 8",
    ),
    (
        {"model": SPARSE_FP8, "devices": 8, "strategy": {"tensor_parallel_size": 8}}
        | {"engine": "sglang"},
        "tensor_parallel_size",
        "128-wide FP8 block",
    ),
    # The shared expert of 1280 cut into 320, even with whole experts: sglang 26107.
    (
        {"model": "stepfun-ai/Step-3.7-Flash-FP8", "devices": 4, "engine": "sglang"}
        | {"strategy": {"tensor_parallel_size": 4, "expert_parallel_size": 4}},
        "tensor_parallel_size",
        "shared experts' width of 1280",
    ),
    # Groups of 128 in a width of 29568: vllm 13640, sglang 3571.
    (
        {"model": QWEN_72B, "device": "a100-sxm4-40gb", "devices": 4}
        | {"strategy": {"tensor_parallel_size": 4, "quantization": "awq", "group_size": 128}},
        "tensor_parallel_size",
        "128-wide group of int4 weights.* nearest that works is 1",
    ),
    # bf16, FP8 caches and MXFP4 on Turing: vllm 1157, 47549, 22288.
    (
        {"device": "t4", "strategy": {"weight_dtype": "bf16", "activation_dtype": "bf16"}},
        "activation_dtype",
        "bf16 needs compute capability 8.0.* fp16",
    ),
    ({"device": "t4", "strategy": {"kv_cache_dtype": "fp8"}}, "kv_cache_dtype", "FP8 cache"),
    ({"device": "t4", "model": "openai/gpt-oss-20b"}, "weight_dtype", "MXFP4 needs"),
    (
        {"device": "rtx-3090", "strategy": {"weight_dtype": "fp8", "activation_dtype": "fp8"}},
        "activation_dtype",
        "8.9 .Ada.*16-bit activations",
    ),
    # The field that the request set is named, and the nearest value that works.
    (
        {"device": "t4", "strategy": {"weight_dtype": "bf16"}},
        "strategy.weight_dtype",
        r"^weight_dtype is bf16, which .*the nearest that works is fp16$",
    ),
    (
        {"device": "b200-sxm", "strategy": {"quantization": "w8a8"}},
        "strategy.quantization",
        r"^quantization is w8a8, so that activation_dtype is int8.* works is w8a16$",
    ),
    (
        {"device": "a100-sxm4-80gb", "engine": "tensorrt_llm"}
        | {"strategy": {"weight_dtype": "nvfp4"}},
        "strategy.weight_dtype",
        "nearest that works is int4$",
    ),
    # NVFP4 runs on NVIDIA alone: vllm/platforms/rocm.py up to 0.19.1.
    (
        {"device": "mi300x", "model": "nvidia/Kimi-K2.5-NVFP4", "devices": 8},
        "weight_dtype",
        "NVFP4",
    ),
    ({"device": "rx-7900-xtx", "engine": "tensorrt_llm"}, "engine", "NVIDIA GPUs only"),
    ({"device": "m4-max"}, "engine", "no kernels for Apple"),
    # A longer context than the config's: vllm 16757.
    (
        {"model": "microsoft/Phi-3-mini-4k-instruct"}
        | {"workload": {**SERVE, "input_tokens": 16_000, "output_tokens": 256}},
        "input_tokens",
        "16256 tokens.* context of 4096",
    ),
    # Degrees that the engine cannot be told.
    (
        {"model": SPARSE_FP8, "devices": 8}
        | {"strategy": {"tensor_parallel_size": 4, "expert_parallel_size": 2}},
        "expert_parallel_size",
        "--enable-expert-parallel spreads the experts over all 8 ranks",
    ),
]
ACCEPTED = [
    {"model": SPARSE_FP8, "devices": 4, "strategy": {"tensor_parallel_size": 4}},
    {"model": SPARSE_FP8, "devices": 8}
    | {"strategy": {"tensor_parallel_size": 8, "expert_parallel_size": 8}},
    # From 0.29 on vLLM refines the blocks of experts where the device has FP8 units.
    {"model": SPARSE_FP8, "devices": 8, "strategy": {"tensor_parallel_size": 8}}
    | {"engine": "vllm 0.33"},
    {"model": QWEN_72B, "strategy": {"tensor_parallel_size": 1, "quantization": "awq"}},
    {"device": "t4", "model": "Qwen/Qwen2.5-3B"},
    {"device": "rtx-3090", "strategy": {"weight_dtype": "fp8"}},
    {"device": "t4", "model": "openai/gpt-oss-20b", "engine": "llama_cpp"},
    {"device": "mi300x", "model": "openai/gpt-oss-20b"},
]


@pytest.mark.parametrize(("fields", "field", "words"), REFUSED)
def test_what_the_engine_refuses_is_refused_by_name(fields, field, words):
    with pytest.raises(NotPossibleError, match=words) as refused:
        ask(**{"engine": "vllm", **fields})

    assert refused.value.field.endswith(field)


@pytest.mark.parametrize("fields", ACCEPTED)
def test_what_the_engine_takes_is_costed(fields):
    assert ask(**{"engine": "vllm", **fields}).performance.tokens_per_second > 0


def exported(engine="vllm", **fields):
    request = PlanRequest.model_validate(document(engine=engine, **fields))
    plan = search(engine=engine, **fields).plans[0]
    return plan.strategy, export(engine, export_case(request, plan)).text


@pytest.mark.parametrize(
    ("fields", "dtype", "flags"),
    [
        # A checkpoint is started in the format in which it is stored, and names it itself.
        ({"model": "openai/gpt-oss-120b", "device": "h200"}, "mxfp4", ["--dtype bfloat16"]),
        ({"model": "moonshotai/Kimi-K2.5", "device": "h200", "devices": 8}, "int4", []),
        ({"model": SPARSE_FP8, "device": "h200", "devices": 8}, "fp8", []),
        ({"model": LLAMA_8B}, "bf16", ["--dtype bfloat16"]),
        ({"model": "Qwen/Qwen2.5-3B", "device": "t4"}, "fp16", ["--dtype float16"]),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_first_plan_starts_the_checkpoint_as_it_is_stored(engine, fields, dtype, flags):
    strategy, text = exported(engine, objective="throughput", **fields)

    assert strategy.weight_dtype == dtype
    assert "--quantization" not in text
    assert all(flag in text for flag in flags)


def test_a_plan_names_the_field_that_was_pinned():
    with pytest.raises(
        NotPossibleError, match=r"^weight_dtype is bf16.* works is fp16$"
    ) as refused:
        search(engine="vllm", device="t4", pins={"weight_dtype": "bf16"})

    assert refused.value.field == "strategy.weight_dtype"


def test_no_plan_takes_what_is_refused_and_the_answer_says_why():
    answer = search(model="Qwen/Qwen3-30B-A3B-FP8", device="l40s", devices=4, engine="vllm")

    cut = [p.strategy for p in answer.plans if p.strategy.expert_parallel_size == 1]
    assert all(strategy.tensor_parallel_size in {1, 2} for strategy in cut)
    assert "128-wide FP8 block" in answer.rejected["fp8 weights, tensor parallel 4"].reason
    on_amd = search(
        model="Qwen/Qwen3-235B-A22B", device="mi355x", devices=8, engine="vllm", top=20
    )
    assert all(plan.strategy.weight_dtype != "nvfp4" for plan in on_amd.plans)


# Which of vLLM, SGLang and TensorRT-LLM load a method; the sources are in engine_limits.toml.
LOADED = {
    "awq": "vllm sglang tensorrt_llm",
    "gptq": "vllm sglang tensorrt_llm",
    "modelopt": "vllm sglang tensorrt_llm",
    "auto-round": "vllm sglang",
    "bitsandbytes": "vllm sglang",
    "gguf": "vllm sglang",
    "quark": "vllm sglang",
    "compressed-tensors": "vllm sglang",  # in integers; TensorRT-LLM loads its floats alone
    "torchao": "vllm",
    **dict.fromkeys(("hqq", "aqlm", "vptq", "spqr", "higgs", "quanto", "spinquant"), ""),
    **dict.fromkeys(("exl2", "exl3", "mlx"), ""),
}
SERVERS = ("vllm", "sglang", "tensorrt_llm")
BY_RELEASE = [
    ("vllm 0.10", "aqlm", True),
    ("vllm 0.12", "aqlm", False),
    ("vllm 0.14.1", "hqq", True),
    ("vllm 0.15", "hqq", False),
    ("vllm 0.13", "bitblas", True),
    ("vllm 0.33", "bitblas", False),
    ("sglang 0.5.3", "auto-round", False),
    ("sglang 0.5.4", "auto-round", True),
    ("sglang 0.5.7", "bitsandbytes", False),
    ("sglang 0.5.8", "bitsandbytes", True),
]
STORED = [
    ("mlx-community/Qwen3-8B-4bit", "vllm", "h100-sxm5-80gb", False),
    ("mlx-community/Qwen3-8B-4bit", "llama_cpp", "m4-max", True),
    ("unsloth/Llama-3.1-8B-Instruct-bnb-4bit", "tensorrt_llm", "h100-sxm5-80gb", False),
    ("unsloth/Llama-3.1-8B-Instruct-bnb-4bit", "sglang", "mi300x", False),
    ("Intel/Qwen3-8B-int4-AutoRound", "tensorrt_llm", "h100-sxm5-80gb", False),
    ("Intel/Qwen3-8B-int4-AutoRound", "sglang", "h100-sxm5-80gb", True),
    ("nvidia/Llama-3.3-70B-Instruct-FP8", "tensorrt_llm", "h200", True),
]


@pytest.mark.parametrize(
    ("engine", "method", "accepted"),
    [
        *((e, method, e in LOADED[method].split()) for e, method in product(SERVERS, LOADED)),
        ("exllamav2", "exl2", True),
        *BY_RELEASE,
    ],
)
def test_methods_of_quantisation_are_refused_where_the_engine_lacks_them(engine, method, accepted):
    fields = {"engine": engine, "strategy": {"quantization": f"{method}:4.5"}}
    if accepted:
        assert ask(**fields).performance.tokens_per_second > 0
        return
    with pytest.raises(NotPossibleError, match=f"{method}:4.5, which .* does not load") as refused:
        ask(**fields)

    assert refused.value.field == "strategy.quantization"


@pytest.mark.parametrize(("model", "engine", "device", "accepted"), STORED)
def test_checkpoints_of_methods_that_an_engine_lacks_are_never_planned(
    model, engine, device, accepted
):
    fields = {"model": model, "engine": engine, "device": device}
    if accepted:
        assert search(**fields).plans
        return
    for asks in (ask, search):
        with pytest.raises(NotPossibleError, match="does not load") as refused:
            asks(**fields)
        assert refused.value.field == "model"


def test_every_serving_engine_says_which_parallel_sizes_it_can_be_told():
    told = serving_engines()
    split = {"context": 2, "attention_data": 2, "expert": 2}

    assert set(told) == {key for key in list_engines() if get_engine(key, "gpu").role == "serving"}
    assert all(row.source for row in told.values())
    for engine in ("sglang", "llama_cpp", "exllamav2"):
        for degree, size in split.items():
            sizes = {degree: size, "tensor": 2, "data": 1}
            strategy = {f"{name}_parallel_size": count for name, count in sizes.items()}
            fields = {"model": SPARSE_FP8, "devices": 8, "strategy": strategy, "engine": engine}
            if getattr(told[engine], degree) in (True, "any"):
                assert ask(**fields).performance.tokens_per_second > 0
                continue
            with pytest.raises(NotPossibleError, match=r"cannot be told|does not have") as refused:
                ask(**fields)
            assert refused.value.field == f"strategy.{degree}_parallel_size"


def test_every_row_names_its_source_and_a_way_out():
    tables = data_toml("engine_limits.toml")
    rows = [EngineLimit.model_validate(row) for row in tables["limit"]]
    blocks = [KernelBlock.model_validate(row) for row in tables["kernel_block"]]

    assert len(rows) > 20
    assert all(row.source and row.instead and row.engines for row in rows)
    assert all(block.source and block.parts and block.engines for block in blocks)
    assert {name for block in blocks for name in block.model_types | block.not_model_types} <= set(
        FAMILIES
    )


@pytest.mark.parametrize(
    ("model", "ranks"),
    [("inclusionAI/Ling-3.0-flash-fp8", 4), ("dots-studio/dots3-note-prev-fp8", 8)],
)
def test_widths_that_engines_pad_are_no_reason_to_refuse(model, ranks):
    """The recipes of both name these degrees, although 768 / 4 and 13824 / 8 cut FP8 blocks."""
    strategy = {"tensor_parallel_size": ranks, "expert_parallel_size": ranks}

    assert ask(model=model, devices=ranks, strategy=strategy).fits
