"""Objectives: what each one minimises, and what the frontier keeps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search.question import DTYPES, Rejections, family_numbers, family_of
from planner.search.rank import (
    PENALTIES,
    criteria,
    devices_of,
    frontier,
    merit_of,
    order_of,
)
from planner.specs.workload import Strategy
from planner.workload.layouts import Layout
from tests.planner.asking import CPU, TINY, TRAIN, ask

BASE = ask(engine="vllm")


def variant(rate, latency, peak):
    performance = BASE.performance.model_copy(
        update={"tokens_per_second": rate, "latency_seconds": latency}
    )
    memory = BASE.memory.model_copy(update={"per_device_peak_bytes": peak})
    return BASE.model_copy(update={"performance": performance, "memory": memory})


def imbalance(estimate):
    return merit_of(estimate).imbalance


def test_every_objective_has_a_penalty():
    for penalty in PENALTIES.values():
        assert isinstance(penalty(merit_of(BASE)), float)


def test_devices_in_use_are_the_product_of_the_sizes():
    found = ask(devices=8, strategy={"tensor_parallel_size": 4})

    assert devices_of(found) == 8
    assert merit_of(found).held_bytes == 8 * found.memory.per_device_peak_bytes


def test_somebody_waits_for_a_step_or_a_compression_too():
    step = ask(model=TINY, device=CPU, workload={**TRAIN, "sequence_length": 128})
    job = ask(model=TINY, device=CPU, workload={"kind": "compress", "method": "int8_weight_only"})

    assert merit_of(step).delay == step.performance.step_seconds
    assert merit_of(job).delay == job.performance.duration_seconds
    assert merit_of(job).speed == 1 / job.performance.duration_seconds


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


LAYOUTS = st.builds(
    Strategy,
    weight_dtype=st.sampled_from(DTYPES),
    tensor_parallel_size=st.sampled_from([1, 2, 8]),
    pipeline_parallel_size=st.sampled_from([1, 4, 64]),
    context_parallel_size=st.sampled_from([1, 2, 16]),
    zero_stage=st.integers(0, 3),
    activation_recomputation=st.sampled_from(["none", "selective", "full"]),
    offload=st.sampled_from([{"optimizer": where} for where in ("none", "cpu", "nvme")]),
)


def number_of(strategy):
    layout = Layout(
        tensor=strategy.tensor_parallel_size,
        pipeline=strategy.pipeline_parallel_size,
        context=strategy.context_parallel_size,
        zero_stage=strategy.zero_stage,
    )
    return family_numbers(strategy, layout)


@settings(max_examples=200, deadline=None)
@given(one=LAYOUTS, other=LAYOUTS)
def test_families_have_different_numbers_exactly_where_they_have_different_names(one, other):
    same_name = family_of(one) == family_of(other)

    assert (number_of(one) == number_of(other)) is same_name


def test_of_equals_the_plainer_strategy_goes_first():
    plain, sharded = (
        BASE.model_copy(update={"strategy": Strategy(zero_stage=stage)}) for stage in (0, 2)
    )

    assert order_of(plain, "throughput") < order_of(sharded, "throughput")


def test_rounding_decides_nothing():
    slower = variant(100.0 * (1 - 1e-13), 1.0, 10)

    assert order_of(slower, "throughput") == order_of(variant(100.0, 1.0, 10), "throughput")


def test_an_unknown_price_is_replaced_by_device_seconds():
    unpriced = BASE.model_copy(update={"cost_usd_per_million_tokens": None})

    assert PENALTIES["cost"](merit_of(unpriced)) == merit_of(unpriced).device_seconds
