"""Layers of different kinds in one model: what each group projects, keeps and computes."""

import numpy as np
import pytest
from pydantic import ValidationError

from planner.cost.kv_cache import cache_bytes, layer_tokens, read_tokens
from planner.cost.parameters import count_parameters
from planner.cost.quantity import Ledger, Line, PerGroup
from planner.cost.roofline import chunked_pairs, layer_pairs, read_pairs
from planner.specs.model import (
    AttentionLayers,
    IndexLayers,
    LatentLayers,
    ModelSpec,
    NoMixingLayers,
    RecurrentLayers,
)

SHAPE = {
    "model_type": "demo",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
STATE = RecurrentLayers(
    count=3,
    num_heads=4,
    key_dim=8,
    value_dim=16,
    conv_channels=128,
    conv_kernel=4,
    linear_parameters=1000,
    small_parameters=10,
)


def model_of(*groups) -> ModelSpec:
    return ModelSpec(**SHAPE, attention_layers=groups)


def cached(model: ModelSpec, tokens: float, ranks: float = 1, element_bytes: float = 2.0):
    kept = layer_tokens(model, tokens, paged=False)
    return cache_bytes(model, kept, ranks, element_bytes, (Ledger(), Line("memory", "cache")))


def test_a_quantity_by_group_scales_and_adds_as_one_number_does():
    both = 3 * PerGroup((1.0, 2.0)) / 2 + PerGroup((0.5, 1.0))

    assert both.values == (2.0, 4.0)
    assert both.total == 6.0


def test_a_column_of_batches_scales_every_group():
    scaled = np.array([1.0, 2.0]) * PerGroup((1.0, 10.0))

    assert [list(value) for value in scaled.values] == [[1.0, 2.0], [10.0, 20.0]]


def test_a_latent_is_cached_once_for_all_heads_and_on_every_rank():
    model = model_of(LatentLayers(count=4, **LATENT))

    assert cached(model, 100.0) == (32 + 8) * 2 * 4 * 100
    assert cached(model, 100.0, ranks=8) == cached(model, 100.0)


def test_a_recurrent_state_does_not_grow_with_the_sequence():
    model = model_of(STATE, AttentionLayers(count=1))
    only_attention = cached(model_of(AttentionLayers(count=4)), 100.0) / 4

    short = cached(model, 100.0)
    grown = cached(model, 1100.0) - short

    assert grown == 10 * only_attention
    assert short - only_attention == 3 * (4 * 8 * 16 * 4 + 128 * 3 * 2)


def test_a_recurrent_state_is_split_over_tensor_ranks():
    model = model_of(STATE, NoMixingLayers(count=1))

    assert cached(model, 10.0, ranks=2) == cached(model, 10.0) / 2


def test_a_decode_step_reads_a_state_and_writes_it_back():
    model = model_of(STATE, NoMixingLayers(count=1))

    assert read_tokens(model, 5000.0).values == (2 * 3, 0)


def test_narrow_values_make_the_cache_smaller_than_wide_keys_suggest():
    model = model_of(AttentionLayers(count=4, head_dim=24, v_head_dim=16))

    assert cached(model, 10.0) == 4 * 10 * 2 * (24 + 16) * 2


def test_layers_that_reuse_a_cache_keep_nothing_but_read_it():
    model = model_of(AttentionLayers(count=3), AttentionLayers(count=1, reuses_cache=True))

    assert layer_tokens(model, 10.0, paged=False).values == (30, 0)
    assert read_tokens(model, 10.0).values == (30, 10)


def test_an_index_narrows_what_attention_reads_but_not_what_it_keeps():
    model = model_of(
        LatentLayers(count=4, top_k=50, **LATENT),
        IndexLayers(count=4, num_heads=2, head_dim=16),
    )

    assert read_tokens(model, 1000.0).values == (4 * 50, 4 * 1000)
    assert read_pairs(model, 1000.0).values == (4 * 50, 4 * 1000)
    assert layer_tokens(model, 1000.0, paged=False).values == (4000, 4000)


def test_an_index_key_takes_eight_bits_an_element_and_one_scale():
    index = IndexLayers(count=4, num_heads=2, head_dim=16)
    model = model_of(NoMixingLayers(count=4), index)

    assert cached(model, 10.0) == 4 * 10 * (16 + 4)


@pytest.mark.parametrize("sequence", [1, 7, 8, 9, 16, 30])
def test_chunked_pairs_equal_a_count_of_each_query(sequence):
    counted = sum(position % 8 + 1 for position in range(sequence))

    assert chunked_pairs(float(sequence), 8) == counted


def test_chunked_pairs_of_columns_equal_those_of_numbers():
    lengths = np.array([5.0, 20.0, 64.0])

    assert list(chunked_pairs(lengths, 16)) == [chunked_pairs(s, 16) for s in lengths.tolist()]


def test_recurrent_work_grows_with_tokens_and_attention_with_pairs():
    model = model_of(STATE, AttentionLayers(count=1))

    assert layer_pairs(model, 10.0).values == (30, 55)


def test_a_model_of_two_head_counts_counts_each_in_its_own_layers():
    plain = count_parameters(model_of(AttentionLayers(count=4))).total
    wider = AttentionLayers(count=1, num_key_value_heads=4)
    mixed = count_parameters(model_of(AttentionLayers(count=3), wider)).total

    assert mixed - plain == 2 * 64 * 2 * 16


def test_more_heads_than_their_keys_can_serve_are_refused_by_name():
    with pytest.raises(ValidationError, match="num_key_value_heads is 3"):
        ModelSpec(**{**SHAPE, "num_key_value_heads": 3})


def test_groups_that_do_not_add_up_to_the_layers_are_refused():
    with pytest.raises(ValidationError, match="count 5 layers, but num_hidden_layers is 4"):
        model_of(AttentionLayers(count=5))


def test_more_visited_experts_than_there_are_are_refused():
    with pytest.raises(ValidationError, match="num_experts_per_tok is 3"):
        ModelSpec(**SHAPE, num_experts=2, num_experts_per_tok=3)


def test_more_dense_layers_than_layers_are_refused():
    with pytest.raises(ValidationError, match="num_hidden_layers is 4, but 5"):
        ModelSpec(**SHAPE, num_experts=2, num_experts_per_tok=1, num_dense_layers=5)


def test_a_sliding_group_without_a_window_is_refused():
    with pytest.raises(ValidationError, match="sliding layers need a window"):
        AttentionLayers(kind="sliding", count=1)


def test_groups_are_read_from_json_by_their_kind():
    groups = [{"count": 1}, {"kind": "latent", "count": 2, **LATENT}, {"kind": "none", "count": 1}]
    model = ModelSpec.model_validate({**SHAPE, "attention_layers": groups})

    assert [type(group) for group in model.attention_layers] == [
        AttentionLayers,
        LatentLayers,
        NoMixingLayers,
    ]


def test_a_models_json_leads_back_to_the_same_model():
    model = model_of(STATE, AttentionLayers(kind="chunked", window=64, count=1))

    assert ModelSpec.model_validate_json(model.model_dump_json()) == model


def test_layers_that_only_mix_or_only_feed_forward_are_one_block_each():
    half = model_of(STATE, NoMixingLayers(count=1))
    whole = model_of(AttentionLayers(count=4))

    assert (half.num_blocks, whole.num_blocks) == (3 + 4, 4 + 4)
