"""Speed is measured on what was asked: tokens, batch, repetitions, cache."""

import pytest
import torch

from runners.jobs.evaluation import Repetition, Speed, Workload, measure_speed, random_prompt
from runners.jobs.loading import fresh_model
from tests.runners.jobs.tiny import TINY_CONFIG

LOAD = Workload(batch_size=2, prompt_tokens=8, output_tokens=5, seed=1)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return fresh_model(TINY_CONFIG, torch.float32).eval()


def test_the_first_token_comes_out_of_the_prefill(model):
    speed = measure_speed(model, LOAD, 2)

    assert [len(each.step_seconds) for each in speed.repetitions] == [4, 4]


def test_the_warm_up_is_not_among_the_repetitions(model):
    assert len(measure_speed(model, LOAD, 3).repetitions) == 3


def test_each_repetition_is_reported_as_it_ends(model):
    seen = []

    measure_speed(model, LOAD, 3, lambda done, _repetition: seen.append(done))

    assert seen == [1, 2, 3]


def test_the_cache_holds_every_token_but_the_last(model):
    speed = measure_speed(model, LOAD, 1)

    layers, kv_heads, head_dim, tokens = 2, 2, 16, 8 + 5 - 1
    assert speed.kv_cache_bytes == 2 * layers * LOAD.batch_size * kv_heads * head_dim * tokens * 4


def test_the_prompt_repeats_with_its_seed(model):
    assert torch.equal(random_prompt(model, LOAD), random_prompt(model, LOAD))


def test_figures_are_medians_over_repetitions():
    times = [(1.0, (0.1,)), (9.0, (0.9,)), (2.0, (0.2,))]
    speed = Speed(LOAD, [Repetition(prefill, steps) for prefill, steps in times])

    assert (speed.ttft_seconds, speed.tpot_seconds) == (2.0, 0.2)


def test_speeds_are_those_of_the_whole_batch():
    speed = Speed(LOAD, [Repetition(2.0, (0.5, 0.5))])

    measured = speed.measured()

    assert measured["prefill_tokens_per_second"] == 2 * 8 / 2.0
    assert measured["decode_tokens_per_second"] == 2 / 0.5


def test_one_output_token_has_no_decode_speed():
    speed = Speed(LOAD, [Repetition(2.0, ())])

    assert "decode_tokens_per_second" not in speed.measured()


def test_a_prefix_names_the_original():
    assert "original_ttft_seconds" in Speed(LOAD, [Repetition(1.0, ())]).measured("original_")
