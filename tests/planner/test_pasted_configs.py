"""Configs as people paste them: odd spellings, missing fields, numbers as text, wrong lists."""

import pytest

from planner.catalog.models import model_from_config
from planner.errors import BadConfigError
from tests.planner.asking import TINY

SPARSE = {
    **TINY,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
LATENT = {
    **TINY,
    "model_type": "deepseek_v2",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
HYBRID = {
    **TINY,
    "model_type": "nemotron_h",
    "conv_kernel": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 2,
}


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


def refused(config: dict) -> BadConfigError:
    with pytest.raises(BadConfigError) as caught:
        model_from_config(config)
    return caught.value


def test_a_number_written_as_text_is_refused_with_what_it_must_be():
    error = refused({**TINY, "num_hidden_layers": "32"})

    assert error.field == "model.num_hidden_layers"
    assert "num_hidden_layers is '32'" in error.message
    assert "a whole number of at least 0" in error.message


def test_a_null_size_counts_as_missing():
    error = refused({**TINY, "vocab_size": None})

    assert error.message == "config.json of model_type llama lacks vocab_size"


def test_all_missing_sizes_are_named_at_once():
    error = refused(without(TINY, "hidden_size", "vocab_size"))

    assert "lacks hidden_size, vocab_size" in error.message
    assert error.field == "model.hidden_size"


def test_a_missing_width_of_the_feed_forward_block_is_named():
    error = refused(without(TINY, "intermediate_size"))

    assert error.field == "model.intermediate_size"


def test_gpt2_is_four_times_as_wide_inside_where_its_config_says_nothing():
    config = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "vocab_size": 50257,
    }

    model = model_from_config({**config, "n_positions": 1024, "n_inner": None})

    assert model.intermediate_size == 3072
    assert model.learned_positions == 1024
    assert model.tie_word_embeddings


def test_a_context_that_is_not_told_is_taken_as_2048():
    model = model_from_config(without(TINY, "max_position_embeddings"))

    assert model.max_position_embeddings == 2048


@pytest.mark.parametrize("name", ["num_key_value_heads", "head_dim", "max_position_embeddings"])
def test_a_zero_where_one_is_the_least_is_refused_by_name(name):
    error = refused({**TINY, name: 0})

    assert error.field == f"model.{name}"
    assert f"{name} is 0" in error.message


def test_more_heads_than_channels_leave_no_width_for_a_head():
    error = refused({**TINY, "hidden_size": 4})

    assert error.field == "model.num_attention_heads"
    assert "at most hidden_size, 4" in error.message


def test_a_list_of_sizes_that_differ_by_layer_is_no_size():
    error = refused({**TINY, "num_key_value_heads": [4, 4, 2, 4, 4, 4]})

    assert "num_key_value_heads is [4, 4, 2, 4, 4, 4]" in error.message


def test_the_new_spelling_of_the_dtype_is_read_like_the_old():
    old = model_from_config({**TINY, "torch_dtype": "float16"})

    new = model_from_config({**TINY, "dtype": "float16"})

    assert old.weight_dtype == new.weight_dtype == "fp16"


def test_a_dtype_that_no_plan_knows_is_left_open():
    assert model_from_config({**TINY, "torch_dtype": "float8_e5m2"}).weight_dtype is None


def test_the_text_part_wins_over_what_surrounds_it():
    outer = {"model_type": "llava", "hidden_size": 9, "text_config": {**TINY, "vocab_size": 777}}

    model = model_from_config(outer)

    assert (model.model_type, model.hidden_size, model.vocab_size) == ("llama", 256, 777)


def test_a_quantisation_beside_the_text_part_is_that_of_the_text():
    outer = {"text_config": TINY, "quantization_config": {"quant_method": "fp8"}}

    assert model_from_config(outer).weight_dtype == "fp8"


def test_unknown_fields_change_nothing():
    plain = model_from_config(TINY)

    marked = model_from_config({**TINY, "_name_or_path": "x", "rope_scaling": {"factor": 8.0}})

    assert marked == plain


def test_a_negative_window_is_refused():
    error = refused({**TINY, "model_type": "mistral", "sliding_window": -5})

    assert error.field == "model.sliding_window"
    assert "window is -5" in error.message


def test_a_null_window_is_full_attention():
    model = model_from_config({**TINY, "model_type": "mistral", "sliding_window": None})

    assert model.attention_layers == ()


def test_every_second_layer_may_be_sparse_and_some_may_be_kept_dense():
    config = {**SPARSE, "decoder_sparse_step": 2, "mlp_only_layers": [1]}

    model = model_from_config(config)

    # Layers 1, 3 and 5 are due; layer 1 is excepted.
    assert model.num_moe_layers == 2
    assert model.num_dense_layers == 4


@pytest.mark.parametrize(("first", "dense"), [(0, 0), (1, 1), (6, 6), (99, 6)])
def test_the_first_layers_are_dense_and_never_more_than_there_are(first, dense):
    model = model_from_config({**LATENT, "first_k_dense_replace": first})

    assert (model.num_dense_layers, model.num_moe_layers) == (dense, 6 - dense)


def test_sparse_layers_named_one_by_one_are_counted():
    kinds = ["dense", "sparse", "sparse", "dense", "sparse", "sparse"]

    model = model_from_config({**SPARSE, "mlp_layer_types": kinds})

    assert model.num_moe_layers == 4


def test_a_sparse_family_says_that_the_experts_of_a_token_are_missing():
    error = refused(without(SPARSE, "num_experts_per_tok"))

    assert error.field == "model.num_experts_per_tok"


def test_experts_as_wide_as_the_block_need_no_width_of_their_own():
    mixtral = {**without(SPARSE, "moe_intermediate_size"), "model_type": "mixtral"}

    model = model_from_config(mixtral)

    assert model.moe_intermediate_size == TINY["intermediate_size"]


def test_latent_attention_names_the_width_that_it_lacks():
    error = refused(without(LATENT, "v_head_dim"))

    assert error.field == "model.v_head_dim"


def test_a_latent_query_is_as_wide_as_both_its_parts():
    model = model_from_config(LATENT)

    (group,) = model.layers_by_attention

    assert model.head_dim == group.key_dim == 16 + 8
    assert (group.latent_dim, group.q_lora_rank) == (32 + 8, None)


def test_one_letter_a_layer_says_what_each_layer_does():
    model = model_from_config({**HYBRID, "hybrid_override_pattern": "MM*-M-"})

    kinds = {group.kind: group.count for group in model.layers_by_attention}

    assert kinds == {"recurrent": 3, "full": 1, "none": 2}
    assert model.num_layers_without_feed_forward == 4
    assert model.num_feed_forward_layers == 2


def test_a_pattern_gives_the_number_of_layers_that_the_config_leaves_out():
    blocks = ["mamba", "attention", "mlp", "mamba"]

    model = model_from_config(
        {**without(HYBRID, "num_hidden_layers"), "layers_block_type": blocks}
    )

    assert model.num_hidden_layers == 4


@pytest.mark.parametrize(("step", "full"), [(1, 6), (2, 3), (4, 1), (6, 1), (100, 0)])
def test_a_pattern_of_windows_leaves_every_so_manyth_layer_full(step, full):
    config = {**TINY, "model_type": "gemma3_text", "sliding_window": 64}

    model = model_from_config({**config, "sliding_window_pattern": step})

    counted = sum(g.count for g in model.layers_by_attention if g.kind == "full")
    assert counted == full
