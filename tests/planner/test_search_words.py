"""What a search says: objectives, reasons, and numbers of rejections that hold when retold."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from planner.api import readable
from planner.search.inverse import Probe, closest_violation, largest_step
from planner.search.question import (
    DTYPES,
    Rejections,
    figure,
    first_violation,
    relative_violation,
    strategy_family_numbers,
    strategy_family_of,
    unit_of,
)
from planner.search.rank import (
    PENALTIES,
    criteria,
    devices_of,
    frontier,
    merit_of,
    order_of,
    reasons,
)
from planner.search.suggest import suggestions
from planner.specs.base import BadRequestError
from planner.specs.estimate import FIGURES, Bound, PlanRequest, Rejection
from planner.specs.workload import Strategy
from planner.workload.layouts import Layout
from tests.planner.asking import (
    CPU,
    GENERATE,
    LLAMA_8B,
    LLAMA_70B,
    SERVE,
    TINY,
    TRAIN,
    ask,
    document,
    search,
)

GIB = 1024**3


def missed(family, required, limit, constraint="memory"):
    return Rejection(
        family=family,
        constraint=constraint,
        reason=f"{required} of {limit}",
        required=required,
        limit=limit,
        unit="B",
    )


def with_figures(estimate, peak, rate):
    performance = estimate.performance.model_copy(update={"tokens_per_second": rate})
    memory = estimate.memory.model_copy(update={"per_device_peak_bytes": peak})
    return estimate.model_copy(update={"performance": performance, "memory": memory})


def test_a_plan_is_compared_with_the_first_by_speed_memory_and_devices():
    first = with_figures(ask(engine="vllm"), 20 * GIB, 100.0)
    other = first.strategy.model_copy(update={"max_batch_tokens": 4096})
    for rate, word in (
        (150.0, "50 % faster than the first plan"),
        (75.0, "25 % slower than the first plan"),
        (100.4, "as fast as the first plan"),
    ):
        second = with_figures(first, 20 * GIB, rate).model_copy(update={"strategy": other})
        assert word in reasons(second, first), (rate, word)

    for peak, word in (
        (18 * GIB, "2.0 GiB less per device"),
        (21 * GIB, "1.0 GiB more per device"),
    ):
        second = with_figures(first, peak, 100.0).model_copy(update={"strategy": other})
        assert word in reasons(second, first), (peak, word)
        assert not [
            one for one in reasons(first, first) if "per device" in one and "fits" not in one
        ]

    first = search(model=LLAMA_70B, devices=2, engine="vllm").plans[0]
    memory = first.memory.per_device_peak_bytes / GIB
    assert first.reasons[0] == f"fits: {memory:.1f} of 80.0 GiB per device"
    assert len(first.reasons) == 2

    plans = search(model=LLAMA_70B, devices=4, engine="vllm", objective="cost", top=20).plans
    sizes = {one.strategy.tensor_parallel_size for one in plans}
    assert len(sizes) > 1
    words = [reason for one in plans[1:] for reason in one.reasons]
    assert any("devices instead of" in word for word in words)


def test_the_closest_miss_is_told_or_every_reason_without_numbers():
    far, near = missed("far", 30.0, 10.0), missed("near", 1100.0, 1000.0)
    found = closest_violation(7, [far, near])
    assert (found.value, found.required, found.limit) == (7, 1100.0, 1000.0)
    assert found.reason.startswith("near: ")
    assert relative_violation(near) == pytest.approx(0.1)
    assert relative_violation(far) == pytest.approx(2.0)

    # What fits and misses a target is nearer to a plan than what does not fit.
    late = missed("late", 9.0, 1.0, "ttft_seconds")
    assert closest_violation(7, [near, late]).constraint == "ttft_seconds"

    words = [
        Rejection(family="a", constraint="applicability", reason="it is dense"),
        Rejection(family="b", constraint="applicability", reason="one device"),
    ]
    found = closest_violation(1, words)
    assert (found.constraint, found.reason) == ("applicability", "it is dense; one device")
    assert closest_violation(1, []).reason == "no strategy applies"


def test_a_value_is_searched_once_and_an_error_keeps_its_field():
    probe = Probe()
    request = PlanRequest.model_validate(document(engine="vllm"))
    answers = [probe.works(1, request) for _ in range(3)]
    assert answers == [True, True, True]
    assert probe.searches == 1
    assert probe.limit(1, "users", None).beyond is None

    request = PlanRequest.model_validate(
        document(devices=3, pins={"tensor_parallel_size": 3, "data_parallel_size": 1})
    )
    assert not probe.works("three", request)
    failure = probe.no["three"]()
    assert failure.constraint == "strategy.tensor_parallel_size"
    assert "is 3" in failure.reason


@given(limit=st.integers(0, 5000), top=st.integers(1, 5000))
def test_a_search_for_the_largest_asks_for_no_number_twice_and_none_beyond_the_top(limit, top):
    asked = []

    def works(number):
        asked.append(number)
        return number <= limit

    assert largest_step(works, top) == min(limit, top)
    assert len(set(asked)) == len(asked)
    assert all(1 <= number <= top for number in asked)


def test_the_smallest_changes_that_help_and_are_not_refused_are_suggested():
    for workload in (SERVE, GENERATE, TRAIN):
        request = PlanRequest.model_validate(document(workload=workload, engine="vllm"))
        assert suggestions(request, lambda _: None) == (), workload

    request = PlanRequest.model_validate(document(workload=GENERATE))

    def refuses(_):
        raise BadRequestError("never", "model")

    assert suggestions(request, refuses) == ()

    request = PlanRequest.model_validate(document(workload={**SERVE, "concurrency": 64}))
    good = ask(engine="vllm")
    titles = [one.title for one in suggestions(request, lambda _: good)]
    host = "10% of the weights in host memory"
    assert titles[:3] == ["vLLM instead of PyTorch", "concurrency 63", "input tokens 1008"]
    assert titles[-1] == host  # last: it costs most of the speed
    assert "2 devices instead of 1" in titles


def test_only_the_step_that_is_suggested_is_searched_for_its_best_plan():
    request = PlanRequest.model_validate(document(workload={**SERVE, "concurrency": 64}))
    good, asked, searched = ask(engine="vllm"), [], []

    def works(changed):
        asked.append(changed.workload.concurrency)
        return changed.workload.concurrency <= 8

    def best(changed):
        searched.append(changed.workload.concurrency)
        return good if works(changed) else None

    found = suggestions(request, best, works)

    assert [one.title for one in found] == ["concurrency 8"]
    assert set(asked) >= {1, 8, 9}
    assert set(searched) == {8}


def test_a_halving_is_found_wherever_it_starts_to_help():
    request = PlanRequest.model_validate(document(workload={**SERVE, "concurrency": 64}))
    good = ask(engine="vllm")
    for least in (1, 3, 6):
        most = 64 >> least
        found = suggestions(
            request, lambda asked, most=most: good if asked.workload.concurrency <= most else None
        )
        assert [one.title for one in found] == [f"concurrency {most}"]
        assert found[0].changes["workload"]["concurrency"] == most


BASE = ask(engine="vllm")


def variant(rate, latency, peak):
    performance = BASE.performance.model_copy(
        update={"tokens_per_second": rate, "latency_seconds": latency}
    )
    memory = BASE.memory.model_copy(update={"per_device_peak_bytes": peak})
    return BASE.model_copy(update={"performance": performance, "memory": memory})


def imbalance(estimate):
    return merit_of(estimate).imbalance


def test_objectives_have_penalties_and_count_devices_and_waits():
    for penalty in PENALTIES.values():
        assert isinstance(penalty(merit_of(BASE)), float)

    found = ask(devices=8, strategy={"tensor_parallel_size": 4})
    assert devices_of(found) == 8
    assert merit_of(found).held_bytes == 8 * found.memory.per_device_peak_bytes

    step = ask(model=TINY, device=CPU, workload={**TRAIN, "sequence_length": 128})
    job = ask(model=TINY, device=CPU, workload={"kind": "compress", "method": "int8_weight_only"})
    assert merit_of(step).delay == step.performance.step_seconds
    assert merit_of(job).delay == job.performance.duration_seconds
    assert merit_of(job).speed == 1 / job.performance.duration_seconds


def test_balance_prefers_speed_at_equal_quality_and_much_speed_for_coarse_weights():
    assert imbalance(variant(200.0, 1.0, 10)) < imbalance(variant(100.0, 1.0, 10))
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


def test_a_family_is_named_by_its_weights_and_how_they_are_split():
    for strategy, family in (
        (Strategy(weight_dtype="bf16"), "bf16 weights"),
        (
            Strategy(weight_dtype="int8", tensor_parallel_size=4, pipeline_parallel_size=2),
            "int8 weights, tensor parallel 4, pipeline parallel 2",
        ),
        (
            Strategy(weight_dtype="bf16", zero_stage=2, activation_recomputation="full"),
            "bf16 weights, ZeRO 2, full recomputation",
        ),
    ):
        assert strategy_family_of(strategy) == family, (strategy, family)


def test_of_a_family_the_closest_miss_stays():
    rejections = Rejections()
    for peak in (50, 20, 90):
        rejections.add_memory(variant(1.0, 1.0, peak), 10)
    (kept,) = rejections.result().values()
    assert kept.required == 20
    assert kept.strategies == 3


def test_what_takes_the_most_memory_is_said_in_its_number():
    for term, words in (("weights", "weights take"), ("kv_cache", "the KV cache takes")):
        rejections = Rejections()
        memory = BASE.memory.model_copy(update={"breakdown_bytes": {term: 2**30, "overhead": 1}})
        rejections.add_memory(BASE.model_copy(update={"memory": memory}), 1)
        (kept,) = rejections.result().values()
        assert kept.reason.endswith(f"; {words} 1.0 GiB"), kept.reason


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
    return strategy_family_numbers(strategy, layout)


@settings(max_examples=200, deadline=None)
@given(one=LAYOUTS, other=LAYOUTS)
def test_families_have_different_numbers_exactly_where_they_have_different_names(one, other):
    same_name = strategy_family_of(one) == strategy_family_of(other)
    assert (number_of(one) == number_of(other)) is same_name


def test_of_equals_the_plainer_goes_first_and_neither_rounding_nor_a_price_decides():
    plain, sharded = (
        BASE.model_copy(update={"strategy": Strategy(zero_stage=stage)}) for stage in (0, 2)
    )
    assert order_of(plain, "throughput") < order_of(sharded, "throughput")
    slower = variant(100.0 * (1 - 1e-13), 1.0, 10)
    assert order_of(slower, "throughput") == order_of(variant(100.0, 1.0, 10), "throughput")
    unpriced = BASE.model_copy(update={"cost_usd_per_million_tokens": None})
    assert PENALTIES["cost"](merit_of(unpriced)) == merit_of(unpriced).device_seconds


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


def test_rejections_for_memory_would_not_have_fitted_and_say_the_figures_of_their_fields():
    for device in ("rtx-4090", "a100-sxm-80gb", "h100-sxm-80gb"):
        answer = search(model=LLAMA_70B, device=device, engine="vllm", workload=SERVE)
        capacity = ask(device=device).memory.capacity_bytes
        for one in numbered(answer).values():
            assert one.constraint == "memory", device
            assert one.unit == "B", device
            assert one.limit < capacity, device
            assert one.required > one.limit, device

    one = search(model=LLAMA_70B, engine="vllm").rejected["bf16 weights"]
    need, usable, share = gib_in(one.reason)
    assert need == pytest.approx(one.required / GIB, abs=0.05)
    assert usable == pytest.approx(one.limit / GIB, abs=0.05)
    # 70.6 billion parameters in two bytes are 131.4 GiB.
    assert share == pytest.approx(70.55e9 * 2 / GIB, rel=0.001)
    assert "weights take" in one.reason


def test_a_rejection_names_the_tensors_the_time_the_rate_or_the_limit():
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

    pins = {
        "weight_dtype": "bf16",
        "kv_cache_dtype": "bf16",
        "chunked_prefill": True,
        "max_batch_tokens": 8192,
    }
    for name in ("tpot_seconds", "ttft_seconds", "latency_seconds"):
        limit = getattr(ask(engine="vllm", strategy=pins).performance, name) / 2
        one = search(engine="vllm", pins=pins, constraints={name: {"max": limit}}).rejected
        rejected = one["bf16 weights"]
        assert (rejected.constraint, rejected.limit, rejected.unit) == (name, limit, "s"), name
        assert rejected.required == pytest.approx(2 * limit), name
        assert rejected.reason.startswith(f"{name} is "), name

    bound = {"tokens_per_second": {"min": 1e6}}

    answer = search(engine="vllm", constraints=bound)

    assert answer.plans == ()
    for one in numbered(answer).values():
        assert one.limit == 1e6
        assert one.required < one.limit
        assert one.unit == "1/s"

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


def test_the_limit_that_is_named_is_the_one_that_was_missed():
    for bound, found in (
        (Bound(max=100.0), None), (Bound(min=10.0), None), (Bound(max=1.0), 1.0),
        (Bound(min=1e9), 1e9), (Bound(min=1e9, max=1.0), 1.0),
    ):  # fmt: skip
        estimate = ask(model=TINY, device=CPU, workload=GENERATE)
        estimate = estimate.model_copy(
            update={"performance": estimate.performance.model_copy(update={"ttft_seconds": 50.0})}
        )
        miss = first_violation(estimate, {"ttft_seconds": bound})
        assert miss == (None if found is None else ("ttft_seconds", 50.0, found)), (bound, found)


def test_a_percentile_that_another_limit_left_unsimulated_is_no_violation():
    found = ask(engine="vllm")
    times = {"ttft_seconds": 0.7, "tpot_seconds": 0.2}
    times |= {"ttft_p95_seconds": None, "tpot_p95_seconds": None}
    found = found.model_copy(update={"performance": found.performance.model_copy(update=times)})
    limits = {"ttft_p95_seconds": Bound(max=1.0), "tpot_p95_seconds": Bound(max=0.05)}
    assert first_violation(found, limits) == ("tpot_p95_seconds", None, 0.05)
    limits["tpot_p95_seconds"] = Bound(max=0.5)
    assert first_violation(found, limits) == ("ttft_p95_seconds", None, 1.0)


def test_what_is_exactly_at_a_limit_keeps_it_and_a_missing_figure_breaks_any():
    found = ask(engine="vllm")
    exactly = found.performance.ttft_seconds
    assert first_violation(found, {"ttft_seconds": Bound(min=exactly, max=exactly)}) is None
    found = ask(workload=GENERATE)
    assert first_violation(found, {"mfu": Bound(min=0.0)}) == ("mfu", None, 0.0)
    assert search(workload=GENERATE, constraints={"mfu": {"min": 0.0}}).plans == ()


def test_every_figure_of_a_constraint_is_read_and_a_misspelt_one_told_its_name():
    found = ask(engine="vllm")

    for name in FIGURES:
        value = figure(found, name)
        assert value is None or isinstance(value, float), name
    assert figure(found, "per_device_peak_bytes") == found.memory.per_device_peak_bytes
    assert unit_of("run_cost_usd") == "USD"
    assert unit_of("mfu") == ""

    with pytest.raises(ValidationError) as caught:
        search(constraints={"ttft": {"max": 1.0}})
    refused = readable(caught.value, PlanRequest)
    assert refused.field == "constraints.ttft"
    assert "nearest: ttft_seconds" in refused.message


def test_a_rate_above_what_is_served_is_a_target_that_no_plan_meets():
    load = {key: value for key, value in SERVE.items() if key != "concurrency"}
    answer = search(workload={**load, "request_rate_per_second": 1000.0}, engine="vllm")
    assert answer.plans == ()
    for one in numbered(answer).values():
        assert one.constraint == "requests_per_second"
        assert one.required < one.limit == pytest.approx(1000.0)
    assert all(suggestion.purpose == "target" for suggestion in answer.suggestions)
    assert answer.suggestions

    most = max(one.required for one in numbered(answer).values())
    assert search(workload={**load, "request_rate_per_second": most / 2}, engine="vllm").plans


def test_an_own_limit_goes_before_the_services_and_a_pinned_strategy_is_rejected_as_itself():
    workload = {**SERVE, "ttft_slo_seconds": 1e-6}
    assert search(workload=workload).plans == ()
    assert search(workload=workload, constraints={"ttft_seconds": {"max": 60.0}}).plans

    pins = {"weight_dtype": "bf16", "kv_cache_dtype": "bf16", "tensor_parallel_size": 2}
    pins |= {"max_batch_tokens": 8192}
    answer = search(model=LLAMA_70B, device="rtx-4090", devices=2, engine="vllm", pins=pins)
    found = ask(model=LLAMA_70B, device="rtx-4090", devices=2, engine="vllm", strategy=pins)
    (one,) = numbered(answer).values()
    assert one.family == "bf16 weights, tensor parallel 2"
    assert one.required == found.memory.per_device_peak_bytes
    assert not found.fits
