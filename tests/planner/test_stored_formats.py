"""How checkpoints and their tools say in which format which part of the weights is stored."""

import math

import pytest

from planner.catalog.gguf import packed_format
from planner.catalog.models import get_model, model_from_config
from planner.catalog.published_weights import known_methods
from planner.catalog.reading import data_toml
from planner.cost.parameters import count_parameters
from planner.cost.weights import weight_bytes_per_element
from planner.cost.weights import weight_bytes_per_element as element
from planner.specs.base import (
    BadConfigError,
    BadRequestError,
    NotCoveredError,
    PlannerError,
    UnknownNameError,
)
from planner.specs.model import ModelSpec
from tests.planner.asking import LLAMA_8B, TINY, TRAIN, ask, held

SPARSE = {
    **TINY,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "torch_dtype": "bfloat16",
}


def stored(quantization: object, **fields) -> ModelSpec:
    return model_from_config({**TINY, **fields, "quantization_config": quantization})


def grouped(**weights) -> dict:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }


def test_the_algorithm_wins_over_the_tool_in_any_case_and_no_description_says_nothing():
    for nothing in (None, {}):
        model = stored(nothing, torch_dtype="bfloat16")
        assert (model.weight_dtype, model.quantization) == ("bf16", None), nothing
    model = stored({"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert (model.weight_dtype, model.quantization) == ("nvfp4", "nvfp4")
    assert stored({"quant_method": "FP8"}).weight_dtype == "fp8"


def test_groups_of_layers_and_four_float_bits_are_read_where_the_format_says_so():
    for size in (-1, 0, None):
        model = stored({"quant_method": "gptq", "bits": 4, "group_size": size})
        assert model.group_size is None, size
    model = stored(grouped(num_bits=4, type="int", group_size=32))
    assert (model.weight_dtype, model.group_size) == ("int4", 32)
    plain = stored(grouped(num_bits=4, type="float"))
    packed = stored({**grouped(num_bits=4, type="float"), "format": "mxfp4-pack-quantized"})
    assert (plain.weight_dtype, packed.weight_dtype) == ("nvfp4", "mxfp4")


def test_skipped_modules_are_understood_and_half_of_the_layers_count_as_all():
    for name in ("ignore", "modules_to_not_convert", "exclude_modules"):
        quantization = {"quant_method": "fp8", name: ["re:.*self_attn.*"]}
        model = stored(quantization, torch_dtype="bfloat16")
        assert model.part_dtypes == {"attention": "bf16"}, name
    assert stored({"quant_method": "fp8", "ignore": None}).part_dtypes == {}

    three = [f"model.layers.{layer}.mlp.down_proj" for layer in range(3)]
    two = three[:2]
    found = [
        stored({"quant_method": "fp8", "ignore": named}, torch_dtype="float16").part_dtypes
        for named in (three, two)
    ]
    assert found == [{"feed_forward": "fp16"}, {}]

    model = stored({"quant_method": "fp8", "ignore": ["*.self_attn.*"]})
    assert model.part_dtypes == {"attention": "bf16"}


def test_experts_alone_in_four_bits_are_the_bulk_and_unknown_algorithms_are_left_out():
    config = {**SPARSE, "expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}}
    model = model_from_config(config)
    assert model.weight_dtype == "mxfp4"
    assert model.part_dtypes == {"attention": "fp8", "feed_forward": "fp8"}
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "moe_quant_algo": "NVFP4"}
    model = model_from_config({**SPARSE, "quantization_config": quantization})
    assert model.weight_dtype == "nvfp4"

    layers = {
        "model.layers.0.self_attn.o_proj": {"quant_algo": "MAGIC"},
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4"},
    }
    model = stored({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert (model.weight_dtype, model.part_dtypes) == ("nvfp4", {})


def test_a_pasted_checkpoint_is_costed_in_the_format_that_it_states():
    for quantization, dtype, group in (
        ({"quant_method": "fp8"}, "fp8", None),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "int4", 32),
        ({"quant_method": "mxfp4"}, "mxfp4", None),
    ):
        config = {**TINY, "torch_dtype": "bfloat16", "quantization_config": quantization}
        counts = count_parameters(model_from_config(config))
        found = ask(model=config, engine="vllm")
        # Layers in the stated format; embedding, head and norms in 16 bits.
        # A group of int4 has a scale, and a zero point of the width of a weight.
        bits = 16 + 4 if dtype == "int4" else None
        layers = counts.layer_linear * weight_bytes_per_element(dtype, group, group_bits=bits)
        rest = 2 * (counts.total - counts.layer_linear)
        assert held(found, "weights") == pytest.approx(layers + rest, rel=1e-3)


def test_attention_in_sixteen_bits_weighs_more_than_the_whole_in_eight():
    config = {**TINY, "torch_dtype": "bfloat16"}
    eight = {"quant_method": "fp8"}
    skipping = {**eight, "ignore": ["*.self_attn.*"]}

    whole, mixed = (
        held(ask(model={**config, "quantization_config": q}, engine="vllm"), "weights")
        for q in (eight, skipping)
    )

    # Six layers of queries and output, keys and values: one byte more for each weight.
    assert mixed - whole == 6 * (2 * 256 * 256 + 2 * 256 * 128)


def test_a_quantised_answer_states_the_format_that_it_took_from_the_config():
    config = {**TINY, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}
    strategy = ask(model=config, engine="vllm").strategy
    assert (strategy.weight_dtype, strategy.group_size) == ("int4", 64)


NVFP4 = {"quant_algo": "NVFP4", "config_groups": {"g": {"weights": {"num_bits": 4}}}}


def test_the_tools_names_of_formats_are_read():
    for quantization, dtype, group_size in (
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", None),
        ({"quant_method": "fbgemm_fp8"}, "fp8", None),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "int4", 64),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "int4", 32),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8", None),
        ({"quant_method": "mxfp4"}, "mxfp4", None),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", None),
    ):
        model = stored(quantization)
        assert (model.weight_dtype, model.group_size) == (dtype, group_size)


def test_compressed_tensors_are_read_by_their_weights():
    for number, bits, group, dtype in (
        ("int", 4, 32, "int4"),
        ("float", 8, None, "fp8"),
        ("int", 8, None, "int8"),
    ):
        weights = {"num_bits": bits, "type": number, "group_size": group}
        groups = {"config_groups": {"group_0": {"weights": weights}}}
        model = stored({"quant_method": "compressed-tensors", **groups})
        assert (model.weight_dtype, model.group_size) == (dtype, group)


def test_attention_that_every_layer_skips_keeps_its_16_bits_and_that_of_few_does_not():
    for skipped in (
        ["model.layers.*.self_attn"],
        ["re:.*self_attn.*"],
        [f"model.layers.{layer}.self_attn*" for layer in range(6)],
        ["*.self_attn.*"],
    ):
        model = stored({"quant_method": "fp8", "ignore": skipped}, torch_dtype="bfloat16")
        assert model.part_dtypes == {"attention": "bf16"}, skipped

    skipped = ["model.layers.0.self_attn*", "model.layers.5.self_attn*"]
    assert stored({"quant_method": "fp8", "ignore": skipped}).part_dtypes == {}
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


def test_published_checkpoints_are_read_part_by_part():
    cases = (
        ("openai/gpt-oss-120b", "mxfp4", {"attention": "bf16"}),
        ("nvidia/DeepSeek-R1-NVFP4", "nvfp4", {"attention": "bf16"}),
        ("moonshotai/Kimi-K2.5", "int4", {"attention": "bf16", "feed_forward": "bf16"}),
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", "nvfp4", {"attention": "fp8"}),
        ("deepseek-ai/DeepSeek-V3", "fp8", {}),
    )
    for model_id, dtype, parts in cases:
        model = get_model(model_id)
        assert (model.weight_dtype, model.part_dtypes) == (dtype, parts), (model_id, dtype, parts)


def test_a_checkpoints_group_size_or_plain_dtype_becomes_the_strategys():
    config = {**TINY, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}
    assert ask(model=config, engine="vllm").strategy.group_size == 64
    model = model_from_config({**TINY, "torch_dtype": "float16"})
    assert (model.weight_dtype, model.quantization) == ("fp16", None)


def test_checkpoints_load_as_many_bytes_as_measured():
    for model_id, ranks, loaded_gib in (
        # kaitakuai/experiments, 2026-08/hy3-fp8-8xh100: vLLM's weights in memory, of all ranks.
        ("tencent/Hy3-FP8", 8, 276),
        # Model Optimizer's comparison of checkpoints; vLLM pads the experts' width of 1856.
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8", 1, 31.4),
    ):
        held = ask(
            model=model_id,
            devices=ranks,
            strategy={"tensor_parallel_size": ranks, "expert_parallel_size": ranks},
        ).memory.breakdown_bytes["weights"]
        assert ranks * held == pytest.approx(loaded_gib * 2**30, rel=0.05)


def test_a_named_quantisation_fills_in_its_formats_unless_one_is_given():
    for name, weight, activation in (
        ("gptq", "int4", "bf16"), ("awq", "int4", "bf16"), ("w4a8", "int4", "int8"),
        ("w8a8", "int8", "int8"), ("fp8", "fp8", "fp8"),
    ):  # fmt: skip
        strategy = ask(strategy={"quantization": name}, engine="vllm").strategy
        assert (strategy.weight_dtype, strategy.activation_dtype) == (weight, activation)

    strategy = ask(strategy={"quantization": "gptq", "weight_dtype": "int8"}).strategy
    assert strategy.weight_dtype == "int8"
    quality = ask(strategy={"quantization": "gptq"}, engine="vllm").quality
    assert "GPTQ" in quality.evidence[0]
    with pytest.raises(BadRequestError, match="gptq") as caught:
        ask(strategy={"quantization": "hqq"})
    assert caught.value.field == "strategy.quantization"


def test_qlora_pays_for_unpacking_its_base():
    plain = ask(workload={**TRAIN, "method": "lora"}, engine="megatron")
    packed = ask(workload={**TRAIN, "method": "qlora"}, engine="megatron")
    assert packed.memory.breakdown_bytes["weights"] < 0.5 * plain.memory.breakdown_bytes["weights"]
    assert packed.performance.step_seconds > plain.performance.step_seconds


BF16 = {**TINY, "torch_dtype": "bfloat16"}


def stored_wide(quantization):
    return model_from_config({**BF16, "quantization_config": quantization})


def bits_of(quantization):
    """Return the mean bits that the estimate charges for one linear weight."""
    config = {**BF16, "quantization_config": quantization}
    counts = count_parameters(model_from_config(config))
    whole = 2 * (counts.total - counts.layer_linear)
    return (
        8 * (held(ask(model=config, engine="exllamav2"), "weights") - whole) / counts.layer_linear
    )


def compressed(**weights):
    group = {"weights": {"num_bits": 4, "type": "int", "group_size": 32, **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


HQQ = {"weight_quant_params": {"nbits": 4, "group_size": 64}}
VPTQ = {
    "model.layers.0.mlp.up_proj": {
        "num_centroids": [-1, 65536],
        "num_res_centroids": [-1, 256],
        "vector_lens": [-1, 8],
    }
}
TORCHAO = {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 32}}}


def test_the_bits_of_every_tool_are_those_that_are_costed():
    cases = (
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4 + 32 / 64),
        (
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_use_double_quant": True,
            },
            4 + 8.128 / 64,
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "bitsandbytes"}, 16),
        ({"quant_method": "hqq", "quant_config": HQQ}, 4 + 32 / 64),
        ({"quant_method": "bitnet"}, 2),
        ({"quant_method": "gptq", "bits": 4, "group_size": "128"}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, 3 + 19 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, 8 * element("int8", 128)),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64),
        (compressed(symmetric=True), 4 + 16 / 32),
        (compressed(), 4 + 16 / 32),
        (compressed(symmetric=False), 4 + 20 / 32),
        ({"quant_method": "auto-round", "bits": 2, "group_size": 128}, 2 + 18 / 128),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, 4 + 8 / 32),
        ({"quant_method": "aqlm", "num_codebooks": 1, "nbits_per_codebook": 16}, 2),
        ({"quant_method": "aqlm", "num_codebooks": 2, "nbits_per_codebook": 8}, 2),
        ({"quant_method": "vptq", "config_for_layers": VPTQ}, (16 + 8) / 8),
        ({"quant_method": "spqr", "bits": 3, "beta1": 16, "beta2": 16}, 3.945),
        ({"quant_method": "higgs", "bits": 4, "group_size": 256}, 4 + 32 / 256),
        ({"quant_method": "quanto", "weights": "int4", "group_size": 128}, 4 + 32 / 128),
        ({"quant_method": "quanto", "weights": "float8"}, 8),
        ({"quant_method": "torchao", "quant_type": TORCHAO}, 4 + 32 / 32),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, 8),
        ({"quant_method": "eetq", "weights": "int8"}, 8),
        ({"quant_method": "fbgemm_fp8"}, 8),
        ({"quant_method": "fp_quant", "forward_dtype": "nvfp4"}, 4 + 8 / 16),
        ({"quant_method": "exl2", "bits": 4.25}, 4.25),
        ({"quant_method": "mxfp4"}, 4 + 8 / 32),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128}, 4.25),
        ({"quantization": {"quant_algo": "FP8"}}, 8),
    )
    wrong = [
        (quantization, bits, bits_of(quantization))
        for quantization, bits in cases
        if bits_of(quantization) != pytest.approx(bits, rel=1e-3)
    ]
    assert not wrong, wrong


def test_formats_without_a_dtype_keep_their_bits_and_the_request_may_ask_for_another():
    model = model_from_config({**BF16, "quantization": {"bits": 4, "group_size": 64}})
    assert (model.weight_dtype, model.group_size, model.quantization) == ("int4", 64, "mlx")
    found = ask(model={**BF16, "quantization_config": {"quant_method": "exl2", "bits": 3.5}})
    assert found.strategy.quantization == "exl2:3.5"
    config = {**BF16, "quantization_config": {"quant_method": "exl2", "bits": 3.5}}
    found = ask(model=config, strategy={"weight_dtype": "bf16"}, engine="exllamav2")
    assert found.strategy.quantization is None
    assert held(found, "weights") > held(ask(model=config, engine="exllamav2"), "weights")


def test_what_a_packed_checkpoint_leaves_whole_in_any_words_is_costed_whole():
    narrow = {"quant_method": "gptq", "bits": 3, "group_size": 128}
    kept = {**narrow, "dynamic": {"-:.*self_attn.*": {}}}
    assert bits_of(kept) > bits_of(narrow)
    assert stored_wide(kept).part_dtypes == {"attention": "bf16"}

    extra = {f"model.layers.{n}.self_attn.o_proj": {"bits": 16} for n in range(6)}
    model = stored_wide({"quant_method": "auto-round", "bits": 4, "extra_config": extra})
    assert model.part_dtypes == {"attention": "bf16"}

    for name in ("llm_int8_skip_modules", "skip_modules", "ignored_layers", "exclude"):
        model = stored_wide({"quant_method": "fp8", name: ["self_attn"]})
        assert model.part_dtypes == {"attention": "bf16"}, name


def test_a_method_whose_format_is_not_known_is_refused_with_the_known_ones():
    for method in ("gguf", "magic", "", "w3a3"):
        with pytest.raises(NotCoveredError, match="bitsandbytes") as caught:
            stored_wide({"quant_method": method, "desc": 1})
        assert caught.value.field == "model.quantization_config.quant_method", method


def test_a_wrong_description_is_refused_by_the_name_of_its_field():
    cases = (
        ("fp8", ""),
        (8, ""),
        ([], ""),
        ({"quant_method": "gptq", "bits": "four"}, ".bits"),
        ({"quant_method": "gptq", "bits": 0}, ".bits"),
        ({"quant_method": "gptq", "bits": True}, ".bits"),
        ({"quant_method": "gptq", "group_size": "many"}, ".group_size"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": None}}, "groups"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "groups"),
        ({"quant_method": "fp8", "ignore": True}, ".ignore"),
        ({"quant_method": "fp8", "ignore": ["re:("]}, ".ignore"),
        ({"quant_method": "fp8", "ignore": [3]}, ".ignore"),
        ({"quant_method": "vptq"}, ".config_for_layers"),
        ({"quant_method": "aqlm", "in_group_size": 0}, ".in_group_size"),
    )
    for quantization, field in cases:
        with pytest.raises(BadConfigError) as caught:
            stored_wide(quantization)
        assert caught.value.field.startswith("model.quantization_config"), (quantization, field)
        assert caught.value.field.endswith(field), (quantization, field)


NEED_MORE = {"compressed-tensors", "fouroversix", "fp_quant", "modelopt", "quanto", "quark"} | {
    "torchao",
    "vptq",
}


def test_a_known_method_has_its_usual_format_or_is_refused_without_one():
    wrong = [
        method
        for method in sorted({*known_methods()} - NEED_MORE)
        if stored_wide({"quant_method": method}).weight_dtype is None
    ]
    assert not wrong, wrong

    for method in sorted(NEED_MORE):
        with pytest.raises(PlannerError) as caught:
            stored_wide({"quant_method": method})
        assert caught.value.field.startswith("model.quantization_config"), method


def test_a_packed_name_holds_its_bits_and_the_quality_of_its_table():
    bits = {"gptq": {"bits": 3}, "vptq": {"config_for_layers": {"a": {**_two_bits()}}}}
    for name, scheme in (("gptq", "GPTQ-3G"), ("aqlm", "AQLM-2"), ("vptq", "VPTQ-2")):
        found = ask(
            model={**BF16, "quantization_config": {"quant_method": name, **bits.get(name, {})}}
        )
        assert scheme in found.quality.evidence[0], (name, scheme)

    name = stored_wide({"quant_method": "gptq", "bits": 3, "group_size": 128}).quantization
    assert packed_format(name).linear_bits == pytest.approx(3 + 19 / 128, rel=1e-4)
    assert math.isclose(packed_format(name).head_bits, 16)


def _two_bits():
    return {"num_centroids": [-1, 65536], "vector_lens": [-1, 8]}


GIB = 1024**3


def asked(quantization, model=LLAMA_8B):
    return ask(
        model=model, device="rtx-4090", engine="llama_cpp", strategy={"quantization": quantization}
    )


def test_a_gguf_file_is_as_large_as_published_at_every_size():
    # llama.cpp tools/quantize/README.md, Llama-3.1-8B.
    for kind, published_gib in (
        ("q4_k_m", 4.58), ("q8_0", 7.95), ("q6_k", 6.14), ("q2_k", 2.95), ("iq4_xs", 4.17),
    ):  # fmt: skip
        assert held(asked(f"gguf:{kind}"), "weights") / GIB == pytest.approx(
            published_gib, rel=0.01
        )

    # Llama-3-70B Q4_K_M: 39.6 GiB, whose mix and vocabulary weigh otherwise than the 8B's.
    found = asked("gguf:q4_k_m", "meta-llama/Meta-Llama-3-70B")
    assert held(found, "weights") / GIB == pytest.approx(39.6, rel=0.01)


def test_a_file_stores_tied_embeddings_sixteen_bits_and_any_mean_of_bits():
    found = asked("gguf:q4_k_m", "meta-llama/Llama-3.2-1B")
    assert held(found, "weights") == pytest.approx(807e6, rel=0.03)

    names = [asked(f"gguf:{kind}").strategy.weight_dtype for kind in ("iq1_s", "q4_0", "q8_0")]
    assert names == ["ternary", "int4", "int8"]

    norms = 65 * 4096  # a file keeps them in 32 bits
    assert held(asked("gguf:f16"), "weights") == held(asked(None), "weights") + 2 * norms

    packed = packed_format("exl2:4.25")
    assert packed.linear_bytes_per_element == 4.25 / 8
    assert packed.head_bytes_per_element == 2


def test_a_packed_name_without_a_known_type_or_possible_bits_is_refused():
    with pytest.raises(UnknownNameError, match="q4_k_m") as caught:
        asked("gguf:q4_k_x")
    assert caught.value.field == "strategy.quantization"
    for bits in ("0.1", "64", "many"):
        with pytest.raises(UnknownNameError, match="give bits"):
            packed_format(f"exl2:{bits}")
    assert packed_format("awq") is None
    assert packed_format(None) is None


def test_embedding_and_head_keep_no_fewer_bits_than_the_layers_by_much():
    for kind in sorted(data_toml("packed.toml")["gguf"]):
        packed = packed_format(f"gguf:{kind}")
        assert packed.embedding_bits > 0.8 * packed.linear_bits, kind
        assert packed.head_bits >= packed.linear_bits, kind
