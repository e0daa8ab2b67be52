"""Objectives: what each one minimises, and what the frontier keeps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search.rank import (
    PENALTIES,
    criteria,
    delay,
    devices_of,
    frontier,
    held_bytes,
    imbalance,
    speed,
)
from planner.search.rejection import Rejections, family_of
from planner.specs.strategy import Strategy
from tests.planner.asking import CPU, TINY, TRAIN, ask

BASE = ask(engine="vllm")


def variant(rate, latency, peak):
    performance = BASE.performance.model_copy(
        update={"tokens_per_second": rate, "latency_seconds": latency}
    )
    memory = BASE.memory.model_copy(update={"per_device_peak_bytes": peak})
    return BASE.model_copy(update={"performance": performance, "memory": memory})


def test_every_objective_has_a_penalty():
    for penalty in PENALTIES.values():
        assert isinstance(penalty(BASE), float)


def test_devices_in_use_are_the_product_of_the_sizes():
    found = ask(devices=8, strategy={"tensor_parallel_size": 4})

    assert devices_of(found) == 8
    assert held_bytes(found) == 8 * found.memory.per_device_peak_bytes


def test_somebody_waits_for_a_step_or_a_compression_too():
    step = ask(model=TINY, device=CPU, workload={**TRAIN, "sequence_length": 128})
    job = ask(model=TINY, device=CPU, workload={"kind": "compress", "method": "int8_weight_only"})

    assert delay(step) == step.performance.step_seconds
    assert delay(job) == job.performance.duration_seconds
    assert speed(job) == 1 / job.performance.duration_seconds


def test_balance_prefers_speed_at_equal_quality():
    assert imbalance(variant(200.0, 1.0, 10)) < imbalance(variant(100.0, 1.0, 10))


def test_balance_lets_coarse_weights_win_only_when_they_are_much_faster():
    coarse = BASE.quality.model_copy(update={"perplexity_ratio": (1.0, 1.1, 1.2)})
    slightly = variant(110.0, 1.0, 10).model_copy(update={"quality": coarse})
    much = variant(300.0, 1.0, 10).model_copy(update={"quality": coarse})
    plain = variant(100.0, 1.0, 10)

    assert imbalance(much) < imbalance(plain) < imbalance(slightly)


POINTS = st.tuples(st.floats(1, 100), st.floats(0.1, 10), st.integers(1, 100))


@settings(max_examples=40, deadline=None)
@given(points=st.lists(POINTS, min_size=1, max_size=12))
def test_the_frontier_is_what_nothing_beats(points):
    estimates = [variant(*point) for point in points]
    values = [criteria(estimate) for estimate in estimates]

    kept = {criteria(estimate) for estimate in frontier(estimates)}

    for own in values:
        dominated = any(
            other != own and all(a <= b for a, b in zip(other, own, strict=True))
            for other in values
        )
        assert (own in kept) is not dominated


@pytest.mark.parametrize(
    ("strategy", "family"),
    [
        (Strategy(weight_dtype="bf16"), "bf16 weights"),
        (
            Strategy(weight_dtype="int8", tensor_parallel_size=4, pipeline_parallel_size=2),
            "int8 weights, tensor parallel 4, pipeline parallel 2",
        ),
        (
            Strategy(weight_dtype="bf16", zero_stage=2, activation_recomputation="full"),
            "bf16 weights, ZeRO 2, full recomputation",
        ),
    ],
)
def test_a_family_is_named_by_its_weights_and_how_they_are_split(strategy, family):
    assert family_of(strategy) == family


def test_of_a_family_the_closest_miss_stays_and_all_are_counted():
    rejections = Rejections()
    for peak in (50, 20, 90):
        rejections.memory(variant(1.0, 1.0, peak), 10)

    (kept,) = rejections.result().values()

    assert kept.required == 20
    assert kept.strategies == 3


def test_a_family_with_a_feasible_member_is_not_rejected():
    rejections = Rejections()
    rejections.memory(variant(1.0, 1.0, 50), 10)
    rejections.accept(BASE.strategy)

    assert rejections.result() == {}
