"""Which prompts go together: every one once, no batch too large, never dearer than it must be."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.jobs.generate.batching import (
    POLICIES,
    CostModel,
    padding_ratio,
    planned_seconds,
    sorted_batches,
    turbo_batches,
)

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=40)
COSTS = st.builds(CostModel, st.floats(0, 1), st.floats(1e-6, 1e-2))


@pytest.mark.parametrize("policy", POLICIES)
@given(lengths=LENGTHS, size=st.integers(1, 12), cost=COSTS)
def test_every_prompt_is_in_one_batch_and_no_batch_is_too_large(policy, lengths, size, cost):
    batches = POLICIES[policy](lengths, size, cost)

    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= size for batch in batches)


@given(lengths=LENGTHS, size=st.integers(1, 12), cost=COSTS)
def test_the_dynamic_programme_is_never_dearer_than_sorting(lengths, size, cost):
    turbo = planned_seconds(turbo_batches(lengths, size, cost), lengths, cost)
    by_length = planned_seconds(sorted_batches(lengths, size, cost), lengths, cost)

    assert turbo <= by_length * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_no_way_of_cutting_is_cheaper_than_the_dynamic_programmes(seed):
    generator = np.random.default_rng(seed)
    lengths = sorted(generator.integers(1, 201, 9).tolist())
    cost = CostModel(generator.random(), 10 ** generator.uniform(-5, -1))
    found = planned_seconds(turbo_batches(lengths, 4, cost), lengths, cost)

    ways = [cuts for n in range(9) for cuts in itertools.combinations(range(1, 9), n)]
    costs = []
    for cuts in ways:
        ends = [0, *cuts, 9]
        batches = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
        if max(map(len, batches)) <= 4:
            costs.append(planned_seconds(batches, lengths, cost))

    assert found == pytest.approx(min(costs))


def test_where_a_batch_costs_nothing_extra_each_length_stands_alone():
    batches = turbo_batches([5, 9, 5, 9, 100], 5, CostModel(0.0, 1.0))

    assert padding_ratio(batches, [5, 9, 5, 9, 100]) == 0.0


def test_where_a_batch_costs_much_the_batches_are_full():
    assert len(turbo_batches([5, 9, 5, 9, 100], 5, CostModel(1e6, 1.0))) == 1


def test_padding_is_what_the_longest_asks_of_the_others():
    assert padding_ratio([[0, 1]], [10, 5]) == pytest.approx(0.25)


def test_sorting_never_pads_more_than_the_given_order():
    lengths = [100, 1, 100, 1]
    given_ratio = padding_ratio(POLICIES["given"](lengths, 2, CostModel(0, 1)), lengths)

    assert padding_ratio(sorted_batches(lengths, 2, CostModel(0, 1)), lengths) < given_ratio
