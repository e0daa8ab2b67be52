"""The search: what it offers fits, what it rejects has a reason, what it suggests is proven."""

import pytest
from pydantic import ValidationError

from planner.api import estimate, readable
from planner.search.engine import explore
from planner.search.rank import criteria, frontier
from planner.specs.base import NotPossibleError, UnknownModelError
from planner.specs.estimate import EstimateRequest, PlanRequest
from tests.planner.asking import (
    CPU,
    GENERATE,
    LLAMA_70B,
    LLAMA_405B,
    MIXTRAL,
    SERVE,
    TINY,
    TRAIN,
    document,
    search,
)


def test_every_plan_offered_re_checks_as_feasible():
    request = {"model": LLAMA_70B, "devices": 8, "engine": "vllm"}
    for plan in search(**request, top=10).plans:
        again = document(**request, strategy=plan.strategy.model_dump())
        assert estimate(EstimateRequest.model_validate(again)).fits


def test_an_estimate_of_the_planned_strategy_says_the_same():
    plan = search(model=LLAMA_70B, devices=8, engine="vllm").plans[0]
    again = document(
        model=LLAMA_70B, devices=8, engine="vllm", strategy=plan.strategy.model_dump()
    )
    assert estimate(EstimateRequest.model_validate(again)).performance == plan.performance


def test_the_first_plan_is_the_best_of_all_by_its_objective():
    request = {"model": LLAMA_70B, "devices": 2, "engine": "vllm", "top": 100}
    for objective, figure in (
        ("throughput", lambda plan: -plan.performance.tokens_per_second),
        ("latency", lambda plan: plan.performance.latency_seconds),
        ("energy", lambda plan: plan.energy_joules_per_token),
        ("memory", lambda plan: plan.memory.per_device_peak_bytes * _devices(plan)),
    ):
        best = search(**request, objective=objective).plans
        others = search(**request, objective="quality").plans
        # Unless the objective is to save, the first plan starts the checkpoint as it is stored.
        own = [plan for plan in others if plan.strategy.weight_dtype == "bf16"]
        assert figure(best[0]) <= min(figure(plan) for plan in own), (objective, figure)
        assert min(map(figure, best)) <= min(map(figure, others)), (objective, figure)


def _devices(plan):
    strategy = plan.strategy
    sizes = strategy.data_parallel_size, strategy.tensor_parallel_size
    return sizes[0] * sizes[1] * strategy.pipeline_parallel_size


def test_a_target_for_requests_refuses_work_without_requests_and_simulates_none_of_it():
    """Every strategy of a training was estimated anew: minutes on 64 devices."""
    for workload in (TRAIN, GENERATE):
        for target in ({"slo_attainment_ratio": {"min": 0.9}}, {"ttft_p95_seconds": {"max": 9e9}}):
            asked = document(devices=4, workload=workload, constraints=target)
            state = explore(PlanRequest.model_validate(asked))
            assert state.rejected
            assert not len(state.table.feasible)
            assert not state.table.simulated, (workload["kind"], target)


def test_what_does_not_fit_or_apply_is_rejected_with_numbers_or_a_reason():
    rejected = search(model=LLAMA_70B, engine="vllm").rejected["bf16 weights"]
    assert rejected.constraint == "memory"
    assert rejected.required > rejected.limit > 0
    assert "GiB" in rejected.reason

    for answer in (search(model=LLAMA_405B), search(model=TINY, device=CPU)):
        assert answer.rejected
        assert all(rejection.reason for rejection in answer.rejected.values())

    rejected = search().rejected
    assert "this one is dense" in rejected["expert_parallel"].reason
    assert "this cluster has 1" in rejected["tensor_parallel"].reason


def test_one_number_of_requests_rules_the_speed_the_words_and_the_export_of_tight_memory():
    request = {"model": LLAMA_70B, "device": "rtx-3090", "devices": 2, "engine": "vllm"}
    pinned = {"weight_dtype": "int4"}
    load = {"kind": "serve", "input_tokens": 1024, "output_tokens": 256, "concurrency": 16}
    plan = search(**request, workload=load).plans[0]
    held, figures = plan.performance.max_concurrency, plan.performance
    assert f"memory holds {held} requests at once, 16 are offered: the rest wait" in plan.warnings
    assert figures.output_tokens_per_second <= held / figures.tpot_seconds

    # A smaller step than the default leaves memory to more requests.
    default = search(**request, workload=load, pins={**pinned, "max_batch_tokens": 8192}).plans[0]
    assert plan.strategy.max_batch_tokens < 8192
    assert held > default.performance.max_concurrency
    assert figures.tokens_per_second > default.performance.tokens_per_second

    # An engine does not start with a longest request that its cache does not hold.
    for longest, fits in ((2560, True), (65536, False)):
        stated = {**load, "max_request_tokens": longest}
        answer = search(**request, workload=stated, pins=pinned)
        assert bool(answer.plans) is fits, longest


def test_a_sparse_model_is_offered_expert_parallelism():
    answer = search(model=MIXTRAL, devices=4, engine="vllm", top=50)
    assert any("expert_parallel" in plan.techniques for plan in answer.plans)


def test_an_infeasible_request_is_told_proven_changes_and_of_adapters_where_they_train():
    answer = search(model=LLAMA_405B, engine="vllm")
    assert answer.plans == ()
    assert answer.suggestions
    assert all(suggestion.estimate.fits for suggestion in answer.suggestions)

    titles = [s.title for s in search(device="rtx-4090", workload=TRAIN).suggestions]
    assert "method lora" in titles

    answer = search(model=LLAMA_70B, engine="vllm", pins={"weight_dtype": "bf16"})
    assert "weights in fp8" in [suggestion.title for suggestion in answer.suggestions]

    pretrain = {**TRAIN, "method": "pretrain"}
    titles = [s.title for s in search(device="rtx-4090", workload=pretrain).suggestions]
    assert titles
    assert not {"method lora", "method qlora"} & set(titles)


def test_pins_hold_and_an_impossible_one_is_named():
    answer = search(devices=8, pins={"tensor_parallel_size": 4, "weight_dtype": "int8"})
    assert {plan.strategy.tensor_parallel_size for plan in answer.plans} == {4}
    assert {plan.strategy.weight_dtype for plan in answer.plans} == {"int8"}
    with pytest.raises(NotPossibleError, match="tensor_parallel_size is 3"):
        search(devices=3, pins={"tensor_parallel_size": 3, "data_parallel_size": 1})


def test_constraints_hold_and_reject_with_numbers():
    loose = search(devices=8, engine="vllm", top=100)
    limit = min(plan.performance.tpot_seconds for plan in loose.plans) * 1.1
    tight = search(devices=8, engine="vllm", top=100, constraints={"tpot_seconds": {"max": limit}})
    assert 0 < len(tight.plans) < len(loose.plans)
    assert all(plan.performance.tpot_seconds <= limit for plan in tight.plans)
    assert any(r.constraint == "tpot_seconds" for r in tight.rejected.values())


def test_constraints_on_quality_and_service_hold_and_others_are_refused():
    answer = search(constraints={"quality_loss_ratio": {"max": 0.002}}, top=50)
    assert answer.plans
    assert all(plan.strategy.weight_dtype != "int4" for plan in answer.plans)
    with pytest.raises(ValidationError) as caught:
        search(constraints={"tpot_second": {"min": 1}})
    refused = readable(caught.value, PlanRequest)
    assert (refused.field, "tpot_seconds" in refused.message) == ("constraints.tpot_second", True)
    answer = search(workload={**SERVE, "tpot_slo_seconds": 1e-6}, engine="vllm")
    assert answer.plans == ()


def test_hardware_options_compete():
    options = [{"device": "h100-sxm-80gb"}, {"device": "l4", "devices_per_node": 2}]
    answer = search(hardware_options=options, engine="vllm", objective="throughput", top=20)
    assert {plan.cluster.device for plan in answer.plans} == {"h100-sxm-80gb", "l4"}
    assert answer.plans[0].cluster.device == "h100-sxm-80gb"


def test_the_frontier_is_exact_and_of_equals_keeps_one():
    answer = search(devices=4, engine="vllm", top=100)
    values = [criteria(plan) for plan in answer.pareto]

    for mine in values:
        beaten = [
            v for v in values if v != mine and all(a <= b for a, b in zip(v, mine, strict=True))
        ]
        assert not beaten

    plan = search().plans[0]
    assert len(frontier([plan, plan, plan])) == 1


def test_plans_come_from_different_families():
    plans = search(devices=8, engine="vllm", top=10).plans
    layouts = [
        (
            p.strategy.weight_dtype,
            p.strategy.tensor_parallel_size,
            p.strategy.pipeline_parallel_size,
        )
        for p in plans
    ]

    assert len(layouts) == len(set(layouts))


def test_our_own_runner_on_a_processor_offers_what_its_jobs_can_do():
    answer = search(model=TINY, device=CPU, workload=GENERATE, top=10)
    assert {p.strategy.weight_dtype for p in answer.plans} == {"fp32", "bf16", "int8", "int4"}
    workload = {**TRAIN, "sequence_length": 256}
    answer = search(model=TINY, device=CPU, workload=workload, top=50)
    assert answer.plans[0].strategy.compute_dtype == "bf16"


def test_a_plan_says_what_it_costs_against_the_first_and_no_faster_by_nothing():
    plans = search(devices=8, engine="vllm").plans
    assert any("the first plan" in reason for reason in plans[1].reasons)
    plans = search(devices=8, engine="vllm", top=50).plans
    said = [reason for plan in plans for reason in plan.reasons]
    assert not any(reason.startswith("0 %") for reason in said)


def test_an_answer_says_how_much_was_searched_and_survives_json():
    searched = search(devices=8, engine="vllm").searched
    assert searched.strategies > 20
    assert searched.seconds > 0
    with pytest.raises(UnknownModelError):
        search(model="nobody/nothing")
    answer = search(devices=2)
    assert type(answer).model_validate_json(answer.model_dump_json()) == answer


def test_training_on_many_devices_is_laid_out_in_every_way():
    """405B on 1,024 devices: every kind of parallelism is in the space, and a plan is found."""
    cluster = {"device": "h100-sxm-80gb", "devices_per_node": 8, "nodes": 128}
    workload = {**TRAIN, "sequence_length": 8192, "global_batch_size": 2048}
    answer = search(model=LLAMA_405B, cluster=cluster, workload=workload, engine="megatron")
    assert answer.plans
    assert answer.searched.strategies > 100_000
