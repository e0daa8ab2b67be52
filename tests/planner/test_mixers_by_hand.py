"""Parameters of single layers against lists of their matrices, as their papers draw them."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.models import get_model, model_from_config
from planner.cost.parameters import (
    MixerCounts,
    count_mixer,
    count_parameters,
    feed_forward_parameters,
)
from planner.cost.roofline import dispatch_share, expert_visits, experts_read
from planner.specs.model import AttentionLayers, LatentLayers, ModelSpec, NoMixingLayers
from tests.planner.asking import TINY

SHAPE = {
    "model_type": "demo",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
HYBRID = {
    **TINY,
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
STATE_SPACE = {
    **TINY,
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MMMM*-",
    "conv_kernel": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 2,
}


def of(group, **fields) -> MixerCounts:
    """Return the counts of one layer, its group filled in as the model does."""
    model = ModelSpec(**{**SHAPE, **fields}, attention_layers=(group,))
    return count_mixer(model, model.layers_by_attention[0])


def elements(*shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def test_a_grouped_query_layer_is_four_matrices():
    found = of(AttentionLayers(count=2))

    assert found.split == elements((64, 8 * 16), (8 * 16, 64))
    assert found.key_value == elements((64, 2 * 16), (64, 2 * 16))
    assert (found.replicated, found.small) == (0, 0)


def test_narrow_values_narrow_the_output_and_not_the_query():
    found = of(AttentionLayers(count=2, v_head_dim=4))

    assert found.split == elements((64, 8 * 16), (8 * 4, 64))
    assert found.key_value == elements((64, 2 * 16), (64, 2 * 4))


def test_a_layer_whose_values_are_its_keys_has_one_projection_less():
    found = of(AttentionLayers(count=2, value_is_key=True))

    assert found.key_value == elements((64, 2 * 16))


def test_a_layer_that_reuses_a_cache_projects_queries_alone():
    found = of(AttentionLayers(count=2, reuses_cache=True), qk_norm=True)

    assert found.key_value == 0
    assert found.split == elements((64, 128), (128, 64))
    assert found.small == 16  # one norm for queries, none for keys


@pytest.mark.parametrize(("gate", "columns"), [("none", 0), ("head", 8), ("element", 8 * 16)])
def test_an_output_gate_has_one_column_a_head_or_an_element(gate, columns):
    found = of(AttentionLayers(count=2, output_gate=gate))

    assert found.split == elements((64, 128), (128, 64), (64, columns))


@pytest.mark.parametrize(
    ("fields", "small"),
    [
        ({"attention_bias": True}, 128 + 32 + 32),
        ({"attention_output_bias": True}, 64),
        ({"qk_norm": True}, 16 + 16),
        ({"qk_norm": True, "qk_norm_width": "full"}, 128 + 32),
    ],
)
def test_biases_and_norms_of_attention_are_vectors_of_their_own(fields, small):
    assert of(AttentionLayers(count=2), **fields).small == small


def test_sinks_are_one_number_a_query_head():
    assert of(AttentionLayers(count=2, sinks=True)).small == 8


def test_the_attention_of_deepseek_v3_is_five_matrices_and_two_norms():
    """DeepSeek-V3, arXiv:2412.19437, section 4.2: ranks 1,536 and 512, 128 heads of 128 and 64."""
    model = get_model("deepseek-ai/DeepSeek-V3")

    found = count_mixer(model, model.layers_by_attention[0])

    down = elements((7168, 1536), (7168, 512 + 64))
    up = elements((1536, 128 * (128 + 64)), (512, 128 * (128 + 128)), (128 * 128, 7168))
    assert (found.replicated, found.split, found.small) == (down, up, 1536 + 512)


def test_latent_attention_without_a_query_rank_projects_queries_directly():
    latent = LatentLayers(
        count=2, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12
    )

    found = of(latent)

    assert found.replicated == elements((64, 32 + 8))
    assert found.split == elements((64, 8 * (16 + 8)), (32, 8 * (16 + 12)), (8 * 12, 64))


def test_a_gated_delta_net_is_counted_matrix_by_matrix():
    """Yang et al. 2024 (Gated Delta Networks), arXiv:2412.06464, as Qwen3-Next builds it."""
    model = model_from_config(HYBRID)
    group = next(g for g in model.layers_by_attention if g.kind == "recurrent")

    found = count_mixer(model, group)

    keys, values = 2 * 16, 4 * 8
    projections = ((256, 2 * keys + 2 * values), (256, 4), (256, 4), (values, 256))
    assert found.split == elements(*projections)
    assert found.small == elements((2 * keys + values, 4), (4,), (4,), (8,))
    assert group.state_elements == 4 * 16 * 8


def test_a_mamba_2_layer_is_counted_matrix_by_matrix():
    """Dao and Gu 2024, arXiv:2405.21060: in, convolution, decay, skip, step, norm and out."""
    model = model_from_config(STATE_SPACE)
    group = next(g for g in model.layers_by_attention if g.kind == "recurrent")

    found = count_mixer(model, group)

    inner, states = 8 * 32, 2 * 16
    channels = inner + 2 * states
    assert found.split == elements((256, inner + channels + 8), (inner, 256))
    assert found.small == elements((channels, 4), (channels,), (8,), (8,), (8,), (inner,))
    assert group.conv_elements == channels * 3


def test_a_layer_without_mixing_has_no_mixer():
    assert of(NoMixingLayers(count=2)) == MixerCounts()


@given(layers=st.integers(0, 500))
def test_so_many_layers_are_so_many_times_one(layers):
    one = MixerCounts(split=3, key_value=5, replicated=7, small=11)

    summed = sum([one] * layers, start=MixerCounts())

    assert one.times(layers) == summed


@pytest.mark.parametrize(("gated", "matrices"), [(True, 3), (False, 2)])
def test_a_gated_block_has_a_third_matrix(gated, matrices):
    model = ModelSpec(**SHAPE, gated_mlp=gated)

    found = count_parameters(model).feed_forward

    assert found == 2 * matrices * 64 * 96
    assert (
        feed_forward_parameters(matrices=matrices, hidden_size=64, intermediate_size=96) * 2
        == found
    )


def test_the_parts_of_a_model_add_up_to_its_whole():
    counts = count_parameters(get_model("mistralai/Mixtral-8x7B-v0.1"))

    # 32 layers of 8 experts of three 4,096 by 14,336 matrices; a token visits two.
    assert counts.experts == 32 * 8 * 3 * 4096 * 14336
    assert counts.experts_active * 4 == counts.experts
    assert counts.total - counts.active == 32 * 6 * 3 * 4096 * 14336
    assert counts.total == 46_702_792_704


@pytest.mark.parametrize(("ranks", "chosen"), [(2, 1), (2, 3), (3, 2), (4, 4), (5, 3)])
def test_the_share_of_tokens_that_a_rank_sees_is_that_of_all_choices(ranks, chosen):
    choices = list(itertools.product(range(ranks), repeat=chosen))

    seen = sum(0 in choice for choice in choices) / len(choices)

    assert dispatch_share(expert_ranks=ranks, experts_per_token=chosen) == pytest.approx(seen)


@given(tokens=st.integers(1, 4096), chosen=st.integers(1, 8), evenness=st.floats(0.5, 50))
def test_one_rank_computes_every_visit(tokens, chosen, evenness):
    found = expert_visits(
        num_experts=64.0,
        experts_per_token=float(chosen),
        num_tokens=float(tokens),
        expert_ranks=1.0,
        evenness=evenness,
    )

    assert found == pytest.approx(tokens * chosen)


@given(tokens=st.integers(1, 4096), more=st.integers(0, 4096), ranks=st.sampled_from([1, 2, 8]))
def test_more_tokens_never_read_fewer_experts(tokens, more, ranks):
    shape = {"num_experts": 64.0, "experts_per_token": 4.0, "evenness": 2.0}

    few, many = (
        experts_read(**shape, num_tokens=float(n), expert_ranks=float(ranks))
        for n in (tokens, tokens + more)
    )

    assert few <= many * (1 + 1e-12) <= 64 / ranks * (1 + 1e-9)


def test_a_model_whose_tokens_visit_all_experts_reads_all_of_them():
    shape = {"num_experts": 8.0, "experts_per_token": 8.0, "evenness": 1.0}

    found = [experts_read(**shape, num_tokens=1.0, expert_ranks=float(x)) for x in (1, 2, 8)]

    assert found == [8, 4, 1]
