"""Rejected families: their numbers are true when somebody estimates the family again."""

import re
from itertools import pairwise

import pytest

from planner.errors import BadRequestError
from planner.search.question import FIGURES, figure, first_violation, unit_of
from planner.specs.estimate import Bound
from tests.planner.asking import (
    CPU,
    GENERATE,
    LLAMA_8B,
    LLAMA_70B,
    SERVE,
    TINY,
    TRAIN,
    ask,
    search,
)

GIB = 1024**3
H100_USABLE = 0.9 * 80 * GIB  # vLLM's documented gpu_memory_utilization of 0.9


def numbered(answer):
    found = {name: one for name, one in answer.rejected.items() if one.required is not None}
    assert found, "no family is rejected by a number"
    return found


def gib_in(reason):
    return [float(number) for number in re.findall(r"([\d.]+) GiB", reason)]


def test_the_need_of_a_family_is_what_an_estimate_of_it_holds():
    rejected = search(model=LLAMA_70B, engine="vllm").rejected["bf16 weights"]

    peaks = [
        ask(
            model=LLAMA_70B,
            engine="vllm",
            strategy={"weight_dtype": "bf16", "kv_cache_dtype": cache},
        ).memory.per_device_peak_bytes
        for cache in ("bf16", "fp8")
    ]
    assert rejected.required == min(peaks)
    assert rejected.limit == H100_USABLE


@pytest.mark.parametrize("device", ["rtx-4090", "a100-sxm-80gb", "h100-sxm-80gb"])
def test_no_family_is_rejected_for_memory_that_would_have_been_enough(device):
    answer = search(model=LLAMA_70B, device=device, engine="vllm", workload=SERVE)

    capacity = ask(device=device).memory.capacity_bytes
    for one in numbered(answer).values():
        assert one.constraint == "memory"
        assert one.unit == "B"
        assert one.limit < capacity
        assert one.required > one.limit


def test_the_words_of_a_rejection_have_the_figures_of_its_fields():
    one = search(model=LLAMA_70B, engine="vllm").rejected["bf16 weights"]

    need, usable, share = gib_in(one.reason)

    assert need == pytest.approx(one.required / GIB, abs=0.05)
    assert usable == pytest.approx(one.limit / GIB, abs=0.05)
    # 70.6 billion parameters in two bytes are 131.4 GiB.
    assert share == pytest.approx(70.55e9 * 2 / GIB, rel=0.001)
    assert "weights take" in one.reason


def test_training_names_the_tensors_that_take_the_most():
    fields = {"device": "h100-sxm-80gb", "workload": {**TRAIN, "global_batch_size": 1}}
    pins = {"weight_dtype": "bf16", "activation_recomputation": "full"}

    answer = search(**fields, engine="torchtitan", pins=pins)

    for family, one in numbered(answer).items():
        share = 1.0 if "activations in host memory" in family else 0.0
        strategy = {**pins, "micro_batch_size": 1, "offload": {"activations_cpu": share}}
        found = ask(**fields, engine="torchtitan", strategy=strategy)
        name = max(found.memory.breakdown_bytes.items(), key=lambda item: item[1])[0]
        assert name.replace("_", " ") in one.reason
        assert one.required == found.memory.per_device_peak_bytes


@pytest.mark.parametrize("name", ["tpot_seconds", "ttft_seconds", "latency_seconds"])
def test_a_family_that_is_too_slow_is_rejected_with_the_time_it_takes(name):
    pins = {
        "weight_dtype": "bf16",
        "kv_cache_dtype": "bf16",
        "chunked_prefill": True,
        "max_batch_tokens": 8192,
    }
    limit = getattr(ask(engine="vllm", strategy=pins).performance, name) / 2

    one = search(engine="vllm", pins=pins, constraints={name: {"max": limit}}).rejected

    rejected = one["bf16 weights"]
    assert (rejected.constraint, rejected.limit, rejected.unit) == (name, limit, "s")
    assert rejected.required == pytest.approx(2 * limit)
    assert rejected.reason.startswith(f"{name} is ")


def test_a_rate_that_is_too_low_is_rejected_by_its_lower_limit():
    bound = {"tokens_per_second": {"min": 1e6}}

    answer = search(engine="vllm", constraints=bound)

    assert answer.plans == ()
    for one in numbered(answer).values():
        assert one.limit == 1e6
        assert one.required < one.limit
        assert one.unit == "1/s"


def test_a_limit_on_memory_below_the_cards_own_rejects_by_that_limit():
    bound = {"per_device_peak_bytes": {"max": 10 * GIB}}

    answer = search(engine="vllm", constraints=bound)

    wide = answer.rejected["bf16 weights"]
    assert (wide.constraint, wide.limit) == ("per_device_peak_bytes", 10 * GIB)
    assert wide.required > 8.03e9 * 2  # the bare weights already
    assert all(plan.memory.per_device_peak_bytes <= 10 * GIB for plan in answer.plans)


def test_a_looser_limit_rejects_no_family_that_a_tighter_one_accepts():
    families = []
    for limit in (0.006, 0.007, 0.009, 0.012):
        answer = search(engine="vllm", constraints={"tpot_seconds": {"max": limit}})
        families.append({name for name, one in answer.rejected.items() if one.required})

    for tight, loose in pairwise(families):
        assert loose <= tight
    assert families[0] > families[-1]


def test_no_offered_plan_belongs_to_a_rejected_family():
    answer = search(model=LLAMA_70B, engine="vllm", devices=4, top=50)

    single = {name for name in numbered(answer) if "parallel" not in name}
    alone = {
        f"{plan.strategy.weight_dtype} weights"
        for plan in answer.plans
        if plan.strategy.tensor_parallel_size == plan.strategy.pipeline_parallel_size == 1
    }
    assert alone
    assert "bf16 weights" in single
    assert not single & alone


def test_the_strategies_of_rejected_families_are_among_those_searched():
    answer = search(model=LLAMA_70B, engine="vllm", devices=2)

    counted = sum(one.strategies for one in numbered(answer).values())

    assert 0 < counted <= answer.searched.strategies


def test_a_processor_rejects_by_its_own_memory():
    small = {**CPU, "memory_bytes": 8 * GIB}

    answer = search(model=LLAMA_8B, device=small, workload=GENERATE)

    for one in numbered(answer).values():
        assert one.limit <= 8 * GIB
        assert one.required > one.limit


@pytest.mark.parametrize(
    ("bound", "found"),
    [
        (Bound(max=100.0), None),
        (Bound(min=10.0), None),
        (Bound(max=1.0), 1.0),
        (Bound(min=1e9), 1e9),
        (Bound(min=1e9, max=1.0), 1.0),
    ],
)
def test_the_limit_that_is_named_is_the_one_that_was_missed(bound, found):
    estimate = ask(model=TINY, device=CPU, workload=GENERATE)
    estimate = estimate.model_copy(
        update={"performance": estimate.performance.model_copy(update={"ttft_seconds": 50.0})}
    )

    miss = first_violation(estimate, {"ttft_seconds": bound})

    assert miss == (None if found is None else ("ttft_seconds", 50.0, found))


def test_what_is_exactly_at_a_limit_keeps_it():
    found = ask(engine="vllm")
    exactly = found.performance.ttft_seconds

    assert first_violation(found, {"ttft_seconds": Bound(min=exactly, max=exactly)}) is None


def test_a_figure_that_a_workload_does_not_have_breaks_any_limit_on_it():
    found = ask(workload=GENERATE)

    assert first_violation(found, {"mfu": Bound(min=0.0)}) == ("mfu", None, 0.0)
    assert search(workload=GENERATE, constraints={"mfu": {"min": 0.0}}).plans == ()


def test_every_figure_of_a_constraint_can_be_read_from_an_estimate():
    found = ask(engine="vllm")

    for name in FIGURES:
        value = figure(found, name)
        assert value is None or isinstance(value, float), name
    assert figure(found, "per_device_peak_bytes") == found.memory.per_device_peak_bytes
    assert unit_of("run_cost_usd") == "USD"
    assert unit_of("mfu") == ""


def test_a_misspelt_constraint_is_told_its_right_name():
    with pytest.raises(BadRequestError, match="ttft_seconds") as caught:
        search(constraints={"ttft": {"max": 1.0}})

    assert caught.value.field == "constraints.ttft"
    assert "'ttft'" in caught.value.message


def test_an_own_limit_on_the_first_token_goes_before_the_objective_of_the_service():
    workload = {**SERVE, "ttft_slo_seconds": 1e-6}

    assert search(workload=workload).plans == ()
    assert search(workload=workload, constraints={"ttft_seconds": {"max": 60.0}}).plans


def test_a_pinned_strategy_that_is_too_large_is_rejected_as_itself():
    pins = {"weight_dtype": "bf16", "kv_cache_dtype": "bf16", "tensor_parallel_size": 2}

    answer = search(model=LLAMA_70B, device="rtx-4090", devices=2, engine="vllm", pins=pins)

    found = ask(model=LLAMA_70B, device="rtx-4090", devices=2, engine="vllm", strategy=pins)
    (one,) = numbered(answer).values()
    assert one.family == "bf16 weights, tensor parallel 2"
    assert one.required == found.memory.per_device_peak_bytes
    assert not found.fits
