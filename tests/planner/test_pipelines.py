"""Pipelines: the split of layers, the slowest stage, and schedules executed pass by pass."""

import itertools
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.communication import pace_of, split_in_flight, split_layers
from planner.cost.training import pipeline_in_flight, step_seconds
from planner.specs.base import NotPossibleError
from tests.planner.asking import LLAMA_70B, TRAIN, ask
from tests.planner.schedules import BACKWARD, FORWARD, execute, gpipe, interleaved, one_f_one_b


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


def test_stages_share_evenly_but_for_the_logits_the_speed_and_the_memory():
    assert split_layers(table_of([1.0] * 4, 0.0, [9] * 4, 8)) == (2, 2, 2, 2)
    split = split_layers(table_of([1.0] * 4, 2.0, [9] * 4, 8))
    assert split[-1] == 1
    assert sorted(split[:-1]) == [2, 2, 3]
    assert split_layers(table_of([1.0, 2.0], 0.0, [9, 9], 9)) == (6, 3)
    assert split_layers(table_of([1.0, 2.0], 0.0, [4, 9], 9)) == (4, 5)
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


def test_one_micro_batch_goes_to_the_fast_device_and_many_even_the_stages_out():
    assert split_in_flight(table_of([1.0, 2.0], 0.0, [9, 9], 9), 1) == (8, 1)
    assert split_in_flight(table_of([1.0, 2.0], 0.0, [9, 9], 9), 2) == (6, 3)


PIPELINE = {"pipeline_parallel_size": 8, "micro_batch_size": 1}


def test_the_stage_or_chunk_with_the_most_layers_sets_the_pace():
    # 61 layers: 31 on the first stage; 30 and a head that takes as long as half of one.
    pace = pace_of(61, 2, 1.0, 0.5)
    assert (pace.layers, pace.heads) == (31, 0)
    assert pace.even_stages == pytest.approx(61.5 / 31)
    assert pace_of(80, 8, 1.0, 0.5, chunks=5) == pace_of(80, 8, 1.0, 0.5)

    # 80 layers in 8 stages of 3 chunks: some chunks have four layers, so that 12 set the pace.
    pace = pace_of(80, 8, 1.0, 0.0, chunks=3)
    assert pace.layers == 12
    assert pace.even_stages == pytest.approx(80 / 12)
    # 126 layers in 8 stages of 8 chunks: two layers each, but for the first and the last.
    assert pace_of(126, 8, 1.0, 0.0, chunks=8) == pace_of(126, 8, 1.0, 0.0)
    assert step_of_chunks(3) > step_of_chunks(2)


@given(layers=st.integers(8, 130), stages=st.sampled_from([2, 4, 8]), head=st.floats(0, 5))
def test_a_column_of_chunks_gives_the_pace_of_each(layers, stages, head):
    sizes = np.array([1.0, 2.0, 3.0, 4.0])
    together = pace_of(layers, stages, 1.0, head, chunks=sizes)
    for at, size in enumerate(sizes):
        alone = pace_of(layers, stages, 1.0, head, chunks=float(size))
        assert np.broadcast_to(together.layers, 4)[at] == alone.layers
        assert np.broadcast_to(together.even_stages, 4)[at] == pytest.approx(alone.even_stages)


def step_of_chunks(chunks):
    strategy = {**PIPELINE, "virtual_pipeline_size": chunks, "pipeline_schedule": "interleaved"}
    workload = {**TRAIN, "global_batch_size": 64}
    found = ask(
        model=LLAMA_70B, devices=8, engine="megatron", workload=workload, strategy=strategy
    )
    return found.performance.step_seconds


def test_too_many_ranks_blame_the_degree_that_takes_most():
    for name in ("data", "tensor", "pipeline", "context"):
        strategy = {f"{name}_parallel_size": 16}
        with pytest.raises(NotPossibleError, match="the cluster has 8") as caught:
            ask(model=LLAMA_70B, devices=8, strategy=strategy)
        assert caught.value.field == f"strategy.{name}_parallel_size", name


SECONDS = {FORWARD: 1.0, BACKWARD: 2.0}
SHAPES = [(1, 4), (2, 2), (2, 8), (3, 12), (4, 4), (4, 8), (4, 32), (8, 8), (8, 64)]
SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


def predicted_seconds(stages, micro_batches, chunks=1):
    return step_seconds(
        micro_batches=micro_batches,
        stages=stages,
        micro_batch_s=SECONDS[FORWARD] + SECONDS[BACKWARD],
        exposed_s=0.0,
        update_s=0.0,
        chunks=chunks,
    )


def test_a_step_takes_as_long_as_its_schedule_and_interleaving_divides_the_bubble():
    wrong = []
    for (stages, micro_batches), name in itertools.product(SHAPES, SCHEDULES):
        run = execute(SCHEDULES[name], stages, micro_batches, SECONDS)
        if predicted_seconds(stages, micro_batches) != pytest.approx(run.seconds):
            wrong.append((stages, micro_batches, name))
    assert not wrong, wrong

    for (stages, micro_batches), chunks in itertools.product(
        ((2, 4), (2, 8), (4, 8), (4, 16), (8, 32)), (2, 4)
    ):
        run = execute(interleaved(chunks), stages, micro_batches, SECONDS, chunks)
        found = predicted_seconds(stages, micro_batches, chunks)
        assert found == pytest.approx(run.seconds, rel=1e-9), (stages, micro_batches, chunks)


def test_a_stage_holds_what_its_schedule_has_in_flight():
    for (stages, micro_batches), name in itertools.product(SHAPES, SCHEDULES):
        run = execute(SCHEDULES[name], stages, micro_batches, SECONDS)
        for stage, most in enumerate(run.most_held):
            held = pipeline_in_flight(name, stage, stages, micro_batches)
            assert held == most, (stages, micro_batches, name)

    # Even the last stage holds nearly as many micro-batches as there are stages.
    for (stages, micro_batches), chunks in itertools.product(((2, 8), (4, 16), (8, 32)), (2, 4)):
        run = execute(interleaved(chunks), stages, micro_batches, SECONDS, chunks)
        for stage, most in enumerate(run.most_held):
            held = pipeline_in_flight("interleaved", stage, stages, micro_batches, chunks)
            assert held == pytest.approx(most / chunks), (stages, micro_batches, chunks)


def test_speed_of_interleaving_and_gpipe_is_bought_with_memory():
    plain = execute(one_f_one_b, 4, 16, SECONDS)
    woven = execute(interleaved(2), 4, 16, SECONDS, 2)
    assert woven.seconds < plain.seconds
    assert woven.most_held[0] / 2 > plain.most_held[0]
    first, second = execute(gpipe, 4, 16, SECONDS), execute(one_f_one_b, 4, 16, SECONDS)
    assert first.seconds == second.seconds
    assert (max(first.most_held), max(second.most_held)) == (16, 4)
