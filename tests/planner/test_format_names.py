"""A name that states a format is read as a checkpoint of the catalog's model in that format."""

import io
import json
from contextlib import suppress

import pytest

from planner.__main__ import run_catalog
from planner.api import estimate, plan
from planner.catalog.format_names import split_format, with_format
from planner.catalog.models import (
    checkpoint_name,
    get_entry,
    get_model,
    list_models,
    model_from_config,
)
from planner.catalog.reading import data_text
from planner.cost.parameters import count_parameters
from planner.errors import NotPossibleError, UnknownModelError
from planner.exports.registry import export, export_case
from planner.specs.estimate import EstimateRequest, PlanRequest

ATTENTION = {"attention": "bf16"}
BESIDE_EXPERTS = {"attention": "bf16", "feed_forward": "bf16"}
GIB = 1024**3
CT = "compressed-tensors"
# Name, dtype, method, block, group, parts that stay wide.
PUBLISHED = [
    ("Qwen/Qwen3-VL-8B-Instruct-FP8", "fp8", "fp8", 128, None, {}),
    ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "fp8", "fp8", 128, None, {}),
    ("Qwen3 14B FP8", "fp8", "fp8", 128, None, {}),
    ("unsloth/Qwen3-14B-fp8", "fp8", "fp8", 128, None, {}),
    ("RedHatAI/Qwen3-8B-FP8-dynamic", "fp8", CT, None, None, {}),
    ("RedHatAI/Qwen3-8B-FP8-block", "fp8", CT, 128, None, {}),
    ("RedHatAI/Qwen3-32B-FP8", "fp8", CT, None, None, {}),
    ("zai-org/GLM-4.6-FP8", "fp8", CT, None, None, {}),
    ("nvidia/Llama-3.3-70B-Instruct-FP8", "fp8", "fp8", None, None, {}),
    ("nvidia/NVIDIA-Nemotron-Nano-9B-v2-FP8", "fp8", "fp8", None, None, {}),
    ("amd/Llama-3.3-70B-Instruct-FP8-KV", "fp8", "quark", None, None, {}),
    ("MiniMaxAI/MiniMax-M3-MXFP8", "fp8", "mxfp8", None, None, {}),
    ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "nvfp4", "nvfp4", None, 16, {}),
    ("nvidia/DeepSeek-R1-0528-FP4-v2", "nvfp4", "nvfp4", None, 16, ATTENTION),
    ("RedHatAI/Llama-3.3-70B-Instruct-NVFP4", "nvfp4", CT, None, 16, {}),
    ("amd/Kimi-K2.5-MXFP4", "mxfp4", "quark", None, None, ATTENTION),
    ("amd/gpt-oss-120b-w-mxfp4-a-fp8", "mxfp4", "quark", None, None, ATTENTION),
    ("Qwen/Qwen2.5-72B-Instruct-AWQ", "int4", "awq", None, 128, {}),
    ("cpatonn/Qwen3-30B-A3B-Instruct-2507-AWQ-4bit", "int4", CT, None, 32, {}),
    ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "int4", "gptq", None, 128, {}),
    ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "int8", "gptq", None, 128, {}),
    ("Qwen/Qwen3.5-397B-A17B-GPTQ-Int4", "int4", "gptq", None, 128, BESIDE_EXPERTS),
    ("neuralmagic/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "int8", CT, None, None, {}),
    ("RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16", "int4", CT, None, 128, {}),
    ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "nf4", "bitsandbytes", None, 64, {}),
    ("mlx-community/Qwen3-8B-4bit", "int4", "mlx", None, 64, {}),
    ("mlx-community/Qwen3-8B-8bit", "int8", "mlx", None, 64, {}),
    ("unsloth/Kimi-K2-Instruct-BF16", "bf16", None, None, None, {}),
    ("unsloth/DeepSeek-R1-BF16", "bf16", None, None, None, {}),
]


@pytest.mark.parametrize(("name", "dtype", "method", "block", "group", "parts"), PUBLISHED)
def test_published_names_are_read_as_their_publishers_write_them(
    name, dtype, method, block, group, parts
):
    model = get_model(name)

    assert (model.weight_dtype, model.quantization) == (dtype, method)
    assert (model.weight_block_size, model.group_size) == (block, group)
    assert model.part_dtypes == parts
    assert model.id == name
    assert get_entry(name).id in model.note
    assert "config.json" in model.note


# The catalog's own checkpoints whose parts are in several quantised formats, or in other ones
# than those of their siblings: no name says that.
UNLIKE = frozenset({"nvidia/GLM-5-NVFP4", "nvidia/Kimi-K2.6-NVFP4", "nvidia/Kimi-K2.7-Code-NVFP4"})


def catalog_checkpoints():
    """Return the catalog's own checkpoints of one format whose model it has in another one."""
    found = []
    for entry in list_models():
        split, own = split_format(entry.id), get_model(entry.id)
        mixed = {*own.part_dtypes.values()} - {"bf16"}
        if split is None or split[1].is_plain or mixed or entry.id in UNLIKE:
            continue
        for rest in (split[0], f"{split[0]}-BF16"):
            with suppress(UnknownModelError):
                found.append((entry.id, get_entry(rest), split[1]))
                break
    return [each for each in found if each[1].id != each[0]]


@pytest.mark.parametrize(
    ("name", "base", "stated"),
    catalog_checkpoints(),
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_format_means_what_the_catalogs_own_configs_of_it_say(name, base, stated):
    config = json.loads(data_text(f"configs/{base.config}.json"))
    own, told = get_model(name), model_from_config(with_format(config, get_model(base.id), stated))

    assert (told.weight_dtype, told.part_dtypes) == (own.weight_dtype, own.part_dtypes)
    assert told.weight_block_size == own.weight_block_size
    assert count_parameters(told).total == pytest.approx(count_parameters(own).total, rel=0.01)


# The published size of a checkpoint's weights, or what vLLM reports after loading it.
SIZES = [
    # QwenLM/Qwen3, issue 1700
    ("Qwen/Qwen3-4B-Instruct-2507-FP8", 1, 4.2299 * GIB),
    # vllm-project/vllm, issue 6746: per GPU
    ("meta-llama/Meta-Llama-3.1-405B-Instruct-FP8", 8, 57.75 * GIB * 8),
    # vllm-project/vllm, issue 17327: "model weights take"
    ("nytopop/Qwen3-30B-A3B.w4a16", 1, 15.68 * GIB),
    # their model cards on Hugging Face
    ("AH22-neb/GLM-4.6-NVFP4", 4, 220e9),
    ("lukealonso/Qwen3.5-397B-A17B-NVFP4", 4, 233e9),
    ("xega-ai/Qwen3.5-35B-A3B-FP8-Dynamic", 1, 36.8e9),
]


@pytest.mark.parametrize(("name", "devices", "published"), SIZES)
def test_weights_are_as_large_as_published(name, devices, published):
    loaded = answer_of(name, "b200-sxm", devices)

    assert loaded.memory.breakdown_bytes["weights"] * devices == pytest.approx(published, rel=0.05)


def answer_of(name, device, devices=1):
    return estimate(
        EstimateRequest.model_validate(
            {
                "model": name,
                "engine": "vllm",
                "cluster": {"device": device, "devices_per_node": devices},
                "workload": {
                    "kind": "serve",
                    "input_tokens": 512,
                    "output_tokens": 64,
                    "concurrency": 1,
                },
                "strategy": {"tensor_parallel_size": devices},
            }
        )
    )


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-32B-NVFP4-FP8",
        "RedHatAI/Qwen3-8B-AWQ-FP8",
        "Qwen/Qwen3-9B-FP8",
        "Qwen/Qwen3-8B-FP9",
        "Qwen/Qwen3-8B-exl2",
        "nobody/FP8",
        "-FP8",
        "FP8",
    ],
)
def test_contradicting_and_unknown_formats_are_refused_with_the_nearest_names(name):
    with pytest.raises(UnknownModelError) as caught:
        get_model(name)

    assert caught.value.nearest


@pytest.mark.parametrize("name", ["unsloth/Qwen3-8B-GGUF", "unsloth/Qwen3-8B-GGUF:Q4_K_M"])
def test_a_repository_of_gguf_files_is_refused_with_the_way_to_ask(name):
    with pytest.raises(UnknownModelError, match=r"Qwen/Qwen3-8B,.* gguf:q4_k_m"):
        get_model(name)


def test_a_stated_format_replaces_that_of_a_quantised_model():
    assert get_model("deepseek-ai/DeepSeek-R1").weight_dtype == "fp8"
    assert get_model("RedHatAI/DeepSeek-R1-0528-quantized.w4a16").weight_dtype == "int4"


def test_a_model_in_the_stated_format_keeps_its_own_config():
    own, read = get_model("moonshotai/Kimi-K2.5"), get_model("moonshotai/Kimi-K2.5-INT4")

    assert (read.weight_dtype, read.group_size) == (own.weight_dtype, own.group_size)
    assert read.part_dtypes == own.part_dtypes


def test_another_publishers_way_is_not_that_of_the_catalogs_checkpoint():
    assert get_model("Qwen/Qwen3-32B-FP8").weight_block_size == 128
    assert get_model("RedHatAI/Qwen3-32B-FP8").weight_block_size is None


@pytest.mark.parametrize(
    ("given", "started"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct-FP8", "Qwen/Qwen3-VL-8B-Instruct-FP8"),
        ("META-LLAMA/llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct", "unsloth/Meta-Llama-3.1-8B-Instruct"),
        ("Llama 2 13B", "meta-llama/Llama-2-13b"),
        (" Qwen3-8B-AWQ ", "Qwen3-8B-AWQ"),
    ],
)
def test_an_engine_is_started_with_the_checkpoint_that_was_named(given, started):
    assert checkpoint_name(given) == started


@pytest.mark.parametrize(
    ("engine", "format_name", "start"),
    [
        ("vllm", "vllm", "vllm serve"),
        ("sglang", "sglang", "python -m sglang.launch_server --model-path"),
        ("tensorrt_llm", "tensorrt_llm", "trtllm-serve"),
    ],
)
def test_commands_start_the_named_checkpoint_in_its_own_format(engine, format_name, start):
    name = "Qwen/Qwen3-VL-8B-Instruct-FP8"
    request = PlanRequest.model_validate(
        {
            "model": name,
            "engine": engine,
            "cluster": {"device": "h100-sxm5-80gb", "devices_per_node": 1},
            "workload": {
                "kind": "serve",
                "input_tokens": 512,
                "output_tokens": 128,
                "concurrency": 4,
            },
        }
    )
    answer = plan(request)
    exported = export(format_name, export_case(request, answer.plans[0]))
    command = " ".join(exported.text.replace("\\\n", " ").split())

    assert answer.plans[0].strategy.weight_dtype == "fp8"
    assert f"{start} {name}" in command
    assert "--quantization" not in command


def test_blocks_of_a_named_checkpoint_bound_the_degrees():
    with pytest.raises(NotPossibleError, match="FP8 block"):
        answer_of("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "h100-sxm5-80gb", 4)
    assert answer_of("RedHatAI/Qwen3-30B-A3B-Instruct-2507-FP8-dynamic", "h100-sxm5-80gb", 4).fits


def test_the_warnings_say_what_was_assumed_of_a_name():
    warnings = answer_of("Qwen/Qwen3-8B-FP8", "h100-sxm5-80gb").warnings

    assert any("the FP8 checkpoint of Qwen/Qwen3-8B" in warning for warning in warnings)
    assert any("block of 128 x 128" in warning for warning in warnings)


def test_the_command_line_describes_a_named_checkpoint():
    sink = io.StringIO()

    run_catalog(sink, "models", "Qwen/Qwen3-8B-FP8", as_json=True)
    row = json.loads(sink.getvalue())

    assert (row["id"], row["weight_dtype"]) == ("Qwen/Qwen3-8B-FP8", "fp8")
    assert row["aliases"] == []
