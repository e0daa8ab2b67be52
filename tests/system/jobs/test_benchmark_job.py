"""The benchmark job: figures of what was asked, and no perplexity where text means nothing."""

import pytest

from runners.jobs.load import benchmark
from runners.jobspec import BenchmarkSpec, RandomModel
from runners.shared.messages import ResultBody
from tests.runners.jobs.tiny import TINY_CONFIG

SMALL = {"prompt_tokens": 16, "output_tokens": 8, "evaluation_tokens": 1024}


@pytest.fixture(scope="module")
def random(host):
    spec = BenchmarkSpec(model=RandomModel(config=TINY_CONFIG), repetitions=3, **SMALL)
    return host.run_here("bench-random", spec, benchmark.work)


@pytest.fixture(scope="module")
def int8_on_load(host, trained_model):
    spec = BenchmarkSpec(model=trained_model, weight_dtype="int8", batch_size=2, **SMALL)
    return host.run_here("bench-int8", spec, benchmark.work)


def test_random_weights_have_speed_and_memory_but_no_perplexity(random):
    measured = ResultBody.model_validate(random.bodies("result")[0]).measured

    assert measured["decode_tokens_per_second"] > 0
    assert measured["peak_memory_bytes"] > measured["parameter_bytes"]
    assert not [name for name in measured if "perplexity" in name]


def test_each_repetition_moves_the_live_charts(random):
    assert len(random.metric("prefill_tokens_per_second")) == 3
    assert len(random.metric("decode_tokens_per_second")) == 3


def test_model_and_cache_are_counted_to_the_byte(random):
    measured = random.measured

    layers, kv_heads, head_dim, tokens = 2, 2, 16, 16 + 8 - 1
    assert measured["kv_cache_bytes"] == 2 * layers * kv_heads * head_dim * tokens * 2
    assert measured["model_and_cache_bytes"] == (
        measured["parameter_bytes"] + measured["kv_cache_bytes"]
    )


def test_weights_quantised_at_load_are_judged_against_their_original(int8_on_load):
    measured = int8_on_load.measured

    assert measured["perplexity"] / measured["original_perplexity"] == pytest.approx(
        measured["perplexity_ratio"]
    )


def test_speeds_and_times_of_one_batch_agree(int8_on_load):
    measured = int8_on_load.measured

    assert measured["prefill_tokens_per_second"] * measured["ttft_seconds"] == pytest.approx(32)
    assert measured["decode_tokens_per_second"] * measured["tpot_seconds"] == pytest.approx(2)


def test_progress_reaches_the_end_without_running_backwards(int8_on_load):
    done = [body["done"] for body in int8_on_load.bodies("progress")]

    assert done == sorted(done)
    assert done[-1] == pytest.approx(100.0)


def test_a_saved_int8_model_is_measured_as_it_lies(host, int8):
    spec = BenchmarkSpec(
        model={"source": "artefact", "attempt_id": "int8"}, weight_dtype="int8", **SMALL
    )

    found = host.run_here("bench-saved", spec, benchmark.work)

    assert found.measured["parameter_bytes"] == int8.measured["parameter_bytes"]
    assert "original_perplexity" not in found.measured
