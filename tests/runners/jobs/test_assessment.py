"""What a result card says of one model: names, sums, and what is left out."""

import numpy as np
import pytest
import torch

from runners.jobs.evaluation import (
    Assessment,
    Perplexity,
    Repetition,
    Speed,
    Workload,
    held_out_ids,
    repetition_speeds,
)
from runners.jobs.loading import LoadedModel, fresh_model
from runners.jobs.memory import Peak
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training

CPU = torch.device("cpu")
LOAD = Workload(batch_size=2, prompt_tokens=8, output_tokens=3, seed=1)


@pytest.fixture
def job(make_job):
    return make_job(tiny_training())


@pytest.fixture
def speed():
    return Speed(LOAD, [Repetition(2.0, (0.5, 0.5))], kv_cache_bytes=100)


@pytest.fixture
def make_assessment(speed):
    def make(perplexity=None):
        peak = Peak(bytes=1000, start_bytes=400, how="by hand")
        return Assessment(perplexity, speed, peak, parameter_bytes=300, matrices_bytes=200)

    return make


@pytest.fixture(scope="module")
def random_model():
    torch.manual_seed(1)
    return LoadedModel(fresh_model(TINY_CONFIG, torch.float32), None, CPU)


def test_model_and_cache_is_the_sum_of_both(make_assessment):
    assert make_assessment().measured()["model_and_cache_bytes"] == 400


def test_the_peak_and_what_was_held_before_are_both_told(make_assessment):
    measured = make_assessment().measured()

    assert (measured["peak_memory_bytes"], measured["runtime_memory_bytes"]) == (1000, 400)


def test_without_text_no_figure_and_no_note_speaks_of_perplexity(make_assessment):
    assessment = make_assessment()

    assert not [name for name in assessment.measured() if "perplexity" in name]
    assert "perplexity" not in assessment.notes()


def test_with_text_the_perplexity_has_its_interval_and_its_note(make_assessment):
    assessment = make_assessment(Perplexity(np.array([1.0, 2.0]), tokens=64, window=32))

    measured = assessment.measured()

    assert measured["perplexity_low"] < measured["perplexity"] < measured["perplexity_high"]
    assert assessment.notes()["perplexity"].startswith("64 held-out tokens")


def test_every_figure_of_the_original_carries_the_prefix(make_assessment):
    plain, prefixed = (make_assessment().measured(prefix) for prefix in ("", "original_"))

    assert {f"original_{name}": value for name, value in plain.items()} == prefixed


def test_live_speeds_are_those_of_the_whole_batch():
    speeds = repetition_speeds(LOAD, Repetition(2.0, (0.5, 0.5)))

    assert speeds == {
        "prefill_tokens_per_second": 8.0,
        "decode_tokens_per_second": 4.0,
        "step_seconds": 0.5,
    }


def test_a_single_output_token_moves_only_the_prefill_chart():
    assert repetition_speeds(LOAD, Repetition(2.0, ())) == {"prefill_tokens_per_second": 8.0}


def test_a_model_without_a_tokenizer_has_no_held_out_ids(job, random_model):
    assert held_out_ids(job, random_model) is None


def test_a_note_says_what_was_repeated(speed):
    assert speed.note() == (
        "median of 1 repetitions after a warm-up: batch 2, 8 prompt tokens, 3 output tokens"
    )
