"""A published checkpoint says in which format it stores which part of its weights."""

import pytest

from planner.catalog.models import get_model, model_from_config
from tests.planner.asking import TINY, ask

NVFP4 = {"quant_algo": "NVFP4", "config_groups": {"g": {"weights": {"num_bits": 4}}}}


def stored(quantization: dict, **fields):
    return model_from_config({**TINY, **fields, "quantization_config": quantization})


@pytest.mark.parametrize(
    ("quantization", "dtype", "group_size"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", None),
        ({"quant_method": "fbgemm_fp8"}, "fp8", None),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "int4", 64),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "int4", 32),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8", None),
        ({"quant_method": "mxfp4"}, "mxfp4", None),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", None),
    ],
)
def test_the_tools_names_of_formats_are_read(quantization, dtype, group_size):
    model = stored(quantization)

    assert (model.weight_dtype, model.group_size) == (dtype, group_size)


@pytest.mark.parametrize(
    ("number", "bits", "group", "dtype"),
    [("int", 4, 32, "int4"), ("float", 8, None, "fp8"), ("int", 8, None, "int8")],
)
def test_compressed_tensors_are_read_by_their_weights(number, bits, group, dtype):
    weights = {"num_bits": bits, "type": number, "group_size": group}
    groups = {"config_groups": {"group_0": {"weights": weights}}}

    model = stored({"quant_method": "compressed-tensors", **groups})

    assert (model.weight_dtype, model.group_size) == (dtype, group)


@pytest.mark.parametrize(
    "skipped",
    [
        ["model.layers.*.self_attn"],
        ["re:.*self_attn.*"],
        [f"model.layers.{layer}.self_attn*" for layer in range(6)],
        ["*.self_attn.*"],
    ],
)
def test_attention_that_every_layer_skips_keeps_its_16_bits(skipped):
    model = stored({"quant_method": "fp8", "ignore": skipped}, torch_dtype="bfloat16")

    assert model.part_dtypes == {"attention": "bf16"}


def test_attention_that_two_layers_skip_counts_as_quantised():
    skipped = ["model.layers.0.self_attn*", "model.layers.5.self_attn*"]

    assert stored({"quant_method": "fp8", "ignore": skipped}).part_dtypes == {}


def test_skipped_routers_norms_and_heads_are_no_part_of_the_layers_weights():
    skipped = ["lm_head", "model.layers.*.mlp.gate", "model.layers.*.input_layernorm"]

    assert stored({"quant_method": "fp8", "modules_to_not_convert": skipped}).part_dtypes == {}


def test_a_list_of_formats_by_module_gives_each_part_its_own():
    layers = {
        "model.layers.3.self_attn.o_proj": {"quant_algo": "FP8"},
        "model.layers.3.mlp.experts": {"quant_algo": "W4A16_NVFP4"},
    }
    model = stored({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})

    assert model.weight_dtype == "nvfp4"
    assert model.part_dtypes == {"attention": "fp8"}


@pytest.mark.parametrize(
    ("model_id", "dtype", "parts"),
    [
        ("openai/gpt-oss-120b", "mxfp4", {"attention": "bf16"}),
        ("nvidia/DeepSeek-R1-NVFP4", "nvfp4", {"attention": "bf16"}),
        (
            "moonshotai/Kimi-K2.5",
            "int4",
            {"attention": "bf16", "feed_forward": "bf16"},
        ),
        (
            "nvidia/Qwen3.6-35B-A3B-NVFP4",
            "nvfp4",
            {"attention": "fp8"},
        ),
        ("deepseek-ai/DeepSeek-V3", "fp8", {}),
    ],
)
def test_published_checkpoints_are_read_part_by_part(model_id, dtype, parts):
    model = get_model(model_id)

    assert (model.weight_dtype, model.part_dtypes) == (dtype, parts)


def test_the_group_size_of_a_checkpoint_becomes_the_strategys():
    config = {**TINY, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}

    assert ask(model=config, engine="vllm").strategy.group_size == 64


def test_a_checkpoint_without_quantisation_keeps_its_plain_dtype():
    model = model_from_config({**TINY, "torch_dtype": "float16"})

    assert (model.weight_dtype, model.quantization) == ("fp16", None)


@pytest.mark.parametrize(
    ("model_id", "ranks", "loaded_gib"),
    [
        # kaitakuai/experiments, 2026-08/hy3-fp8-8xh100: vLLM's weights in memory, of all ranks.
        ("tencent/Hy3-FP8", 8, 276),
        # Model Optimizer's comparison of checkpoints; vLLM pads the experts' width of 1856.
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8", 1, 31.4),
    ],
)
def test_checkpoints_load_as_many_bytes_as_measured(model_id, ranks, loaded_gib):
    held = ask(
        model=model_id,
        devices=ranks,
        strategy={"tensor_parallel_size": ranks, "expert_parallel_size": ranks},
    ).memory.breakdown_bytes["weights"]

    assert ranks * held == pytest.approx(loaded_gib * 2**30, rel=0.05)
