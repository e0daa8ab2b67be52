"""Laws of a search: more to choose from is never worse, pins are kept, order is as it is said."""

import itertools

import pytest

from planner.api import plan
from planner.search.space import FRUGAL
from planner.specs.estimate import PlanRequest
from planner.specs.workload import Strategy
from tests.planner.asking import (
    GENERATE,
    LLAMA_8B,
    LLAMA_70B,
    MIXTRAL,
    SERVE,
    TRAIN,
    ask,
    document,
    search,
)

GIB = 1024**3
CARD = {
    "id": "card",
    "memory_bytes": 80 * GIB,
    "memory_bandwidth_bytes_per_second": 2e12,
    "peak_flops_per_second": {"bf16": 5e14, "fp8": 1e15, "int8": 1e15},
    "intra_node_bandwidth_bytes_per_second": 300e9,
    "price_usd_per_hour": 2.0,
    "tdp_watts": 700,
}
LOWER_IS_BETTER = {
    "latency": lambda one: one.performance.latency_seconds,
    "throughput": lambda one: -one.performance.tokens_per_second,
    "cost": lambda one: one.cost_usd_per_million_tokens,
    "energy": lambda one: one.energy_joules_per_token,
}


def best(objective, **fields):
    return search(engine="vllm", objective=objective, top=1, **fields).plans[0]


def better(**changes):
    return {**CARD, **changes}


def test_more_devices_never_make_the_best_plan_worse():
    for objective in ("latency", "throughput"):
        figures = [
            LOWER_IS_BETTER[objective](
                best(objective, model=LLAMA_70B, device=CARD, devices=count)
            )
            for count in (1, 2, 4, 8)
        ]
        assert figures == sorted(figures, reverse=True), objective
        assert figures[-1] < figures[0], objective


def test_a_better_card_never_makes_the_best_plan_worse():
    for objective, field in itertools.product(
        ("latency", "throughput", "cost"),
        (
            "memory_bandwidth_bytes_per_second",
            "memory_bytes",
            "intra_node_bandwidth_bytes_per_second",
        ),
    ):
        figure = LOWER_IS_BETTER[objective]
        fields = {"model": LLAMA_70B, "devices": 4}
        before = figure(best(objective, device=CARD, **fields))
        after = figure(best(objective, device=better(**{field: 2 * CARD[field]}), **fields))
        assert after <= before + 1e-9 * abs(before), (objective, field)


def test_what_is_pinned_is_kept_and_never_beats_the_free_choice():
    fields = {"model": LLAMA_70B, "devices": 4}
    free = search(engine="vllm", objective="latency", **fields).plans
    for pins in (
        {"weight_dtype": "bf16"}, {"tensor_parallel_size": 2}, {"kv_cache_dtype": "fp8"},
        {"pipeline_parallel_size": 2, "weight_dtype": "int8"}, {"max_batch_tokens": 4096},
    ):  # fmt: skip
        pinned = search(engine="vllm", objective="latency", pins=pins, **fields).plans
        assert pinned, pins
        for one in pinned:
            assert {name: getattr(one.strategy, name) for name in pins} == pins, pins
        fastest = min(plan.performance.latency_seconds for plan in free)
        assert fastest <= pinned[0].performance.latency_seconds * 1.000001, pins


def test_a_plan_that_is_pinned_as_a_whole_is_the_only_one():
    chosen = search(model=LLAMA_70B, devices=4, engine="vllm").plans[0]
    again = search(model=LLAMA_70B, devices=4, engine="vllm", pins=chosen.strategy.model_dump())
    assert [one.strategy for one in again.plans] == [chosen.strategy]
    assert again.plans[0].performance == chosen.performance


def test_plans_are_numbered_in_the_order_of_the_objective():
    for objective, value_of in LOWER_IS_BETTER.items():
        answer = search(model=LLAMA_70B, devices=4, engine="vllm", objective=objective, top=20)

        figures = [value_of(one) for one in answer.plans]
        assert len(figures) > 3, objective
        assert [one.rank for one in answer.plans] == list(range(1, len(figures) + 1)), objective
        if objective in FRUGAL:
            assert figures == sorted(figures), objective
            continue
        # The first plan starts the checkpoint as it is stored: it is the best of those.
        stored = [one.strategy.weight_dtype == "bf16" for one in answer.plans]
        assert figures[0] == min(f for f, own in zip(figures, stored, strict=True) if own)
        assert figures[1:] == sorted(figures[1:]), objective


def test_asking_for_fewer_plans_shows_the_first_ones_of_more():
    for objective in ("balanced", "throughput", "memory"):
        fields = {"model": LLAMA_70B, "devices": 4, "engine": "vllm", "objective": objective}
        few, many = search(**fields, top=3).plans, search(**fields, top=12).plans
        assert [one.strategy for one in few] == [one.strategy for one in many[:3]], objective


def test_a_looser_promise_never_makes_the_best_plan_worse():
    fields = {"model": LLAMA_70B, "device": CARD, "devices": 4}
    costs = [
        best("cost", **fields, constraints={"tpot_seconds": {"max": limit}})
        for limit in (0.03, 0.05, 0.1, 1.0)
    ]
    figures = [one.cost_usd_per_million_tokens for one in costs]
    assert figures == sorted(figures, reverse=True)
    assert costs[0].performance.tpot_seconds <= 0.03


def test_the_order_in_which_hardware_is_offered_decides_nothing():
    options = [{"device": name, "devices_per_node": 1} for name in ("h100", "a100", "l40s")]
    fields = {"engine": "vllm", "objective": "cost"}
    one = search(**fields, hardware_options=options).plans[0]
    other = search(**fields, hardware_options=options[::-1]).plans[0]
    assert one.cluster == other.cluster
    assert one.strategy == other.strategy


def test_the_best_of_several_machines_is_the_best_of_each_alone():
    names = ["h100-sxm-80gb", "a100-sxm-80gb", "l40s"]
    options = [{"device": name, "devices_per_node": 1} for name in names]
    alone = {name: best("latency", device=name).performance.latency_seconds for name in names}
    found = best("latency", hardware_options=options)
    assert found.cluster.device == min(alone, key=alone.get)
    assert found.performance.latency_seconds == pytest.approx(min(alone.values()))


def dominates(one, other):
    def worth(plan_):
        layout = plan_.strategy
        devices = (
            (layout.data_parallel_size or 1)
            * (layout.tensor_parallel_size or 1)
            * (layout.pipeline_parallel_size or 1)
        )
        loss = plan_.quality.loss_ratio if plan_.quality else 0.0
        return (
            -plan_.performance.tokens_per_second,
            plan_.performance.latency_seconds,
            plan_.memory.per_device_peak_bytes * devices,
            0.01 if loss is None else loss,
        )

    mine, theirs = worth(one), worth(other)
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def test_no_plan_of_the_frontier_is_beaten_in_everything_by_another():
    front = search(model=LLAMA_70B, devices=4, engine="vllm", workload=SERVE).pareto
    assert len(front) > 2
    for one in front:
        assert not any(dominates(other, one) for other in front)


def test_every_plan_of_the_frontier_fits_and_keeps_the_promise():
    promise = {"tpot_seconds": {"max": 0.03}}
    answer = search(model=LLAMA_70B, devices=4, engine="vllm", constraints=promise)
    assert answer.pareto
    for one in answer.pareto:
        again = ask(model=LLAMA_70B, devices=4, engine="vllm", strategy=one.strategy.model_dump())
        assert again.fits
        assert again.performance.tpot_seconds <= 0.03


def test_equal_questions_get_equal_answers():
    for model, workload in (
        (LLAMA_8B, SERVE),
        (MIXTRAL, GENERATE),
        (LLAMA_8B, {**TRAIN, "method": "lora"}),
    ):
        request = PlanRequest.model_validate(document(model=model, devices=4, workload=workload))
        one, other = plan(request), plan(request)
        assert one.plans == other.plans, (model, workload)
        assert one.pareto == other.pareto, (model, workload)
        assert one.rejected == other.rejected, (model, workload)


def test_an_answer_says_which_question_it_is_for():
    answer = search(id="ticket-7", engine="vllm", pins={"weight_dtype": "fp8"})
    assert answer.id == "ticket-7"
    assert answer.request.pins == Strategy(weight_dtype="fp8")
    assert {one.id for one in answer.plans} == {"ticket-7"}


def test_quality_keeps_the_trained_weights_and_memory_takes_the_fewest_bytes():
    answer = search(engine="vllm", objective="quality", top=20)
    assert answer.plans[0].strategy.weight_dtype in {"bf16", "fp16"}
    losses = [one.quality.loss_ratio or 0.0 for one in answer.plans if one.quality]
    assert losses[0] == min(losses)
    one = search(model=LLAMA_70B, devices=4, engine="vllm", objective="memory", top=20).plans
    assert one[0].strategy.weight_dtype in {"int4", "nvfp4", "nf4"}
    assert one[0].strategy.tensor_parallel_size == 1
    assert one[0].strategy.data_parallel_size == 1
