"""Any pasted config.json of a covered family is read; what is missing is named."""

import json
from pathlib import Path

import pytest

from planner.catalog.models import model_from_config
from planner.errors import BadConfigError, NotCoveredError
from tests.planner.asking import TINY, ask

CONFIGS = Path("planner/catalog/data/configs")


def test_a_llama_config_is_read_by_its_own_names():
    model = model_from_config(TINY, "demo")

    assert (model.hidden_size, model.head_dim, model.num_key_value_heads) == (256, 32, 4)
    assert model.id == "demo"


def test_heads_without_grouping_each_have_their_own_keys():
    config = {name: value for name, value in TINY.items() if name != "num_key_value_heads"}

    assert model_from_config(config).num_key_value_heads == 8


@pytest.mark.parametrize(
    "name", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
def test_a_missing_field_is_named(name):
    config = {key: value for key, value in TINY.items() if key != name}

    with pytest.raises(BadConfigError, match=name) as caught:
        model_from_config(config)

    assert caught.value.field == f"model.{name}"


def test_a_missing_field_is_named_in_the_familys_own_spelling():
    with pytest.raises(BadConfigError, match="n_embd"):
        model_from_config({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "vocab_size": 9})


def test_a_config_without_model_type_says_what_to_give():
    with pytest.raises(BadConfigError, match="no model_type"):
        model_from_config({"hidden_size": 5})


def test_an_unknown_family_names_the_nearest_known_ones():
    with pytest.raises(BadConfigError, match=r"nearest of the .* are: llama4_text"):
        model_from_config({**TINY, "model_type": "llama9_text"})


def test_an_unknown_family_that_spells_a_plain_decoder_out_is_read_as_one():
    config = {**TINY, "model_type": "brand_new", "hidden_act": "silu"}
    model = model_from_config(config)

    assert model.intermediate_size == TINY["intermediate_size"]
    assert "brand_new is not known: it is read as a dense decoder" in model.note


def test_an_estimate_warns_of_a_family_that_had_to_be_guessed():
    config = {**TINY, "model_type": "brand_new", "hidden_act": "silu"}

    assert any("brand_new" in warning for warning in ask(model=config).warnings)


@pytest.mark.parametrize("name", ["num_experts", "kv_lora_rank", "ssm_state_size"])
def test_an_unknown_family_with_more_than_a_plain_decoder_is_refused(name):
    config = {**TINY, "model_type": "brand_new", "hidden_act": "silu", name: 8}

    with pytest.raises(BadConfigError, match="'brand_new' is not known"):
        model_from_config(config)


def test_heads_that_no_key_value_head_count_divides_are_refused_by_name():
    with pytest.raises(BadConfigError, match="num_key_value_heads is 3"):
        model_from_config({**TINY, "num_key_value_heads": 3})


def test_a_list_of_layer_kinds_that_is_too_short_is_refused():
    config = {**TINY, "layer_types": ["full_attention"] * 5, "sliding_window": 8}

    with pytest.raises(BadConfigError, match="layer_types has 5 entries, but the model has 6"):
        model_from_config(config)


def test_an_unknown_kind_of_layer_is_refused_by_name():
    config = {**TINY, "layer_types": ["telepathy"] * 6}

    with pytest.raises(BadConfigError, match="layer_types names telepathy"):
        model_from_config(config)


def test_recurrent_layers_of_a_family_without_any_are_refused():
    config = {**TINY, "layer_types": ["linear_attention"] * 6}

    with pytest.raises(BadConfigError, match="recurrent layers"):
        model_from_config(config)


def test_entries_past_the_last_layer_describe_predictors_and_are_left_out():
    config = {**TINY, "sliding_window": 8}
    config["layer_types"] = ["full_attention"] * 6 + ["sliding_attention"] * 2

    assert model_from_config(config).attention_layers == ()


def test_gemma_3_slides_in_five_of_six_layers():
    config = {**TINY, "model_type": "gemma3_text", "sliding_window": 64}

    groups = model_from_config(config).attention_layers

    assert [(group.kind, group.count) for group in groups] == [("sliding", 5), ("full", 1)]


def test_what_gemma_3_configs_leave_out_is_filled_in_as_its_own_code_does():
    config = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    model = model_from_config({**config, "num_hidden_layers": 34, "sliding_window": 1024})

    assert (model.num_attention_heads, model.head_dim, model.vocab_size) == (8, 256, 262208)


def test_a_family_without_formulas_is_refused_by_what_it_lacks():
    with pytest.raises(NotCoveredError, match="recurrence without attention"):
        model_from_config({**TINY, "model_type": "rwkv"})


@pytest.mark.parametrize("wrong", [-1, "many", 2.5, True])
def test_a_size_that_is_no_whole_number_is_refused(wrong):
    with pytest.raises(BadConfigError, match="hidden_size is"):
        model_from_config({**TINY, "hidden_size": wrong})


def test_zero_layers_are_refused_with_the_field():
    with pytest.raises(BadConfigError) as caught:
        model_from_config({**TINY, "num_hidden_layers": 0})

    assert caught.value.field == "model.num_hidden_layers"


def test_a_multimodal_config_is_read_through_its_text_part():
    outer = {"model_type": "qwen3_vl", "text_config": {**TINY, "model_type": "qwen3_vl_text"}}

    assert model_from_config(outer).model_type == "qwen3_vl_text"


def test_a_sliding_window_that_is_off_is_no_window():
    config = {**TINY, "model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}

    assert model_from_config(config).attention_layers == ()


def test_every_second_layer_of_gemma2_slides():
    config = {**TINY, "model_type": "gemma2", "sliding_window": 64}

    groups = model_from_config(config).attention_layers

    assert [(g.kind, g.count, g.window) for g in groups] == [("sliding", 3, 64), ("full", 3, None)]


def test_the_checkpoints_quantisation_becomes_the_default_weight_format():
    quantised = {**TINY, "quantization_config": {"quant_method": "fp8"}}

    assert model_from_config(quantised).weight_dtype == "fp8"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_config_loads(path):
    assert model_from_config(json.loads(path.read_text())).vocab_size > 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "nemotron-nas", "block_configs": []}, "model.block_configs"),
        ({"model_type": "deepseek_v4", "compress_ratios": []}, "model.compress_ratios"),
    ],
)
def test_a_family_with_layers_of_its_own_names_what_it_needs(fields, named):
    with pytest.raises(BadConfigError) as caught:
        model_from_config({**TINY, **fields})

    assert caught.value.field == named


def test_a_size_that_every_layer_repeats_is_read_as_one():
    config = {**TINY, "model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": [2] * 6}

    assert model_from_config(config).num_experts_per_tok == 2


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 2}}, 65536),
        ({"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"max_position_embeddings": 4096, "sliding_window": 2047}, 4096),
        # Llama 3.1
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
        # Phi-3 128k
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]},
            },
            131072,
        ),
        # gpt-oss, DeepSeek-V3
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "original_max_position_embeddings": 4096,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "original_max_position_embeddings": 4096,
                },
            },
            163840,
        ),
        # deepseek-coder, InternLM 2, Qwen2-VL
        (
            {
                "max_position_embeddings": 16384,
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            65536,
        ),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "dynamic", "factor": 2.0},
            },
            65536,
        ),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            },
            32768,
        ),
        # The per-layer form of transformers 5, and Gemma 3, whose length is the extended one.
        (
            {
                "max_position_embeddings": 32768,
                "rope_parameters": {
                    "full_attention": {**YARN, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            131072,
        ),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            131072,
        ),
        # Command-R; Qwen
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
        ({"max_position_embeddings": 32768, "seq_length": 8192}, 8192),
    ],
)
def test_the_context_is_what_engines_derive_from_the_config(fields, tokens):
    assert model_from_config({**TINY, **fields}).max_position_embeddings == tokens


def test_a_table_of_learned_positions_keeps_its_own_size():
    config = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 320, "max_position_embeddings": 128}
    model = model_from_config({**config, "rope_scaling": {"type": "linear", "factor": 2.0}})

    assert (model.learned_positions, model.max_position_embeddings) == (130, 256)


@pytest.mark.parametrize("wrong", ["yarn", [1], {"type": "linear", "factor": "4"}])
def test_a_rotary_scaling_of_another_type_is_refused_by_name(wrong):
    with pytest.raises(BadConfigError) as caught:
        model_from_config({**TINY, "rope_scaling": wrong})

    assert caught.value.field.startswith("model.rope_scaling")
