"""Every tool's description of its format is read: bits, groups, what it leaves whole."""

import math

import pytest

from planner.catalog.gguf import packed_format
from planner.catalog.models import model_from_config
from planner.catalog.published_weights import known_methods
from planner.cost.parameters import count_parameters
from planner.cost.weights import weight_bytes_per_element as element
from planner.errors import BadConfigError, NotCoveredError, PlannerError
from tests.planner.asking import TINY, ask, held

BF16 = {**TINY, "torch_dtype": "bfloat16"}


def stored(quantization):
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


def test_a_model_quantised_for_mlx_says_so_beside_its_dimensions():
    model = model_from_config({**BF16, "quantization": {"bits": 4, "group_size": 64}})
    assert (model.weight_dtype, model.group_size, model.quantization) == ("int4", 64, "mlx")


def test_a_format_without_a_dtype_keeps_its_bits_when_the_model_is_served():
    found = ask(model={**BF16, "quantization_config": {"quant_method": "exl2", "bits": 3.5}})
    assert found.strategy.quantization == "exl2:3.5"


def test_the_request_may_ask_for_another_format_than_the_published_one():
    config = {**BF16, "quantization_config": {"quant_method": "exl2", "bits": 3.5}}
    found = ask(model=config, strategy={"weight_dtype": "bf16"}, engine="exllamav2")
    assert found.strategy.quantization is None
    assert held(found, "weights") > held(ask(model=config, engine="exllamav2"), "weights")


def test_parts_that_a_packed_checkpoint_leaves_whole_are_costed_whole():
    narrow = {"quant_method": "gptq", "bits": 3, "group_size": 128}
    kept = {**narrow, "dynamic": {"-:.*self_attn.*": {}}}
    assert bits_of(kept) > bits_of(narrow)
    assert stored(kept).part_dtypes == {"attention": "bf16"}


def test_modules_that_extra_settings_leave_in_sixteen_bits_are_wide():
    extra = {f"model.layers.{n}.self_attn.o_proj": {"bits": 16} for n in range(6)}
    model = stored({"quant_method": "auto-round", "bits": 4, "extra_config": extra})
    assert model.part_dtypes == {"attention": "bf16"}


def test_every_word_for_what_is_skipped_is_known():
    for name in ("llm_int8_skip_modules", "skip_modules", "ignored_layers", "exclude"):
        model = stored({"quant_method": "fp8", name: ["self_attn"]})
        assert model.part_dtypes == {"attention": "bf16"}, name


def test_a_method_whose_format_is_not_known_is_refused_with_the_known_ones():
    for method in ("gguf", "magic", "", "w3a3"):
        with pytest.raises(NotCoveredError, match="bitsandbytes") as caught:
            stored({"quant_method": method, "desc": 1})
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
            stored(quantization)
        assert caught.value.field.startswith("model.quantization_config"), (quantization, field)
        assert caught.value.field.endswith(field), (quantization, field)


NEED_MORE = {"compressed-tensors", "fouroversix", "fp_quant", "modelopt", "quanto", "quark"} | {
    "torchao",
    "vptq",
}


def test_a_known_method_with_nothing_else_has_its_usual_format():
    wrong = [
        method
        for method in sorted({*known_methods()} - NEED_MORE)
        if stored({"quant_method": method}).weight_dtype is None
    ]
    assert not wrong, wrong


def test_a_method_of_many_formats_is_refused_without_its_format():
    for method in sorted(NEED_MORE):
        with pytest.raises(PlannerError) as caught:
            stored({"quant_method": method})
        assert caught.value.field.startswith("model.quantization_config"), method


def test_the_quality_of_a_published_format_is_that_of_its_table():
    bits = {"gptq": {"bits": 3}, "vptq": {"config_for_layers": {"a": {**_two_bits()}}}}
    for name, scheme in (("gptq", "GPTQ-3G"), ("aqlm", "AQLM-2"), ("vptq", "VPTQ-2")):
        found = ask(
            model={**BF16, "quantization_config": {"quant_method": name, **bits.get(name, {})}}
        )
        assert scheme in found.quality.evidence[0], (name, scheme)


def _two_bits():
    return {"num_centroids": [-1, 65536], "vector_lens": [-1, 8]}


def test_a_packed_name_holds_the_bits_that_it_says():
    name = stored({"quant_method": "gptq", "bits": 3, "group_size": 128}).quantization
    assert packed_format(name).linear_bits == pytest.approx(3 + 19 / 128, rel=1e-4)
    assert math.isclose(packed_format(name).head_bits, 16)
