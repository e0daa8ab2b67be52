"""The split of layers over unlike stages is the one that trying every split finds."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.stages import split_in_flight, split_layers


def enumerated(table):
    """Return the least (slowest, sum) of all splits with a layer for each stage."""
    stages, places = table.shape
    found = []
    for split in product(range(1, places), repeat=stages):
        if sum(split) == places - 1:
            times = [table[stage, layers] for stage, layers in enumerate(split)]
            found.append((max(times), sum(times)))
    return min((one for one in found if np.isfinite(one[1])), default=None)


RATES = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4)


def table_of(rates, head, rooms, layers):
    """Return the seconds of each stage by layers: the last one computes the logits too."""
    counts = np.arange(layers + 1)
    table = np.array([rate * counts for rate in rates])
    table[-1] += head
    for stage, room in enumerate(rooms[: len(rates)]):
        table[stage, counts > room] = np.inf
    return table


@settings(max_examples=200, deadline=None)
@given(
    rates=RATES,
    head=st.floats(0.0, 5.0),
    rooms=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    layers=st.integers(1, 9),
)
def test_the_split_is_as_good_as_the_best_of_all_splits(rates, head, rooms, layers):
    table = table_of(rates, head, rooms, layers)
    best, split = enumerated(table), split_layers(table)

    if best is None:
        assert split is None
        return
    times = [table[stage, held] for stage, held in enumerate(split)]
    assert sum(split) == layers
    assert (max(times), sum(times)) == pytest.approx(best, rel=1e-8)


def test_alike_stages_share_evenly():
    assert split_layers(table_of([1.0] * 4, 0.0, [9] * 4, 8)) == (2, 2, 2, 2)


def test_the_stage_with_the_logits_takes_fewer_layers():
    split = split_layers(table_of([1.0] * 4, 2.0, [9] * 4, 8))

    assert split[-1] == 1
    assert sorted(split[:-1]) == [2, 2, 3]


def test_a_device_twice_as_fast_takes_twice_the_layers():
    assert split_layers(table_of([1.0, 2.0], 0.0, [9, 9], 9)) == (6, 3)


def test_memory_bounds_what_a_fast_device_takes():
    assert split_layers(table_of([1.0, 2.0], 0.0, [4, 9], 9)) == (4, 5)


def test_more_stages_than_layers_cannot_be_filled():
    assert split_layers(table_of([1.0, 1.0, 1.0], 0.0, [9] * 3, 2)) is None


@settings(max_examples=200, deadline=None)
@given(
    rates=RATES,
    head=st.floats(0.0, 5.0),
    rooms=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    layers=st.integers(1, 9),
    in_flight=st.floats(1.0, 6.0),
)
def test_micro_batches_in_flight_go_round_as_soon_as_in_the_best_of_all_splits(
    rates, head, rooms, layers, in_flight
):
    table = table_of(rates, head, rooms, layers)
    best, split = least_round(table, in_flight), split_in_flight(table, in_flight)

    if best is None:
        assert split is None
        return
    assert sum(split) == layers
    assert round_time(table, split, in_flight) == pytest.approx(best, rel=1e-8)


def round_time(table, split, in_flight):
    times = [table[stage, held] for stage, held in enumerate(split)]
    return max(sum(times), in_flight * max(times))


def least_round(table, in_flight):
    stages, places = table.shape
    splits = (one for one in product(range(1, places), repeat=stages) if sum(one) == places - 1)
    rounds = (round_time(table, split, in_flight) for split in splits)
    return min((one for one in rounds if np.isfinite(one)), default=None)


def test_one_micro_batch_alone_puts_all_it_can_on_the_fast_device():
    assert split_in_flight(table_of([1.0, 2.0], 0.0, [9, 9], 9), 1) == (8, 1)


def test_micro_batches_for_every_stage_even_the_stages_out():
    assert split_in_flight(table_of([1.0, 2.0], 0.0, [9, 9], 9), 2) == (6, 3)
