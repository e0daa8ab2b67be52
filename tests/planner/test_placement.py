"""FlexGen's linear programme: the best shares of weights, cache and activations over the tiers."""

import numpy as np
import pytest

from planner.fitting.pages.offload_examples import T4_HOST, reproduced
from planner.search import suggest
from planner.search.placement import (
    SHARES,
    best_batch,
    best_placement,
    limits_of,
    micro_sizes,
    placed_strategy,
    placement_of,
    programme_of,
    solve,
    tokens_per_second,
)
from planner.specs.estimate import EstimateRequest, PlanRequest
from planner.workload.estimator import estimate_request
from planner.workload.resolve import resolve
from tests.planner.asking import LLAMA_8B, TRAIN, search

GB = 10**9
WORK = {"kind": "generate", "batch_size": 96, "input_tokens": 512, "output_tokens": 32}


def question(model="facebook/opt-30b", batch_size=96, **cluster):
    return EstimateRequest.model_validate(
        {
            "model": model,
            "cluster": {**T4_HOST, **cluster},
            "workload": {**WORK, "batch_size": batch_size},
            "strategy": {"weight_dtype": "fp16", "kv_cache_dtype": "fp16"},
            "engine": "flexgen",
        }
    )


def with_shares(request, micro, **shares):
    strategy = request.strategy.model_copy(update={"micro_batch_size": micro})
    document = {**strategy.model_dump(), "offload": shares}
    return estimate_request(
        EstimateRequest.model_validate({**dict(request), "strategy": document}), explain=False
    )


@pytest.mark.parametrize("row", reproduced(), ids=lambda row: f"{row.engine}-{row.model}")
def test_flexgens_published_rows_come_out_in_their_order_of_magnitude(row):
    assert row.predicted / row.measured < 3
    assert row.predicted / row.measured > 1 / 3


def test_flexgens_own_rows_come_out_within_a_third():
    errors = [abs(row.error) for row in reproduced() if row.engine.startswith("flexgen")]

    assert len(errors) == 6
    assert max(errors) < 1 / 3
    assert np.mean(errors) < 0.2


def test_every_published_policy_is_said_to_fit():
    assert all(row.estimate.fits for row in reproduced())


def test_the_choice_is_at_least_as_fast_as_the_published_policy():
    published = next(
        r for r in reproduced() if (r.engine, r.model) == ("flexgen", "facebook/opt-30b")
    )

    assert (
        tokens_per_second(best_placement(question(batch_size=144))) >= 0.99 * published.predicted
    )


def test_no_random_placement_beats_the_programme():
    request, draws = question(), np.random.default_rng(7)
    best = placement_of(request, 32)
    for _ in range(40):
        weights, cache = draws.dirichlet((1, 1, 1)), draws.dirichlet((1, 1, 1))
        shares = dict(zip(SHARES, (*weights[1:], *cache[1:], draws.random()), strict=True))
        other = with_shares(request, 32, **{name: float(share) for name, share in shares.items()})
        if other.fits:
            assert other.performance.tokens_per_second <= 1.01 * tokens_per_second(best)


def test_a_cost_is_linear_in_the_shares():
    """What the programme relies on: half of every share costs half of every change."""
    request = question()
    whole = with_shares(request, 32, weights_cpu=0.8, kv_cpu=0.4)
    half = with_shares(request, 32, weights_cpu=0.4, kv_cpu=0.2)

    assert half.memory.host_bytes == pytest.approx(whole.memory.host_bytes / 2)


def test_what_fits_stays_on_the_device():
    best = best_placement(question(model="facebook/opt-6.7b", batch_size=2))

    assert sum(getattr(best.offload, name) for name in SHARES) == 0


def test_no_host_and_no_disk_leave_no_placement():
    tiny = question(host_memory_bytes=1 * GB, disk_capacity_bytes=1 * GB)

    assert best_placement(tiny) is None


def test_a_small_host_pushes_the_rest_to_the_disk():
    small = best_placement(question(host_memory_bytes=48 * GB))

    assert small.offload.weights_disk + small.offload.kv_disk > 0.1
    assert small.estimate.memory.host_bytes <= 48 * GB


def test_larger_blocks_are_faster_until_they_no_longer_fit():
    chosen = best_batch(question(), (16, 96, 192))

    assert tokens_per_second(chosen) > tokens_per_second(best_placement(question(batch_size=16)))


def test_micro_batches_divide_the_batch():
    assert set(micro_sizes(96)) == {1, 2, 4, 8, 16, 32, 48, 96}


def test_only_generated_batches_are_placed():
    request = EstimateRequest.model_validate(
        {"model": LLAMA_8B, "cluster": {"device": "t4"}, "workload": TRAIN}
    )

    assert best_placement(request) is None
    assert placed_strategy(request) is None


def test_an_impossible_strategy_has_no_placement():
    request = question().model_copy(update={"engine": "flexgen"})
    wrong = request.strategy.model_copy(update={"tensor_parallel_size": 64})

    assert placed_strategy(request.model_copy(update={"strategy": wrong})) is None


def test_a_programme_without_room_says_so():
    setting = resolve(question())
    nothing = limits_of(setting, 1.0)

    assert solve(programme_of(setting, [32]), nothing, 31.0) == [None]


def test_a_batch_that_does_not_fit_is_told_where_it_would():
    answer = search(
        model="facebook/opt-66b",
        cluster={"device": "t4"},
        workload={**WORK, "batch_size": 4},
        engine="torch",
    )
    titles = [suggestion.title for suggestion in answer.suggestions]

    assert not answer.plans
    assert "weights and cache placed over host memory and disk" in titles


def test_a_suggested_placement_keeps_what_the_host_was_measured_to_do(monkeypatch):
    asked = []
    monkeypatch.setattr(suggest, "placed_strategy", asked.append)
    factors = {"compute": {"factor": 2.0, "spread": 0.1, "n": 9}}
    document = {
        "model": "facebook/opt-66b",
        "cluster": T4_HOST,
        "workload": WORK,
        "host_calibration": {"host": "box", "factors": factors},
    }

    suggest.suggestions(PlanRequest.model_validate(document), lambda _: None)

    assert asked[0].host_calibration.factors["compute"].factor == 2.0
