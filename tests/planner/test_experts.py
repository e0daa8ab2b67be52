"""Experts: which ones a pass reads, and what the busiest rank has to do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.roofline import dispatch_share, excess_of_busiest, expert_visits, experts_read

E, K = 128, 8


def simulated(tokens, ranks, evenness, rounds=400):
    """Return the mean busiest rank's experts read and visits, by drawing routes."""
    draw = np.random.default_rng(7)
    read, visits = [], []
    for _ in range(rounds):
        popularity = draw.gamma(evenness, size=E)
        # The smallest of exponential times at these rates: a draw without replacement.
        times = draw.exponential(size=(tokens, E)) / popularity
        chosen = np.argsort(times, axis=1)[:, :K]
        counts = np.bincount(chosen.ravel(), minlength=E).reshape(ranks, E // ranks)
        read.append((counts > 0).sum(axis=1).max())
        visits.append(counts.sum(axis=1).max())
    return float(np.mean(read)), float(np.mean(visits))


@pytest.mark.parametrize("tokens", [4, 16, 64, 256])
@pytest.mark.parametrize("ranks", [1, 4, 8])
@pytest.mark.parametrize("evenness", [1.0, 4.0, 1000.0])
def test_the_busiest_rank_is_what_drawing_routes_gives(tokens, ranks, evenness):
    load = {
        "num_experts": E,
        "experts_per_token": K,
        "num_tokens": float(tokens),
        "expert_ranks": float(ranks),
        "evenness": evenness,
    }
    read, visits = simulated(tokens, ranks, evenness)

    assert experts_read(**load) == pytest.approx(read, rel=0.08)
    assert expert_visits(**load) == pytest.approx(visits, rel=0.08)


def test_one_token_reads_just_its_own_experts():
    one = experts_read(
        num_experts=E, experts_per_token=K, num_tokens=1.0, expert_ranks=1.0, evenness=1.0
    )

    assert one == pytest.approx(K)


@settings(max_examples=50, deadline=None)
@given(tokens=st.floats(1, 1e5), ranks=st.sampled_from([1.0, 2.0, 4.0, 8.0, 64.0]))
def test_no_rank_reads_more_than_it_holds_nor_less_than_the_mean(tokens, ranks):
    """A peer lets one active expert stand for the whole bank, or all for one."""
    read = experts_read(
        num_experts=E, experts_per_token=K, num_tokens=tokens, expert_ranks=ranks, evenness=1.0
    )

    assert K / ranks <= read * (1 + 1e-12)
    assert read <= E / ranks


def test_the_largest_of_a_few_normal_values_is_the_tabulated_one():
    """Order statistics of the normal distribution: 0.564, 1.029 and 1.424 for 2, 4 and 8."""
    found = [excess_of_busiest(float(ranks)) for ranks in (2, 4, 8)]

    assert found == pytest.approx([0.564, 1.029, 1.424], rel=0.06)


def test_a_group_with_all_experts_sees_every_token():
    assert dispatch_share(expert_ranks=1.0, experts_per_token=K) == 1.0
    assert dispatch_share(expert_ranks=64.0, experts_per_token=1.0) == pytest.approx(1 / 64)
