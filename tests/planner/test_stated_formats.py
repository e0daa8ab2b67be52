"""How checkpoints say in which format they are: by pattern, by module, by group of layers."""

import pytest

from planner.catalog.models import model_from_config
from planner.cost.parameters import count_parameters
from planner.cost.weights import weight_bytes_per_element
from planner.specs.model import ModelSpec
from tests.planner.asking import TINY, ask, held

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


@pytest.mark.parametrize("nothing", [None, {}])
def test_what_is_no_description_of_a_format_says_nothing(nothing):
    model = stored(nothing, torch_dtype="bfloat16")

    assert (model.weight_dtype, model.quantization) == ("bf16", None)


def test_the_algorithm_wins_over_the_tool_that_ran_it():
    model = stored({"quant_method": "modelopt", "quant_algo": "NVFP4"})

    assert (model.weight_dtype, model.quantization) == ("nvfp4", "nvfp4")


def test_the_name_of_a_tool_is_read_in_any_case():
    assert stored({"quant_method": "FP8"}).weight_dtype == "fp8"


@pytest.mark.parametrize("size", [-1, 0, None])
def test_one_scale_a_channel_is_no_group(size):
    model = stored({"quant_method": "gptq", "bits": 4, "group_size": size})

    assert model.group_size is None


def test_four_float_bits_in_a_packed_format_are_mxfp4_where_the_format_says_so():
    plain = stored(grouped(num_bits=4, type="float"))
    packed = stored({**grouped(num_bits=4, type="float"), "format": "mxfp4-pack-quantized"})

    assert (plain.weight_dtype, packed.weight_dtype) == ("nvfp4", "mxfp4")


def test_a_group_of_layers_gives_the_size_of_its_groups_of_weights():
    model = stored(grouped(num_bits=4, type="int", group_size=32))

    assert (model.weight_dtype, model.group_size) == ("int4", 32)


@pytest.mark.parametrize("name", ["ignore", "modules_to_not_convert", "exclude_modules"])
def test_every_tools_word_for_skipping_is_understood(name):
    quantization = {"quant_method": "fp8", name: ["re:.*self_attn.*"]}

    model = stored(quantization, torch_dtype="bfloat16")

    assert model.part_dtypes == {"attention": "bf16"}


def test_no_list_of_skipped_modules_skips_nothing():
    assert stored({"quant_method": "fp8", "ignore": None}).part_dtypes == {}


def test_half_of_the_layers_named_one_by_one_are_enough_to_count_as_all():
    three = [f"model.layers.{layer}.mlp.down_proj" for layer in range(3)]
    two = three[:2]

    found = [
        stored({"quant_method": "fp8", "ignore": named}, torch_dtype="float16").part_dtypes
        for named in (three, two)
    ]

    assert found == [{"feed_forward": "fp16"}, {}]


def test_a_skipped_part_of_an_unnamed_dtype_is_in_sixteen_bits():
    model = stored({"quant_method": "fp8", "ignore": ["*.self_attn.*"]})

    assert model.part_dtypes == {"attention": "bf16"}


def test_experts_in_four_bits_leave_the_rest_in_the_format_of_the_tool():
    config = {**SPARSE, "expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}}

    model = model_from_config(config)

    assert model.weight_dtype == "mxfp4"
    assert model.part_dtypes == {"attention": "fp8", "feed_forward": "fp8"}


def test_a_quantisation_of_the_experts_alone_is_that_of_the_bulk():
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "moe_quant_algo": "NVFP4"}

    model = model_from_config({**SPARSE, "quantization_config": quantization})

    assert model.weight_dtype == "nvfp4"


def test_a_module_of_an_unknown_algorithm_is_left_out_of_the_list():
    layers = {
        "model.layers.0.self_attn.o_proj": {"quant_algo": "MAGIC"},
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4"},
    }

    model = stored({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})

    assert (model.weight_dtype, model.part_dtypes) == ("nvfp4", {})


@pytest.mark.parametrize(
    ("quantization", "dtype", "group"),
    [
        ({"quant_method": "fp8"}, "fp8", None),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "int4", 32),
        ({"quant_method": "mxfp4"}, "mxfp4", None),
    ],
)
def test_a_pasted_checkpoint_is_costed_in_the_format_that_it_states(quantization, dtype, group):
    config = {**TINY, "torch_dtype": "bfloat16", "quantization_config": quantization}
    counts = count_parameters(model_from_config(config))

    found = ask(model=config, engine="vllm")

    # Layers in the stated format; embedding, head and norms in 16 bits.
    group_bits = 16 + 4 if dtype == "int4" else None  # a scale, and a zero point of the same width
    layers = counts.layer_linear * weight_bytes_per_element(dtype, group, group_bits=group_bits)
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
