"""What training's techniques bring in time: the bench's own runs, small."""

import pytest
import torch

from runners.jobs.bench import tuning_bench as bench

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_growing_lengths_take_less_time_for_as_many_tokens():
    time, loss = bench.growing_ratios(rounds=1, steps=8)

    assert time.value > 1.1
    assert loss.value > 0.9
    assert (time.n, loss.of) == (1, "nats a token")


def test_recomputation_does_not_double_the_work_of_a_step():
    found = {each.name: each for each in bench.recomputation_ratios(rounds=2)}

    for how in ("selective", "full"):
        seconds = found[f"kept / {how} recomputation's seconds"]
        both = found[f"kept / {how} recomputation's bytes times seconds"]
        assert 0.5 < seconds.value < 1.05
        assert both.value > seconds.value  # fewer bytes are held


def test_every_other_round_goes_backwards():
    assert bench._turned("abc", 0) == ["a", "b", "c"]
    assert bench._turned("abc", 1) == ["c", "b", "a"]
