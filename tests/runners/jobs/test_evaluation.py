"""Perplexity: exact where theory says what it is, and windows that never overlap."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runners.jobs.evaluation import Perplexity, evaluate, perplexity_ratio, segment_starts
from runners.jobs.loading import fresh_model
from tests.runners.jobs.tiny import TINY_CONFIG


@pytest.fixture
def model():
    torch.manual_seed(1)
    return fresh_model(TINY_CONFIG, torch.float32)


@pytest.fixture
def ids():
    return np.random.default_rng(1).integers(0, 512, 5000).astype(np.int32)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(model, ids):
    torch.nn.init.zeros_(model.lm_head.weight)

    assert evaluate(model, ids, 1024).value == pytest.approx(512.0, rel=1e-6)


def test_the_interval_of_a_uniform_model_has_no_width(model, ids):
    torch.nn.init.zeros_(model.lm_head.weight)

    low, high = evaluate(model, ids, 1024).interval

    assert low == pytest.approx(high, rel=1e-6)


def test_it_equals_the_loss_that_the_library_computes(model, ids):
    window = torch.from_numpy(ids[:64].astype(np.int64))[None]
    labels = window.clone()
    labels[:, :32] = -100

    found = evaluate(model, ids[:64], 32)

    with torch.no_grad():
        assert math.log(found.value) == pytest.approx(
            float(model(input_ids=window, labels=labels).loss), rel=1e-5
        )


def test_asking_twice_gives_the_same_figure(model, ids):
    assert evaluate(model, ids, 512).value == evaluate(model, ids, 512).value


def test_it_scores_as_many_tokens_as_asked(model, ids):
    assert evaluate(model, ids, 640).tokens == 640


def test_it_never_scores_more_than_the_stream_holds(model, ids):
    assert evaluate(model, ids[:200], 10_000).tokens <= 200


def test_the_model_goes_back_to_training_after_it(model, ids):
    model.train()

    evaluate(model, ids, 64)

    assert model.training


def test_progress_ends_at_one(model, ids):
    seen = []

    evaluate(model, ids, 512, seen.append)

    assert seen[-1] == 1.0


def test_a_stream_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="fewer than one window"):
        segment_starts(10, 64, 32, 100)


@given(
    length=st.integers(64, 5000),
    stride=st.integers(1, 32),
    num_tokens=st.integers(1, 10_000),
)
def test_scored_parts_never_overlap_and_stay_inside(length, stride, num_tokens):
    window = 2 * stride

    starts = segment_starts(length, window, stride, num_tokens)

    assert starts[0] == 0
    assert starts[-1] + window <= length
    assert all(after - before >= stride for before, after in itertools.pairwise(starts))


def test_the_ratio_of_a_model_to_itself_is_exactly_one():
    found = Perplexity(np.array([1.0, 2.0, 3.0]), tokens=3, window=2)

    assert perplexity_ratio(found, found) == (1.0, 1.0, 1.0)


def test_pairing_makes_the_ratio_surer_than_the_figures():
    before = Perplexity(np.array([1.0, 3.0, 5.0]), tokens=3, window=2)
    after = Perplexity(before.segment_nlls + np.array([0.1, 0.11, 0.09]), tokens=3, window=2)

    ratio, low, high = perplexity_ratio(after, before)

    assert low < ratio < high
    assert high / low < after.interval[1] / after.interval[0]
