"""Parameters of single layers by their matrices, and which experts a pass reads."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.catalog.models import get_model, model_from_config
from planner.cost.parameters import (
    MixerCounts,
    count_mixer,
    count_parameters,
    feed_forward_parameters,
)
from planner.cost.roofline import dispatch_share, excess_of_busiest, expert_visits, experts_read
from planner.specs.model import AttentionLayers, LatentLayers, ModelSpec, NoMixingLayers
from tests.planner.asking import TINY

SHAPE = {
    "model_type": "demo", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
    "max_position_embeddings": 128,
}  # fmt: skip
HYBRID = {
    **TINY, "model_type": "qwen3_5_text", "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
STATE_SPACE = {
    **TINY, "model_type": "nemotron_h", "hybrid_override_pattern": "MMMM*-", "conv_kernel": 4,
    "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2,
}  # fmt: skip


def of(group, **fields) -> MixerCounts:
    """Return the counts of one layer, its group filled in as the model does."""
    model = ModelSpec(**{**SHAPE, **fields}, attention_layers=(group,))
    return count_mixer(model, model.layers_by_attention[0])


def elements(*shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def test_a_grouped_query_layer_is_four_matrices_and_its_options():
    # A grouped query layer is four matrices.
    found = of(AttentionLayers(count=2))
    assert found.split == elements((64, 8 * 16), (8 * 16, 64))
    assert found.key_value == elements((64, 2 * 16), (64, 2 * 16))
    assert (found.replicated, found.small) == (0, 0)

    # Narrow values narrow the output and not the query.
    found = of(AttentionLayers(count=2, v_head_dim=4))
    assert found.split == elements((64, 8 * 16), (8 * 4, 64))
    assert found.key_value == elements((64, 2 * 16), (64, 2 * 4))
    # A layer whose values are its keys has one projection less.
    found = of(AttentionLayers(count=2, value_is_key=True))
    assert found.key_value == elements((64, 2 * 16))

    # A layer that reuses a cache projects queries alone.
    found = of(AttentionLayers(count=2, reuses_cache=True), qk_norm=True)
    assert found.key_value == 0
    assert found.split == elements((64, 128), (128, 64))
    assert found.small == 16  # one norm for queries, none for keys

    # An output gate has one column a head or an element.
    for gate, columns in [("none", 0), ("head", 8), ("element", 8 * 16)]:
        found = of(AttentionLayers(count=2, output_gate=gate))
        assert found.split == elements((64, 128), (128, 64), (64, columns))

    # Biases and norms of attention are vectors of their own.
    for fields, small in [
        ({"attention_bias": True}, 128 + 32 + 32),
        ({"attention_output_bias": True}, 64),
        ({"qk_norm": True}, 16 + 16),
        ({"qk_norm": True, "qk_norm_width": "full"}, 128 + 32),
    ]:
        assert of(AttentionLayers(count=2), **fields).small == small

    # Sinks are one number a query head.
    assert of(AttentionLayers(count=2, sinks=True)).small == 8
    # A layer without mixing has no mixer.
    assert of(NoMixingLayers(count=2)) == MixerCounts()


def test_latent_attention_is_its_matrices_and_norms():
    # The attention of DeepSeek-V3 is five matrices and two norms: arXiv:2412.19437,
    # section 4.2: ranks 1,536 and 512, 128 heads of 128 and 64.
    model = get_model("deepseek-ai/DeepSeek-V3")
    found = count_mixer(model, model.layers_by_attention[0])
    down = elements((7168, 1536), (7168, 512 + 64))
    up = elements((1536, 128 * (128 + 64)), (512, 128 * (128 + 128)), (128 * 128, 7168))
    assert (found.replicated, found.split, found.small) == (down, up, 1536 + 512)

    # Latent attention without a query rank projects queries directly.
    latent = LatentLayers(
        count=2, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12
    )
    found = of(latent)
    assert found.replicated == elements((64, 32 + 8))
    assert found.split == elements((64, 8 * (16 + 8)), (32, 8 * (16 + 12)), (8 * 12, 64))


def test_recurrent_layers_are_counted_matrix_by_matrix():
    # A gated delta net is counted matrix by matrix: Yang et al. 2024 (Gated Delta Networks),
    # arXiv:2412.06464, as Qwen3-Next builds it.
    model = model_from_config(HYBRID)
    group = next(g for g in model.layers_by_attention if g.kind == "recurrent")
    found = count_mixer(model, group)
    keys, values = 2 * 16, 4 * 8
    projections = ((256, 2 * keys + 2 * values), (256, 4), (256, 4), (values, 256))
    assert found.split == elements(*projections)
    assert found.small == elements((2 * keys + values, 4), (4,), (4,), (8,))
    assert group.state_elements == 4 * 16 * 8

    # A Mamba 2 layer is counted matrix by matrix: Dao and Gu 2024, arXiv:2405.21060: in,
    # convolution, decay, skip, step, norm and out.
    model = model_from_config(STATE_SPACE)
    group = next(g for g in model.layers_by_attention if g.kind == "recurrent")
    found = count_mixer(model, group)
    inner, states = 8 * 32, 2 * 16
    channels = inner + 2 * states
    assert found.split == elements((256, inner + channels + 8), (inner, 256))
    assert found.small == elements((channels, 4), (channels,), (8,), (8,), (8,), (inner,))
    assert group.conv_elements == channels * 3


@given(layers=st.integers(0, 500))
def test_so_many_layers_are_so_many_times_one(layers):
    one = MixerCounts(split=3, key_value=5, replicated=7, small=11)
    summed = sum([one] * layers, start=MixerCounts())
    assert one.times(layers) == summed


def test_the_parts_of_a_model_add_up_to_its_whole():
    # A gated block has a third matrix.
    for gated, matrices in [(True, 3), (False, 2)]:
        model = ModelSpec(**SHAPE, gated_mlp=gated)
        found = count_parameters(model).feed_forward
        assert found == 2 * matrices * 64 * 96
        assert (
            feed_forward_parameters(matrices=matrices, hidden_size=64, intermediate_size=96) * 2
            == found
        )

    counts = count_parameters(get_model("mistralai/Mixtral-8x7B-v0.1"))
    # 32 layers of 8 experts of three 4,096 by 14,336 matrices; a token visits two.
    assert counts.experts == 32 * 8 * 3 * 4096 * 14336
    assert counts.experts_active * 4 == counts.experts
    assert counts.total - counts.active == 32 * 6 * 3 * 4096 * 14336
    assert counts.total == 46_702_792_704


def test_ranks_see_and_read_the_share_of_all_choices():
    # The share of tokens that a rank sees is that of all choices.
    for ranks, chosen in [(2, 1), (2, 3), (3, 2), (4, 4), (5, 3)]:
        choices = list(product(range(ranks), repeat=chosen))
        seen = sum(0 in choice for choice in choices) / len(choices)
        assert dispatch_share(expert_ranks=ranks, experts_per_token=chosen) == pytest.approx(seen)

    # A model whose tokens visit all experts reads all of them.
    shape = {"num_experts": 8.0, "experts_per_token": 8.0, "evenness": 1.0}
    found = [experts_read(**shape, num_tokens=1.0, expert_ranks=float(x)) for x in (1, 2, 8)]
    assert found == [8, 4, 1]


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


E, K = 128, 8
RANKS = (1, 4, 8)


def simulated(tokens, evenness, rounds=400):
    """Return the mean busiest rank's experts read and visits for each of RANKS, drawn."""
    draw = np.random.default_rng(7)
    read, visits = [], []
    for _ in range(rounds):
        popularity = draw.gamma(evenness, size=E)
        # The smallest of exponential times at these rates: a draw without replacement.
        times = draw.exponential(size=(tokens, E)) / popularity
        chosen = np.argsort(times, axis=1)[:, :K]
        counts = np.bincount(chosen.ravel(), minlength=E)
        shared = [counts.reshape(ranks, E // ranks) for ranks in RANKS]
        read.append([(count > 0).sum(axis=1).max() for count in shared])
        visits.append([count.sum(axis=1).max() for count in shared])
    return np.mean(read, axis=0), np.mean(visits, axis=0)


def test_the_busiest_rank_is_what_drawing_routes_gives():
    wrong = []
    for tokens, evenness in product((4, 16, 64, 256), (1.0, 4.0, 1000.0)):
        for ranks, *drawn in zip(RANKS, *simulated(tokens, evenness), strict=True):
            load = {
                "num_experts": E,
                "experts_per_token": K,
                "num_tokens": float(tokens),
                "expert_ranks": float(ranks),
                "evenness": evenness,
            }
            found = [experts_read(**load), expert_visits(**load)]
            if found != pytest.approx(drawn, rel=0.08):
                wrong.append((tokens, evenness, ranks, found, drawn))
    assert not wrong, wrong


def test_shares_and_reads_of_a_few_tokens_and_ranks_are_the_tabulated_ones():
    # One token reads just its own experts.
    one = experts_read(
        num_experts=E, experts_per_token=K, num_tokens=1.0, expert_ranks=1.0, evenness=1.0
    )
    assert one == pytest.approx(K)

    # The largest of a few normal values is the tabulated one: Order statistics of the normal
    # distribution: 0.564, 1.029 and 1.424 for 2, 4 and 8.
    found = [excess_of_busiest(float(ranks)) for ranks in (2, 4, 8)]
    assert found == pytest.approx([0.564, 1.029, 1.424], rel=0.06)
    # A group with all experts sees every token.
    assert dispatch_share(expert_ranks=1.0, experts_per_token=K) == 1.0
    assert dispatch_share(expert_ranks=64.0, experts_per_token=1.0) == pytest.approx(1 / 64)


@settings(max_examples=50, deadline=None)
@given(tokens=st.floats(1, 1e5), ranks=st.sampled_from([1.0, 2.0, 4.0, 8.0, 64.0]))
def test_no_rank_reads_more_than_it_holds_nor_less_than_the_mean(tokens, ranks):
    """A peer lets one active expert stand for the whole bank, or all for one."""
    read = experts_read(
        num_experts=E, experts_per_token=K, num_tokens=tokens, expert_ranks=ranks, evenness=1.0
    )
    assert K / ranks <= read * (1 + 1e-12)
    assert read <= E / ranks
