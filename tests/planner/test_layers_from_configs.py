"""Small configs of unusual families, each layer of which can be counted on paper."""

import pytest

from planner.catalog.models import model_from_config
from planner.cost.parameters import count_parameters
from planner.errors import BadConfigError
from tests.planner.asking import TINY
from tests.planner.family_configs import PUBLISHED

SLIDE, FULL = "sliding_attention", "full_attention"
GEMMA_4 = {
    **TINY,
    "model_type": "gemma4_text",
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 100,
    "layer_types": [SLIDE, SLIDE, FULL, SLIDE, SLIDE, FULL],
}
LLAMA_4 = {
    **TINY,
    "model_type": "llama4_text",
    "num_hidden_layers": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 512,
}
ERNIE = {
    **TINY,
    "model_type": "ernie4_5_moe",
    "num_hidden_layers": 10,
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_intermediate_size": 64,
}
MINIMAX_3 = {
    **TINY,
    "model_type": "minimax_m3",
    "dense_intermediate_size": 512,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 0, 1, 1, 1, 1],
        "sparse_index_dim": 16,
        "sparse_num_index_heads": 2,
        "sparse_topk_blocks": 4,
        "sparse_block_size": 32,
    },
}
SEARCHED = {
    **{name: value for name, value in TINY.items() if name != "intermediate_size"},
    "model_type": "nemotron-nas",
    "num_hidden_layers": 3,
    "block_configs": [
        {
            "attention": {"no_op": False, "n_heads_in_group": 2},
            "ffn": {"no_op": False, "ffn_mult": 3.0},
        },
        {"attention": {"no_op": True}, "ffn": {"no_op": False, "ffn_mult": 1.5}},
        {"attention": {"no_op": False, "n_heads_in_group": 8}, "ffn": {"no_op": True}},
    ],
}
MIMO = {
    **TINY,
    "model_type": "mimo_v2_flash",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "moe_layer_freq": [0, 1, 1, 1, 1, 1],
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
    "sliding_window_size": 64,
    "head_dim": 24,
    "v_head_dim": 16,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 2,
}
FALCON = {
    "model_type": "falcon",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 100,
}


def shape(config: dict) -> list[tuple[str, int]]:
    return [(group.kind, group.count) for group in model_from_config(config).layers_by_attention]


def test_full_layers_of_gemma_4_are_wider_than_its_windows():
    model = model_from_config(GEMMA_4)

    widths = {group.kind: (group.count, group.key_dim) for group in model.layers_by_attention}

    assert widths == {"sliding": (4, 32), "full": (2, 64)}


def test_the_last_layers_of_a_small_gemma_4_reuse_what_earlier_ones_cached():
    model = model_from_config({**GEMMA_4, "num_kv_shared_layers": 3})

    found = [(g.kind, g.count, g.reuses_cache) for g in model.layers_by_attention]

    assert found == [
        ("sliding", 2, False),
        ("full", 1, False),
        ("sliding", 2, True),
        ("full", 1, True),
    ]


def test_values_that_are_keys_take_the_head_count_of_the_full_layers():
    config = {**GEMMA_4, "attention_k_eq_v": True, "num_global_key_value_heads": 2}

    full = next(g for g in model_from_config(config).layers_by_attention if g.kind == "full")

    assert full.value_is_key
    assert full.kv_heads == 2


@pytest.mark.parametrize(
    ("fields", "moe_layers"),
    [
        ({"interleave_moe_layer_step": 1}, 8),
        ({"interleave_moe_layer_step": 2}, 4),
        ({"moe_layers": [1, 3]}, 2),
        ({"moe_layers": [0, 7, 99]}, 2),
    ],
)
def test_llama_4_has_experts_in_every_so_manyth_layer_or_where_it_is_told(fields, moe_layers):
    model = model_from_config({**LLAMA_4, **fields})

    assert model.num_moe_layers == moe_layers
    assert model.num_dense_layers == 8 - moe_layers


def test_the_dense_and_the_sparse_layers_of_llama_4_have_widths_of_their_own():
    model = model_from_config(LLAMA_4)

    assert (model.intermediate_size, model.moe_intermediate_size) == (512, 768)
    assert model.shared_intermediate_size == 768


def test_llama_4_without_chunks_sees_everything_in_every_layer():
    assert shape(LLAMA_4) == [("full", 8)]
    assert shape({**LLAMA_4, "attention_chunk_size": 64}) == [("chunked", 6), ("full", 2)]


@pytest.mark.parametrize(
    ("fields", "moe_layers"),
    [
        ({"moe_layer_start_index": 0}, 10),
        ({"moe_layer_start_index": 3}, 7),
        ({"moe_layer_start_index": 3, "moe_layer_end_index": 5}, 3),
        ({"moe_layer_start_index": 3, "moe_layer_end_index": -1}, 7),
        ({"moe_layer_start_index": 0, "moe_layer_interval": 2}, 5),
    ],
)
def test_ernie_has_experts_from_a_first_to_a_last_layer(fields, moe_layers):
    assert model_from_config({**ERNIE, **fields}).num_moe_layers == moe_layers


def test_minimax_3_indexes_the_layers_that_its_nested_part_marks():
    model = model_from_config(MINIMAX_3)

    full, indexed, index = model.layers_by_attention

    assert (full.count, indexed.count, index.count) == (2, 4, 4)
    assert (full.top_k, indexed.top_k) == (None, 4 * 32)
    # Two index heads and one index key of 16, from 256 channels.
    assert index.linear_parameters == 256 * 16 * 2 + 256 * 16


def test_a_searched_architecture_is_counted_block_by_block():
    model = model_from_config(SEARCHED)
    counts = count_parameters(model)

    # Widths: 2/3 of 3 x 256 is 512; 2/3 of 1.5 x 256 is 256; the third layer has none.
    attention = 2 * 2 * 256 * 256 + 2 * 256 * 32 * (4 + 1)
    blocks = 3 * 256 * (512 + 256)
    norms = (1 + 1 + 0 + 1 + 1 + 0 + 1) * 256
    vocabulary = 2 * 4096 * 256
    assert counts.total == attention + blocks + norms + vocabulary
    assert shape(SEARCHED) == [("full", 1), ("none", 1), ("full", 1)]


def test_a_searched_architecture_without_any_attention_is_refused():
    blocks = [SEARCHED["block_configs"][1]] * 3

    with pytest.raises(BadConfigError, match="no layer with attention") as caught:
        model_from_config({**SEARCHED, "block_configs": blocks})

    assert caught.value.field == "model.block_configs"


def test_mimo_has_narrower_values_and_its_own_heads_in_its_windows():
    model = model_from_config(MIMO)

    full, sliding = model.layers_by_attention

    assert (full.count, full.kv_heads, full.key_dim, full.value_dim) == (2, 4, 24, 16)
    assert (sliding.count, sliding.kv_heads, sliding.window) == (4, 2, 64)
    assert (full.sinks, sliding.sinks) == (False, True)
    assert model.num_dense_layers == 1


@pytest.mark.parametrize(
    ("fields", "kv_heads", "norms"),
    [
        ({}, 1, 1),
        ({"multi_query": False}, 8, 1),
        ({"parallel_attn": False}, 1, 2),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2, 2),
    ],
)
def test_falcon_shares_one_key_value_head_unless_its_switches_say_otherwise(
    fields, kv_heads, norms
):
    model = model_from_config({**FALCON, **fields})

    assert (model.num_key_value_heads, model.norms_per_layer) == (kv_heads, norms)
    assert model.intermediate_size == 4 * 64


def test_mpt_may_be_wider_inside_than_four_times():
    config = {"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 100}

    plain, wide = model_from_config(config), model_from_config({**config, "expansion_ratio": 5})

    assert (plain.intermediate_size, wide.intermediate_size) == (256, 320)


def test_one_width_of_qwen_1_is_gate_and_up_together():
    model = model_from_config({**TINY, "model_type": "qwen", "intermediate_size": 1536})

    assert model.intermediate_size == 768
    assert model.attention_bias
    assert not model.attention_output_bias


def test_bloom_ignores_a_width_that_its_code_never_reads():
    config = {**TINY, "model_type": "bloom", "intermediate_size": 1}

    assert model_from_config(config).intermediate_size == 4 * 256


def test_a_parallel_stablelm_has_one_norm_a_layer():
    config = {**TINY, "model_type": "stablelm"}

    parallel = model_from_config({**config, "use_parallel_residual": True})

    assert model_from_config(config).norms_per_layer == 2
    assert parallel.norms_per_layer == 1


def test_opt_learns_two_more_positions_than_its_context():
    model = model_from_config({**TINY, "model_type": "opt", "ffn_dim": 1024})

    assert model.learned_positions == 4096 + 2
    assert model.tie_word_embeddings


@pytest.mark.parametrize(("family", "norms"), [("olmo", 0), ("olmo2", 2), ("gemma2", 4)])
def test_norms_count_by_the_family(family, norms):
    model = model_from_config({**TINY, "model_type": family, "sliding_window": None})

    assert model.norms_per_layer == norms
    # Without learnt norms the last one has no weights either.
    plain = count_parameters(model).small - (6 * norms + (norms > 0)) * 256
    assert plain == (6 * (256 + 128) if family == "olmo2" else 0)


def test_llama_has_biases_on_all_four_projections_where_its_switch_is_on():
    off, on = model_from_config(TINY), model_from_config({**TINY, "attention_bias": True})

    more = count_parameters(on).total - count_parameters(off).total

    assert more == 6 * (256 + 128 + 128 + 256)


def test_a_block_bias_is_as_long_as_what_it_is_added_to():
    off, on = model_from_config(TINY), model_from_config({**TINY, "mlp_bias": True})

    more = count_parameters(on).total - count_parameters(off).total

    assert more == 6 * (768 + 768 + 256)


def test_qwen_2_moe_weighs_its_shared_expert_by_one_gate():
    config = {
        **TINY,
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
    }
    shared, alone = (
        model_from_config(config),
        model_from_config({**config, "shared_expert_intermediate_size": 0}),
    )

    more = count_parameters(shared).total - count_parameters(alone).total

    assert more == 6 * (3 * 256 * 128 + 256)
    assert (shared.num_shared_experts, alone.num_shared_experts) == (1, 0)


def test_lfm2_caches_in_its_attention_layers_and_keeps_the_last_inputs_in_the_others():
    model = model_from_config(PUBLISHED["LiquidAI/LFM2-1.2B"]["config"])
    convolution, attention = model.layers_by_attention

    assert (attention.count, attention.kv_heads, attention.key_dim) == (6, 8, 64)
    assert (convolution.count, convolution.state_elements) == (10, 0)
    assert convolution.conv_elements == 2048 * 2
    assert model.intermediate_size == 8192


def test_a_layer_of_longcat_is_two_layers_of_which_one_has_experts():
    model = model_from_config(PUBLISHED["meituan-longcat/LongCat-Flash-Chat"]["config"])

    assert (model.num_hidden_layers, model.num_dense_layers, model.num_moe_layers) == (56, 28, 28)
    # Of 12 experts that a token selects of 768, 8 are among the 512 with weights.
    assert (model.num_experts, model.num_experts_per_tok) == (512, 8)


def test_a_hybrid_of_granite_without_experts_has_its_shared_block_alone():
    fields = {"num_local_experts": 0, "layer_types": ["attention"] * 6}
    config = {**TINY, "model_type": "granitemoehybrid", "shared_intermediate_size": 96, **fields}

    assert model_from_config(config).intermediate_size == 96


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "openelm"}, "model.num_query_heads"),
        (
            {
                "model_type": "step3_text",
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "moe_layers_enum": "4,five",
            },
            "model.moe_layers_enum",
        ),
        ({"model_type": "lfm2", "block_multiple_of": 0}, "model.block_multiple_of"),
    ],
)
def test_a_derived_shape_names_the_field_that_it_cannot_read(fields, named):
    with pytest.raises(BadConfigError) as caught:
        model_from_config({**TINY, **fields})

    assert caught.value.field == named
