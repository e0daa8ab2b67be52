"""One field of a config behind all its names, and weights by what they are cut along."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.config_reader import SPELLINGS, ConfigReader
from planner.cost.quantity import PerGroup
from planner.cost.weights import linear_bytes, linear_parameters_per_rank, weight_bytes
from planner.errors import BadConfigError

AMOUNTS = st.integers(0, 10**12)


def reader(**fields) -> ConfigReader:
    return ConfigReader({"model_type": "demo", "num_hidden_layers": 3, **fields})


@pytest.mark.parametrize("name", sorted(SPELLINGS))
def test_every_spelling_of_a_field_is_found_by_its_common_name(name):
    found = [ConfigReader({"model_type": "demo", other: 7}) for other in SPELLINGS[name]]

    assert [config.get(name) for config in found] == [7] * len(found)


def test_a_familys_own_spelling_wins_over_the_common_one():
    found = reader(ffn_dim=512, intermediate_size=256)
    found.names = {"intermediate_size": "ffn_dim"}

    assert found.integer("intermediate_size") == 512
    assert found.spelling("intermediate_size") == "ffn_dim"
    assert found.spelling("vocab_size") == "vocab_size"


def test_a_missing_number_is_asked_for_in_the_familys_own_spelling():
    found = reader()
    found.names = {"intermediate_size": "ffn_dim"}

    with pytest.raises(BadConfigError, match="model_type demo lacks ffn_dim") as caught:
        found.integer("intermediate_size")

    assert caught.value.field == "model.ffn_dim"


@pytest.mark.parametrize("nothing", [None, 0, "", [], {}, False])
def test_a_field_without_a_value_is_not_there(nothing):
    assert not reader(sliding_window=nothing).has("sliding_window")


@pytest.mark.parametrize("wrong", ["7", 7.0, -7, True, {"a": 7}])
def test_a_number_is_a_whole_number_and_nothing_that_looks_like_one(wrong):
    with pytest.raises(BadConfigError) as caught:
        reader(vocab_size=wrong).integer("vocab_size")

    assert f"vocab_size is {wrong!r}" in caught.value.message


def test_a_null_takes_the_default_and_a_zero_stays_zero():
    assert reader(head_dim=None).integer("head_dim", 64) == 64
    assert reader(head_dim=0).integer("head_dim", 64) == 0


def test_a_list_of_one_number_for_every_layer_is_that_number():
    assert reader(moe_topk=[8, 8, 8]).integer("num_experts_per_tok") == 8


@pytest.mark.parametrize("default", [True, False])
def test_a_switch_that_is_not_told_takes_the_familys_default(default):
    assert reader().flag("attention_bias", default=default) is default
    assert reader(attention_bias=None).flag("attention_bias", default=default) is default
    assert (
        reader(attention_bias=not default).flag("attention_bias", default=default) is not default
    )


@pytest.mark.parametrize(
    ("given_", "read"), [(None, ()), ([], ()), ("full", ()), ([1, 2, 3, 4], (1, 2, 3))]
)
def test_a_list_has_one_entry_for_each_layer_or_none(given_, read):
    assert reader(layer_types=given_).listed("layer_types") == read


def test_a_list_that_is_too_short_is_refused_with_both_lengths():
    with pytest.raises(
        BadConfigError, match="has 2 entries, but the model has 3 layers"
    ) as caught:
        reader(layer_types=["a", "b"]).listed("layer_types")

    assert caught.value.field == "model.layer_types"


@given(split=AMOUNTS, key_value=AMOUNTS, experts=AMOUNTS, whole=AMOUNTS)
def test_one_rank_alone_holds_everything(split, key_value, experts, whole):
    found = linear_parameters_per_rank(
        split=split,
        key_value=key_value,
        experts=experts,
        tensor_parallel_size=1,
        kv_share=1,
        expert_ranks=1,
        replicated=whole,
    )

    assert found == pytest.approx(split + key_value + experts + whole)


def test_a_rank_cuts_each_kind_of_weight_along_its_own_axis():
    found = linear_parameters_per_rank(
        split=800,
        key_value=160,
        experts=6400,
        tensor_parallel_size=8,
        kv_share=0.25,
        expert_ranks=16,
        replicated=7,
    )

    assert found == 100 + 40 + 400 + 7


def test_norms_are_whole_on_each_rank_and_the_vocabulary_is_not():
    found = weight_bytes(
        linear=1000,
        small=10,
        vocabulary=400,
        tensor_parallel_size=4,
        weight_bytes_per_element=0.5,
        plain_bytes_per_element=2,
        vocabulary_bytes_per_element=1.5,
    )

    assert found == 500 + 20 + 150
    assert linear_bytes(linear=1000, weight_bytes_per_element=0.5) == 500


@given(values=st.lists(st.integers(-1000, 1000), min_size=1, max_size=6), factor=st.integers(1, 9))
def test_scaling_the_groups_scales_their_sum(values, factor):
    group = PerGroup(tuple(values))

    assert (group * factor).total == (factor * group).total == factor * sum(values)
    assert (group * factor / factor).total == pytest.approx(sum(values))
    assert (group + group).values == (group * 2).values


def test_groups_of_different_models_cannot_be_added():
    with pytest.raises(ValueError, match="zip"):
        PerGroup((1.0, 2.0)) + PerGroup((1.0,))


def test_a_column_on_the_left_scales_each_group_as_a_column():
    found = np.array([1.0, 2.0]) * PerGroup((3.0, 5.0))

    assert [list(value) for value in found.values] == [[3.0, 6.0], [5.0, 10.0]]
    assert list(found.total) == [8.0, 16.0]
