"""The stage that all others wait for: uneven chunks, and which degree is blamed for too many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.stages import pace_of
from planner.errors import NotPossibleError
from tests.planner.asking import LLAMA_70B, TRAIN, ask

PIPELINE = {"pipeline_parallel_size": 8, "micro_batch_size": 1}


def test_of_two_stages_the_one_with_more_layers_sets_the_pace():
    """61 layers: 31 on the first stage; 30 and a head that takes as long as half of one."""
    pace = pace_of(61, 2, 1.0, 0.5)

    assert (pace.layers, pace.heads) == (31, 0)
    assert pace.even_stages == pytest.approx(61.5 / 31)


def test_chunks_that_share_the_layers_evenly_change_no_pace():
    assert pace_of(80, 8, 1.0, 0.5, chunks=5) == pace_of(80, 8, 1.0, 0.5)


def test_uneven_chunks_all_take_as_long_as_the_longest():
    """80 layers in 8 stages of 3 chunks: some chunks have four layers, so that 12 set the pace."""
    pace = pace_of(80, 8, 1.0, 0.0, chunks=3)

    assert pace.layers == 12
    assert pace.even_stages == pytest.approx(80 / 12)


def test_a_layer_left_out_at_each_end_of_a_long_pipeline_costs_nothing():
    """126 layers in 8 stages of 8 chunks: two layers each, but for the first and the last."""
    assert pace_of(126, 8, 1.0, 0.0, chunks=8) == pace_of(126, 8, 1.0, 0.0)


@given(layers=st.integers(8, 130), stages=st.sampled_from([2, 4, 8]), head=st.floats(0, 5))
def test_a_column_of_chunks_gives_the_pace_of_each(layers, stages, head):
    sizes = np.array([1.0, 2.0, 3.0, 4.0])
    together = pace_of(layers, stages, 1.0, head, chunks=sizes)

    for at, size in enumerate(sizes):
        alone = pace_of(layers, stages, 1.0, head, chunks=float(size))
        assert np.broadcast_to(together.layers, 4)[at] == alone.layers
        assert np.broadcast_to(together.even_stages, 4)[at] == pytest.approx(alone.even_stages)


def step_seconds(chunks):
    strategy = {**PIPELINE, "virtual_pipeline_size": chunks, "pipeline_schedule": "interleaved"}
    workload = {**TRAIN, "global_batch_size": 64}
    found = ask(
        model=LLAMA_70B, devices=8, engine="megatron", workload=workload, strategy=strategy
    )
    return found.performance.step_seconds


def test_interleaving_unevenly_is_slower_than_evenly():
    assert step_seconds(3) > step_seconds(2)


@pytest.mark.parametrize("name", ["data", "tensor", "pipeline", "context"])
def test_too_many_ranks_blame_the_degree_that_takes_most(name):
    strategy = {f"{name}_parallel_size": 16}
    with pytest.raises(NotPossibleError, match="the cluster has 8") as caught:
        ask(model=LLAMA_70B, devices=8, strategy=strategy)

    assert caught.value.field == f"strategy.{name}_parallel_size"
