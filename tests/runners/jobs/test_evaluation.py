"""Figures of one model: perplexity, speed, memory, and the profile of its operators."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runners.jobs.evaluation import (
    Assessment,
    Perplexity,
    Repetition,
    Speed,
    Workload,
    evaluate,
    held_out_ids,
    measure_speed,
    perplexity_ratio,
    random_prompt,
    repetition_speeds,
    segment_starts,
)
from runners.jobs.load.benchmark import Rates, bound_of, flops_of, profile_model, rows_of
from runners.jobs.loading import LoadedModel, fresh_model
from runners.jobs.memory import Peak
from runners.jobspec.compress import MAX_ROWS
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training


@pytest.fixture
def model():
    torch.manual_seed(1)
    return fresh_model(TINY_CONFIG, torch.float32)


@pytest.fixture
def ids():
    return np.random.default_rng(1).integers(0, 512, 5000).astype(np.int32)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(model, ids):
    torch.nn.init.zeros_(model.lm_head.weight)
    found = evaluate(model, ids, 1024)
    assert found.value == pytest.approx(512.0, rel=1e-6)
    low, high = found.interval
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


def test_it_scores_what_was_asked_alike_each_time_and_tells_its_progress(model, ids):
    assert evaluate(model, ids, 512).value == evaluate(model, ids, 512).value
    assert evaluate(model, ids, 640).tokens == 640
    assert evaluate(model, ids[:200], 10_000).tokens <= 200

    seen = []
    evaluate(model, ids, 512, seen.append)
    assert seen[-1] == 1.0

    model.train()
    evaluate(model, ids, 64)
    assert model.training


def test_a_stream_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="fewer than one window"):
        segment_starts(10, 64, 32, 100)


@given(length=st.integers(64, 5000), stride=st.integers(1, 32), num_tokens=st.integers(1, 10_000))
def test_scored_parts_never_overlap_and_stay_inside(length, stride, num_tokens):
    window = 2 * stride
    starts = segment_starts(length, window, stride, num_tokens)
    assert starts[0] == 0
    assert starts[-1] + window <= length
    assert all(after - before >= stride for before, after in itertools.pairwise(starts))


def test_a_ratio_to_itself_is_one_and_pairing_makes_it_surer_than_the_figures():
    found = Perplexity(np.array([1.0, 2.0, 3.0]), tokens=3, window=2)
    assert perplexity_ratio(found, found) == (1.0, 1.0, 1.0)
    before = Perplexity(np.array([1.0, 3.0, 5.0]), tokens=3, window=2)
    after = Perplexity(before.segment_nlls + np.array([0.1, 0.11, 0.09]), tokens=3, window=2)
    ratio, low, high = perplexity_ratio(after, before)
    assert low < ratio < high
    assert high / low < after.interval[1] / after.interval[0]


# What a result card says of one model: names, sums, and what is left out.

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


def test_bytes_are_told_of_the_model_with_its_cache_and_of_the_peak(make_assessment):
    measured = make_assessment().result_metrics()
    assert measured["model_and_cache_bytes"] == 400
    assert (measured["peak_memory_bytes"], measured["runtime_memory_bytes"]) == (1000, 400)
    plain, prefixed = (make_assessment().result_metrics(prefix) for prefix in ("", "original_"))
    assert {f"original_{name}": value for name, value in plain.items()} == prefixed


def test_perplexity_is_told_with_its_interval_where_there_is_text(make_assessment):
    assessment = make_assessment()
    assert not [name for name in assessment.result_metrics() if "perplexity" in name]
    assert "perplexity" not in assessment.notes()
    assessment = make_assessment(Perplexity(np.array([1.0, 2.0]), tokens=64, window=32))
    measured = assessment.result_metrics()
    assert measured["perplexity_low"] < measured["perplexity"] < measured["perplexity_high"]
    assert assessment.notes()["perplexity"].startswith("64 held-out tokens")


def test_live_speeds_are_those_of_the_whole_batch_and_a_note_says_what_was_repeated(speed):
    speeds = repetition_speeds(LOAD, Repetition(2.0, (0.5, 0.5)))
    assert speeds == {
        "prefill_tokens_per_second": 8.0,
        "decode_tokens_per_second": 4.0,
        "step_seconds": 0.5,
    }
    assert repetition_speeds(LOAD, Repetition(2.0, ())) == {"prefill_tokens_per_second": 8.0}
    assert speed.note() == (
        "median of 1 repetitions after a warm-up: batch 2, 8 prompt tokens, 3 output tokens"
    )


def test_a_model_without_a_tokenizer_has_no_held_out_ids(job, random_model):
    assert held_out_ids(job, random_model) is None


# Speed is measured on what was asked: tokens, batch, repetitions, cache.

FIVE_TOKENS = Workload(batch_size=2, prompt_tokens=8, output_tokens=5, seed=1)


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(1)
    return fresh_model(TINY_CONFIG, torch.float32).eval()


def test_repetitions_are_those_asked_for_and_the_cache_holds_every_token_but_the_last(decoder):
    seen = []
    speed = measure_speed(decoder, FIVE_TOKENS, 3, lambda done, _repetition: seen.append(done))
    assert seen == [1, 2, 3]  # without the warm-up
    assert [len(each.step_seconds) for each in speed.repetitions] == [4, 4, 4]
    layers, kv_heads, head_dim, tokens = 2, 2, 16, 8 + 5 - 1
    assert (
        speed.kv_cache_bytes
        == 2 * layers * FIVE_TOKENS.batch_size * kv_heads * head_dim * tokens * 4
    )


def test_the_prompt_repeats_with_its_seed(decoder):
    assert torch.equal(random_prompt(decoder, FIVE_TOKENS), random_prompt(decoder, FIVE_TOKENS))


def test_figures_are_medians_over_repetitions_of_the_whole_batch():
    times = [(1.0, (0.1,)), (9.0, (0.9,)), (2.0, (0.2,))]
    speed = Speed(FIVE_TOKENS, [Repetition(prefill, steps) for prefill, steps in times])
    assert (speed.ttft_seconds, speed.tpot_seconds) == (2.0, 0.2)

    speed = Speed(FIVE_TOKENS, [Repetition(2.0, (0.5, 0.5))])
    measured = speed.result_metrics()
    assert measured["prefill_tokens_per_second"] == 2 * 8 / 2.0
    assert measured["decode_tokens_per_second"] == 2 / 0.5

    speed = Speed(FIVE_TOKENS, [Repetition(2.0, ())])
    assert "decode_tokens_per_second" not in speed.result_metrics()
    assert "original_ttft_seconds" in Speed(FIVE_TOKENS, [Repetition(1.0, ())]).result_metrics(
        "original_"
    )


# The operator profile: rows of both phases, classes by what bounds them, and the artefact.

RATES = Rates(flops_per_second=1e9, bytes_per_second=1e9)


def event(name="aten::mm", micros=1000.0, shapes=((8, 8), (8, 8)), flops=0, count=1, device=0.0):
    return SimpleNamespace(
        key=name,
        self_cpu_time_total=micros,
        self_device_time_total=device,
        input_shapes=[list(each) for each in shapes],
        flops=flops,
        count=count,
        device_type=SimpleNamespace(name="CPU"),
    )


@pytest.fixture(scope="module")
def report():
    model = fresh_model(TINY_CONFIG, torch.float32).eval()
    return profile_model(model, Workload(2, 16, 4, seed=1))


def test_the_products_of_a_prompt_are_counted_to_the_operation_and_shares_add_up(report):
    layers, hidden, kv, mlp, tokens = 2, 64, 32, 128, 2 * 16
    per_token = layers * (2 * hidden**2 + 2 * hidden * kv + 3 * hidden * mlp)
    head = 2 * 2 * hidden * 512  # the last position of each of two
    products = [row for row in report.of("prefill") if row.name in {"aten::mm", "aten::addmm"}]
    assert sum(row.flops for row in products) == 2 * per_token * tokens + head

    bounds = report.seconds_by_bound("decode")
    assert sum(bounds.values()) == pytest.approx(sum(row.seconds for row in report.of("decode")))
    assert report.decode_steps == 3
    assert report.slowdown_ratio > 0


def test_an_operator_belongs_to_what_takes_its_time_by_the_work_of_its_shapes():
    for name, seconds, flops, moved, bound in (
        ("aten::mm", 1.0, 9e8, 1e8, "compute"),
        ("aten::mm", 1.0, 1e8, 9e8, "memory_bandwidth"),
        ("aten::mm", 1.0, 1e7, 1e7, "overhead"),
        ("aten::view", 1.0, 0.0, 9e9, "overhead"),
    ):
        assert bound_of(name, seconds, flops, moved, RATES) == bound, (name, seconds)

    shapes = [[2, 4, 16, 8], [2, 4, 32, 8], [2, 4, 32, 8]]
    counted = flops_of("aten::_scaled_dot_product_flash_attention_for_cpu", shapes, 0.0, 3)
    assert counted == 3 * 4 * 2 * 4 * 16 * 32 * 8
    assert flops_of("aten::silu", [[2, 2]], 0.0, 1) is None


def test_short_operators_are_one_row_and_time_on_a_device_counts_where_there_is_any():
    rows = rows_of("decode", [event(micros=5.0, device=300.0)], RATES, 4)
    assert rows[0].seconds == pytest.approx(300e-6)
    events = [event(f"aten::op{at}", micros=float(at + 1)) for at in range(MAX_ROWS + 7)]
    rows = rows_of("prefill", events, RATES, 4)
    assert rows[-1].name == "7 others"
    assert math.fsum(row.seconds for row in rows) == pytest.approx(
        sum(each.self_cpu_time_total for each in events) / 1e6
    )
