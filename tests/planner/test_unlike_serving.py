"""Serving over unlike nodes: replicas of unlike speed share requests, pipelines share layers."""

import itertools
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from planner.api import plan
from planner.cost.quantity import NullLedger
from planner.specs.base import NotCoveredError
from planner.specs.estimate import EstimateRequest, PlanRequest
from planner.workload.costing import estimate_request
from planner.workload.disaggregate import replica_shares
from planner.workload.generate import generate
from planner.workload.inference_memory import stage_limits
from planner.workload.resolve import resolve
from planner.workload.serve import saturation_rate, serve
from tests.planner.asking import GENERATE, LLAMA_8B, SERVE
from tests.plugins import extent

FAST = {"device": "h100-sxm-80gb", "devices_per_node": 2}
SLOW = {"device": "a100-sxm-80gb", "devices_per_node": 2}
SMALL = {"device": "a100-sxm4-40gb"}
MIXED = {**FAST, "other_nodes": [SLOW]}
PAIR = {"device": "h100-sxm-80gb", "other_nodes": [SMALL]}
OPEN = {**SERVE, "concurrency": None, "request_rate_per_second": 4.0}
FULL = {**SERVE, "concurrency": None}
BURST = {**FULL, "burst_requests": 64}
BATCH = {**GENERATE, "batch_size": 64}
GEMMA = "google/gemma-2-27b-it"
LOADS = {"closed": SERVE, "open": OPEN, "full": FULL, "burst": BURST, "batch": BATCH}


def request(cluster, workload=SERVE, model=LLAMA_8B, **strategy):
    document = {"model": model, "cluster": cluster, "workload": workload, "engine": "vllm"}
    return EstimateRequest.model_validate({**document, "strategy": strategy})


def served(cluster, workload=SERVE, *, explain=False, model=LLAMA_8B, **strategy):
    return estimate_request(request(cluster, workload, model, **strategy), explain=explain)


def parts(cluster, workload=SERVE, model=LLAMA_8B, **strategy):
    setting = resolve(request(cluster, workload, model, **strategy))
    return replica_shares(setting, setting.workload), setting.workload


def alone(part, workload):
    """Return the figures of one kind of replica with its share of the requests."""
    return serve(part.setting, part.load(workload), NullLedger()).performance


def test_alike_nodes_named_apart_cost_the_same_and_each_kind_serves_whole_replicas():
    for layout, load in itertools.product(
        ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}), LOADS
    ):
        together = served({**FAST, "nodes": 2}, LOADS[load], **layout)
        apart = served({**FAST, "other_nodes": [FAST]}, LOADS[load], **layout)
        assert apart.performance == together.performance, (layout, load)
        assert apart.memory.per_device_peak_bytes == together.memory.per_device_peak_bytes

    memory = served(MIXED, tensor_parallel_size=2).memory
    assert memory.per_stage_layers == (32, 32)
    assert [one[:4] for one in memory.per_stage_devices] == ["h100", "a100"]


def test_requests_are_shared_in_proportion_to_the_most_that_each_kind_serves():
    (fast, slow), workload = parts(MIXED, OPEN, tensor_parallel_size=1)
    most = [
        saturation_rate(
            part.setting,
            workload,
            serve(part.setting, workload, NullLedger()).performance.max_concurrency / 2,
        )
        for part in (fast, slow)
    ]

    assert fast.share > slow.share
    assert fast.share / slow.share == pytest.approx(most[0] / most[1])
    assert fast.share + slow.share == pytest.approx(1.0)


def test_rates_callers_and_bursts_of_both_kinds_add_up():
    for load in ("closed", "open", "full"):
        both, workload = parts(MIXED, LOADS[load], tensor_parallel_size=2)
        whole = served(MIXED, LOADS[load], tensor_parallel_size=2).performance
        each = [alone(part, workload).requests_per_second for part in both]
        assert whole.requests_per_second == pytest.approx(sum(each)), load
        assert whole.tokens_per_second == pytest.approx(128 * sum(each)), load

    # Little's law over both kinds: rate times latency is the concurrency.
    found = served(MIXED, tensor_parallel_size=2).performance
    assert found.requests_per_second * found.latency_seconds == pytest.approx(16)

    both, workload = parts(MIXED, BURST, tensor_parallel_size=2)
    whole = served(MIXED, BURST, tensor_parallel_size=2).performance
    ends = [64 * part.share / alone(part, workload).requests_per_second for part in both]
    assert whole.requests_per_second == pytest.approx(64 / max(ends))


def test_a_mean_time_counts_every_request_once():
    for name, load in itertools.product(
        ("ttft_seconds", "tpot_seconds", "latency_seconds"), ("closed", "open", "full")
    ):
        both, workload = parts(MIXED, LOADS[load], tensor_parallel_size=2)
        fast, slow = (alone(part, workload) for part in both)
        rates = np.array([fast.requests_per_second, slow.requests_per_second])
        whole = served(MIXED, LOADS[load], tensor_parallel_size=2).performance
        times = [getattr(fast, name), getattr(slow, name)]
        assert getattr(whole, name) == pytest.approx(np.average(times, weights=rates))


def test_a_batch_is_shared_so_that_both_kinds_end_together():
    both, workload = parts(MIXED, BATCH, tensor_parallel_size=2)
    ends = [
        generate(part.setting, part.load(workload), NullLedger()).performance.latency_seconds
        for part in both
    ]
    whole = served(MIXED, BATCH, tensor_parallel_size=2).performance
    assert ends[0] == pytest.approx(ends[1], rel=0.02)
    assert whole.latency_seconds == pytest.approx(max(ends))


def test_a_fast_kind_with_little_memory_leaves_the_rest_of_a_batch_to_the_other():
    cluster = {"device": "rtx-5090", "other_nodes": [{"device": "rtx-a6000"}]}
    batch = {"kind": "generate", "batch_size": 32, "input_tokens": 4096, "output_tokens": 512}
    found = served(cluster, batch)
    room = [
        peak / capacity
        for peak, capacity in zip(
            found.memory.per_stage_peak_bytes, found.memory.per_stage_capacity_bytes, strict=True
        )
    ]

    assert found.fits
    assert room[0] == pytest.approx(0.9, abs=0.001)
    assert not served({"device": "rtx-5090"}, {**batch, "at_once": True}).fits


def test_two_kinds_serve_more_than_the_faster_alone_and_less_than_two_of_the_faster():
    for name, load in LOADS.items():
        fast, mixed, twice = (
            served(cluster, load, tensor_parallel_size=2).performance.tokens_per_second
            for cluster in (FAST, MIXED, {**FAST, "nodes": 2})
        )
        assert fast * 0.999 <= mixed <= twice * 1.001, name


def test_a_percentile_lies_between_those_of_both_kinds():
    whole = served(MIXED, OPEN, explain=True, tensor_parallel_size=2).performance
    both, workload = parts(MIXED, OPEN, tensor_parallel_size=2)
    each = [
        served(cluster, part.load(workload).model_dump(), explain=True, tensor_parallel_size=2)
        for cluster, part in zip((FAST, SLOW), both, strict=True)
    ]
    for name in ("ttft", "tpot", "latency"):
        for percent in (50, 90, 95, 99):
            field = f"{name}_p{percent}_seconds"
            low, high = sorted(getattr(one.performance, field) for one in each)
            assert low * 0.999 <= getattr(whole, field) <= high * 1.001, name


def test_the_most_requests_are_those_of_both_kinds_and_more_have_no_percentiles():
    both, _ = parts(MIXED, OPEN, tensor_parallel_size=2)
    found = served(MIXED, OPEN, explain=True, tensor_parallel_size=2).performance
    assert found.max_requests_per_second == pytest.approx(sum(part.rate for part in both))
    found = served(
        MIXED, {**OPEN, "request_rate_per_second": 1e4}, explain=True, tensor_parallel_size=2
    )
    assert found.performance.ttft_p99_seconds is None
    assert any("cannot be served" in warning for warning in found.warnings)


def test_objectives_shares_and_memory_are_those_of_all_replicas():
    slo = {**OPEN, "ttft_slo_seconds": 5.0, "tpot_slo_seconds": 0.05}
    found = served(MIXED, slo, explain=True, tensor_parallel_size=2).performance
    assert found.slo_attainment_ratio == 1.0
    assert 4.0 < found.slo_max_requests_per_second <= found.max_requests_per_second

    both, _ = parts(MIXED, tensor_parallel_size=2)
    (told,) = (one for one in served(MIXED, tensor_parallel_size=2).warnings if "router" in one)
    for part in both:
        assert f"{part.share:.0%} to 1 replica on {part.dealt.title}" in told

    cluster = {"device": "h100-sxm-80gb", "other_nodes": [{"device": "rtx-4090"}]}
    found = served(cluster, model=GEMMA)
    assert not found.fits
    assert found.bound_by == "memory_capacity"
    assert found.memory.capacity_bytes == min(found.memory.per_stage_capacity_bytes)


def every_split(setting, workload):
    """Yield layers and outcome of every split that fits."""
    run = serve if workload.kind == "serve" else generate
    layers = setting.model.num_hidden_layers
    for cuts in combinations(range(1, layers), setting.layout.pipeline - 1):
        edges = (0, *cuts, layers)
        split = tuple(edges[at + 1] - edges[at] for at in range(len(edges) - 1))
        outcome = run(replace(setting, split=split), workload, NullLedger())
        if outcome.fits:
            yield outcome.performance


def test_the_split_of_a_pipeline_serves_as_much_as_the_best_of_all_splits():
    cases = extent.combinations(
        LOADS, [PAIR, {**SMALL, "other_nodes": [{"device": "rtx-4090"}]}], [LLAMA_8B, GEMMA]
    )
    for load, cluster, model in extent.sample(cases, kind=lambda case: case[2]):
        (part,), workload = parts(cluster, LOADS[load], model, pipeline_parallel_size=2)
        best = max(
            (one.tokens_per_second for one in every_split(part.setting, workload)), default=0
        )
        found = served(cluster, LOADS[load], model=model, pipeline_parallel_size=2)
        if best:
            assert found.fits, (load, cluster, model)
            assert found.performance.tokens_per_second == pytest.approx(best, rel=1e-6)
        else:
            assert not found.fits, (load, cluster, model)


@pytest.mark.slow
def test_the_split_over_three_stages_serves_as_much_as_the_best_of_all_splits():
    cluster = {**FAST, "other_nodes": [SMALL]}
    (part,), workload = parts(cluster, pipeline_parallel_size=3)
    best = max(one.tokens_per_second for one in every_split(part.setting, workload))
    found = served(cluster, pipeline_parallel_size=3).performance
    assert found.tokens_per_second == pytest.approx(best, rel=0.005)


def test_a_faster_device_takes_more_layers():
    forth = served(PAIR, pipeline_parallel_size=2).memory
    back = served(
        {**SMALL, "other_nodes": [{"device": "h100-sxm-80gb"}]}, pipeline_parallel_size=2
    ).memory
    assert forth.per_stage_layers[0] > forth.per_stage_layers[1]
    assert back.per_stage_layers[0] < back.per_stage_layers[1]


def test_every_stage_stays_within_the_memory_of_its_own_device():
    for name, load in LOADS.items():
        (part,), _ = parts(PAIR, load, GEMMA, pipeline_parallel_size=2)
        memory = served(PAIR, load, model=GEMMA, pipeline_parallel_size=2).memory
        for peak, (capacity, usable) in zip(
            memory.per_stage_peak_bytes, stage_limits(part.setting), strict=True
        ):
            assert peak <= usable < capacity, name
        assert memory.per_stage_capacity_bytes == tuple(
            room for room, _ in stage_limits(part.setting)
        )


def test_a_full_pipeline_goes_at_its_slowest_stage_and_one_request_or_batch_in_turn():
    found = served(PAIR, explain=True, pipeline_parallel_size=2)
    stages = [one.value for one in found.terms if (one.group, one.key) == ("decode", "stage")]
    (gap,) = (one.value for one in found.terms if (one.group, one.key) == ("decode", "paced"))
    assert gap == pytest.approx(2 * max(stages))

    found = served(PAIR, {**SERVE, "concurrency": 1}, explain=True, pipeline_parallel_size=2)
    stages = [one.value for one in found.terms if (one.group, one.key) == ("decode", "stage")]
    (gap,) = (one.value for one in found.terms if (one.group, one.key) == ("decode", "paced"))
    assert gap == pytest.approx(sum(stages))

    found = served(PAIR, BATCH, explain=True, pipeline_parallel_size=2)
    stages = [one.value for one in found.terms if (one.group, one.key) == ("decode", "stage")]
    assert found.performance.tpot_seconds == pytest.approx(sum(stages))


def test_a_stage_is_explained_by_its_layers_and_its_devices_pace():
    found = served(PAIR, explain=True, pipeline_parallel_size=2)
    names = [one.name for one in found.terms if (one.group, one.key) == ("decode", "stage")]
    groups = {one.group for one in found.terms}

    layers, devices = found.memory.per_stage_layers, found.memory.per_stage_devices
    assert names == [
        f"Stage {at + 1}: {layers[at]} layers on {devices[at]}" for at in range(len(layers))
    ]
    assert {f"decode on {device}" for device in devices} <= groups
    assert all(one.source for one in found.terms if one.key in {"stage", "stages", "paced"})


def test_the_link_between_the_nodes_carries_what_a_stage_hands_over():
    slow_link = {**PAIR, "inter_node_bandwidth_bytes_per_second": 1e9}
    fast, slow = (served(one, explain=True, pipeline_parallel_size=2) for one in (PAIR, slow_link))
    hops = [
        next(one for one in found.terms if (one.group, one.key) == ("prefill", "pipeline"))
        for found in (fast, slow)
    ]
    rates = [
        next(one.value for one in hop.inputs if one.name == "link bytes per s") for hop in hops
    ]

    assert hops[1].value > hops[0].value
    assert rates[1] < 1e9 < rates[0]
    assert slow.performance.latency_seconds > fast.performance.latency_seconds


def test_a_time_of_all_replicas_is_recorded_with_both_it_is_made_of():
    found = served(MIXED, explain=True, tensor_parallel_size=2)
    (whole,) = (one for one in found.terms if (one.group, one.key) == ("serving", "ttft"))
    own = [
        one.value
        for one in found.terms
        if one.key == "ttft" and one.group.startswith("serving on")
    ]

    assert whole.value == found.performance.ttft_seconds
    assert [one.value for one in whole.inputs[:2]] == pytest.approx(own)
    assert whole.provenance == "modelled"


def test_the_least_known_device_says_how_sure_one_is_and_devices_in_use_alone_are_paid():
    workload = {**SERVE, "input_tokens": 1024}
    known = served({"device": "h100-sxm-80gb"}, workload)
    mixed = served({"device": "h100-sxm-80gb", "other_nodes": [{"device": "l40s"}]}, workload)
    unknown = served({"device": "l40s"}, workload)
    ratios = [
        np.divide(*reversed(one.interval["tpot_seconds"])) for one in (known, mixed, unknown)
    ]
    assert ratios[1] == pytest.approx(max(ratios))

    # Three devices of which two serve, in pairs: the first node's two.
    paid = served({**FAST, "other_nodes": [SMALL]}, tensor_parallel_size=2)
    same = served(FAST, tensor_parallel_size=2)
    assert paid.cost_usd_per_million_tokens == pytest.approx(same.cost_usd_per_million_tokens)
    assert any("1 of 3 devices stay unused" in one for one in paid.warnings)


def test_pools_and_offload_over_unlike_nodes_are_refused_by_name():
    with pytest.raises(NotCoveredError) as caught:
        served(MIXED, disaggregated={"prefill_devices": 2, "decode_devices": 2})
    assert caught.value.field == "strategy.disaggregated"
    with pytest.raises(NotCoveredError) as caught:
        served(PAIR, pipeline_parallel_size=2, offload={"weights_cpu": 0.5})
    assert caught.value.field == "strategy.offload"


def test_experts_are_served_by_both_kinds_and_tensor_ranks_at_the_slower_pace():
    found = served(MIXED, model="mistralai/Mixtral-8x7B-v0.1", tensor_parallel_size=2)
    assert found.fits
    assert found.performance.max_concurrency > 16
    cluster = {"device": "h100-sxm-80gb", "other_nodes": [{"device": "a100-sxm-80gb"}]}
    over = served(cluster, tensor_parallel_size=2).performance
    slow = served(SLOW, tensor_parallel_size=2).performance
    assert over.tpot_seconds > slow.tpot_seconds


def test_a_burst_of_one_token_is_dealt_to_nodes_of_several_kinds():
    # Law 2865292717/45: each kind's share of the burst is a column.
    cluster = {
        "device": "h100-nvl-94gb",
        "nodes": 2,
        "other_nodes": [{"device": "mi325x"}],
    }
    workload = {"kind": "serve", "input_tokens": 4096, "output_tokens": 1, "burst_requests": 1}
    asked = {"model": LLAMA_8B, "cluster": cluster, "workload": workload, "engine": "autogptq"}
    answer = plan(PlanRequest.model_validate(asked))
    assert answer.plans or answer.rejected
