"""Single workloads: small jobs by hand, and what scales exactly or never gets worse."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.api import inverse
from planner.search.placement import best_placement
from planner.specs.estimate import EstimateRequest, InverseRequest
from tests.planner.asking import (
    CARD,
    CPU,
    GENERATE,
    LLAMA_8B,
    LLAMA_70B,
    MIXTRAL,
    SERVE,
    TINY,
    TRAIN,
    ask,
    document,
    held,
    search,
)

GIB = 1024**3
# Query and output 256 x 256 each, keys and values 256 x 128 each, three of 256 x 768; six layers.
LINEAR = 6 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768)
# Two tables of 4,096 x 256; two norms a layer and a last one, of 256 each.
PLAIN = 2 * 4096 * 256 + (2 * 6 + 1) * 256
# Llama 3.1 8B: keys and values of 8 heads of 128 in 32 layers, two bytes each.
TOKEN_BYTES = 2 * 8 * 128 * 32 * 2


def compressing(disk=1e9, **workload):
    cluster = {"device": CPU, "disk_bandwidth_bytes_per_second": disk}
    return ask(model=TINY, cluster=cluster, workload={"kind": "compress", **workload})


def seconds_of(answer):
    return answer.time_breakdown_seconds["compress"]


def limit_of(question, **fields):
    answer = inverse(InverseRequest.model_validate(document(question=question, **fields)))
    return answer.limits[0]


def test_a_compressions_disk_holds_both_checkpoints_and_takes_its_rate():
    source = (LINEAR + PLAIN) * 2
    found = compressing(method="int4_weight_only", group_size=128)
    # Four bits a weight, and 32 bits of scale and zero point for each group of 128.
    small = LINEAR * (4 + 4 / 16) / 8 + PLAIN * 2
    assert found.memory.disk_bytes == pytest.approx(source + small, abs=1)
    assert held(found, "weights") == source

    found = compressing(method="sparsegpt")
    assert found.memory.disk_bytes == 2 * (LINEAR + PLAIN) * 2

    slow, fast = (
        seconds_of(compressing(method="sparsegpt", disk=rate))["overhead"] for rate in (2e8, 4e8)
    )
    assert slow - fast == pytest.approx(2 * (LINEAR + PLAIN) * 2 * (1 / 2e8 - 1 / 4e8))


@given(tokens=st.integers(1, 200_000))
@settings(max_examples=20, deadline=None)
def test_awq_works_in_proportion_to_its_text(tokens):
    one = seconds_of(compressing(method="awq", calibration_tokens=tokens))
    three = seconds_of(compressing(method="awq", calibration_tokens=3 * tokens))
    assert three["compute"] == pytest.approx(3 * one["compute"])
    assert three["overhead"] == one["overhead"]


def test_factoring_hessians_takes_its_time_and_rounding_reads_no_text():
    times = [
        seconds_of(compressing(method="gptq", calibration_tokens=count))["compute"]
        for count in (1000, 2000, 3000)
    ]

    assert times[2] - times[1] == pytest.approx(times[1] - times[0])
    without_text = times[0] - (times[1] - times[0])
    assert without_text > 0

    none, some = (
        compressing(method="int8_weight_only", calibration_tokens=count) for count in (0, 10**6)
    )
    assert seconds_of(none) == seconds_of(some)
    assert held(none, "activations") == 0


def test_a_schedule_of_one_length_is_the_plain_run():
    plain = {**TRAIN, "method": "lora", "tokens": 10**8}
    flat = {**plain, "length_schedule": [[2048, 1.0]]}
    found, same = (ask(device=CARD, workload=work).performance for work in (plain, flat))
    assert same.duration_seconds == pytest.approx(found.duration_seconds)


def test_a_schedule_takes_the_time_of_its_shares():
    """Half of the tokens at 1,024 each in twice the rows, half at 4,096."""
    base = {**TRAIN, "method": "lora", "tokens": 10**8, "sequence_length": 4096}
    micro = {"micro_batch_size": 2, "weight_dtype": "bf16"}
    short_rows = {"micro_batch_size": 8, "weight_dtype": "bf16"}

    both = ask(
        device=CARD,
        workload={**base, "length_schedule": [[1024, 0.5], [4096, 0.5]]},
        strategy=micro,
    ).performance.duration_seconds
    long = ask(device=CARD, workload=base, strategy=micro).performance.duration_seconds
    short = ask(
        device=CARD,
        workload={**base, "sequence_length": 1024, "global_batch_size": 64},
        strategy=short_rows,
    ).performance.duration_seconds

    assert both == pytest.approx((long + short) / 2, rel=0.02)
    assert short < both < long


@given(share=st.floats(0.0, 1.0))
@settings(max_examples=20, deadline=None)
def test_what_leaves_the_device_arrives_at_the_host(share):
    offload = {"weights_cpu": share}
    found = ask(device=CARD, workload=GENERATE, strategy={"offload": offload})
    whole = held(ask(device=CARD, workload=GENERATE), "weights")
    assert held(found, "weights") + (found.memory.host_bytes or 0) == pytest.approx(whole, abs=2)


def test_a_streamed_step_takes_at_least_the_weights_over_the_link():
    """Seventy billion weights in 16 bits pass 25 GB/s in five and a half seconds."""
    layers = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    strategy = {"offload": {"weights_cpu": 1.0}, "weight_dtype": "bf16"}
    found = ask(model=LLAMA_70B, device=CARD, workload=GENERATE, strategy=strategy)
    assert found.performance.tpot_seconds >= layers * 2 / 25e9
    # A link reaches more than four fifths of its rate.
    assert found.performance.tpot_seconds < 1.25 * layers * 2 / 25e9


def test_the_longest_context_fills_what_the_weights_leave():
    cache = {"weight_dtype": "bf16", "kv_cache_dtype": "bf16"}
    device = {**CARD, "memory_bytes": 24 * GIB}

    found = limit_of(
        "longest_context",
        device=device,
        engine="vllm",
        pins=cache,
        workload={**SERVE, "concurrency": 1},
    )

    memory = found.estimate.memory
    kept = memory.breakdown_bytes["kv_cache"]
    assert kept == pytest.approx(found.value * TOKEN_BYTES, abs=16 * TOKEN_BYTES)
    assert 0.9 * 24 * GIB - memory.per_device_peak_bytes < 64 * TOKEN_BYTES
    assert found.beyond.constraint in {"memory", "max_concurrency"}


def test_more_memory_never_lowers_a_limit():
    for question, workload in (
        ("longest_context", {**SERVE, "concurrency": 4}),
        ("most_users", SERVE),
        ("largest_batch", {**GENERATE, "input_tokens": 8192}),
    ):
        fields = {"engine": "vllm", "pins": {"weight_dtype": "bf16"}, "workload": workload}
        found = [
            limit_of(question, device={**CARD, "memory_bytes": size * GIB}, **fields).value
            for size in (24, 32, 48)
        ]
        assert found == sorted(found), (question, workload)
        assert found[-1] > found[0], (question, workload)


def test_limits_are_said_with_estimates_that_fit_and_are_the_most_and_the_fewest():
    work = {"kind": "serve", "output_tokens": 16, "concurrency": 1}
    fields = {"device": {**CARD, "memory_bytes": 24 * GIB}, "engine": "vllm"}
    fields["pins"] = {"weight_dtype": "bf16", "kv_cache_dtype": "bf16"}
    long, short = (
        limit_of("most_users", **fields, workload={**work, "input_tokens": count}).value
        for count in (2048, 1024)
    )
    assert long < short <= 2 * long + 2

    for pinned in ("bf16", "int8"):
        fields = {"model": LLAMA_70B, "device": {**CARD, "memory_bytes": 48 * GIB}}
        fields |= {"engine": "vllm", "pins": {"weight_dtype": pinned}}
        found = limit_of("fewest_devices", **fields)
        tried = [count for count in range(1, 9) if search(**fields, devices=count).plans]
        assert found.value == tried[0], pinned
        assert found.beyond.value == found.value - 1, pinned

    found = limit_of("most_users", model=LLAMA_8B, device=CARD, engine="vllm")
    assert found.estimate.fits
    assert found.estimate.performance.max_concurrency >= found.value
    assert found.beyond.value == found.value + 1
    assert found.beyond.reason


ACCUMULATED = {"micro_batch_size": 1, "data_parallel_size": 1, "weight_dtype": "bf16"}


def card(**changes):
    return {**CARD, **changes}


def decode_of(**fields):
    found = ask(engine="vllm", workload=GENERATE, **fields)
    return found.time_breakdown_seconds["decode"]


def step_of(batch, **fields):
    work = {**TRAIN, "method": "lora", "global_batch_size": batch}
    found = ask(device=CARD, engine="torchtitan", workload=work, strategy=ACCUMULATED, **fields)
    return found.performance.step_seconds


def test_a_lone_stream_goes_by_the_memory_and_a_long_prompt_by_the_peak():
    slow = decode_of(device=CARD)
    for factor in (2, 4):
        fast = decode_of(device=card(memory_bandwidth_bytes_per_second=factor * 2e12))
        assert fast["memory_bandwidth"] == pytest.approx(slow["memory_bandwidth"] / factor), factor

    assert decode_of(device=CARD) == decode_of(device=card(peak_flops_per_second={"bf16": 5e15}))

    work = {**GENERATE, "input_tokens": 8192}
    slow, fast = (
        ask(
            device=card(peak_flops_per_second={"bf16": peak}), engine="vllm", workload=work
        ).time_breakdown_seconds["prefill"]["compute"]
        for peak in (1e14, 2e14)
    )

    assert fast == pytest.approx(slow / 2)


@given(context=st.integers(100, 3000))
@settings(max_examples=15, deadline=None)
def test_each_further_token_of_context_costs_the_same(context):
    one, two, three = (
        decode_seconds({**GENERATE, "input_tokens": times * context}) for times in (1, 2, 3)
    )
    assert three - two == pytest.approx(two - one, rel=1e-6)


def decode_seconds(workload):
    return ask(device=CARD, engine="vllm", workload=workload).performance.tpot_seconds


@given(rows=st.integers(1, 20))
@settings(max_examples=10, deadline=None)
def test_each_further_micro_batch_costs_the_same(rows):
    one, two, three = (step_of(times * rows) for times in (1, 2, 3))
    assert three - two == pytest.approx(two - one)
    assert two < 2 * one * (1 + 1e-9)


def test_adapters_of_queries_and_values_hold_two_thin_matrices_each():
    """Rank 8 on TINY: queries 256 to 256, values 256 to 128, in six layers."""
    work = {**TRAIN, "sequence_length": 128, "method": "lora", "lora_targets": "query_value"}
    found = ask(model=TINY, device=CARD, workload={**work, "lora_rank": 8}, engine="torchtitan")
    elements = 6 * (8 * (256 + 256) + 8 * (256 + 128))
    assert held(found, "adapters") % elements == 0
    assert held(found, "adapters") // elements in {2, 4}


@given(rank=st.integers(1, 64), times=st.integers(2, 4))
@settings(max_examples=15, deadline=None)
def test_adapters_grow_with_their_rank(rank, times):
    work = {**TRAIN, "sequence_length": 128, "method": "lora"}
    thin, wide = (
        ask(model=TINY, device=CARD, workload={**work, "lora_rank": size})
        for size in (rank, times * rank)
    )
    assert held(wide, "adapters") == times * held(thin, "adapters")
    assert held(wide, "weights") == held(thin, "weights")


@given(low=st.floats(0.0, 0.9), more=st.floats(0.0, 0.09))
@settings(max_examples=20, deadline=None)
def test_a_longer_shared_prefix_never_waits_longer_for_the_first_token(low, more):
    first, second = (
        ask(device=CARD, engine="vllm", workload={**SERVE, "prefix_share_ratio": share})
        for share in (low, low + more)
    )
    assert second.performance.prefill_seconds <= first.performance.prefill_seconds * (1 + 1e-9)
    assert second.performance.ttft_seconds <= first.performance.ttft_seconds * (1 + 1e-9)


def test_replicas_with_callers_of_their_own_are_so_many_engines():
    alone = ask(device=CARD, engine="vllm", workload={**SERVE, "concurrency": 8})
    for replicas in (2, 4, 8):
        together = ask(
            device=CARD,
            devices=replicas,
            engine="vllm",
            workload={**SERVE, "concurrency": 8 * replicas},
            strategy={"data_parallel_size": replicas},
        )

        assert together.memory.breakdown_bytes == alone.memory.breakdown_bytes, replicas
        assert together.performance.tpot_seconds == pytest.approx(alone.performance.tpot_seconds)
        assert together.performance.tokens_per_second == pytest.approx(
            replicas * alone.performance.tokens_per_second
        )


def test_a_slower_link_costs_ranks_time_and_one_rank_says_nothing():
    for ranks in (2, 4, 8):
        fields = {"devices": ranks, "engine": "vllm", "model": LLAMA_70B}
        layout = {"tensor_parallel_size": ranks}
        fast = ask(device=CARD, strategy=layout, **fields)
        slow = ask(
            device=card(intra_node_bandwidth_bytes_per_second=30e9), strategy=layout, **fields
        )
        assert slow.performance.communication_ratio > fast.performance.communication_ratio > 0
        assert slow.performance.latency_seconds > fast.performance.latency_seconds, ranks
        assert slow.memory == fast.memory, ranks

    found = ask(device=CARD, engine="vllm")
    assert found.performance.communication_ratio == 0
    assert "communication" not in found.time_breakdown_seconds["decode"]


def test_a_sparse_model_reads_up_to_all_experts_with_more_requests():
    for batch in (1, 8, 64):
        work = {**GENERATE, "batch_size": batch}
        found = ask(
            model=MIXTRAL, device=card(memory_bytes=160 * GIB), workload=work, engine="vllm"
        )
        # All 46.7 billion weights in two bytes at the datasheet's rate, over the least efficiency.
        whole = 46.7e9 * 2 / 2e12
        assert found.time_breakdown_seconds["decode"]["memory_bandwidth"] < whole / 0.5, batch

    device = card(memory_bytes=160 * GIB)
    seconds = [
        ask(
            model=MIXTRAL, device=device, engine="vllm", workload={**GENERATE, "batch_size": size}
        ).time_breakdown_seconds["decode"]["memory_bandwidth"]
        for size in (1, 2, 4, 8, 16)
    ]

    assert seconds == sorted(seconds)
    steps = [after - before for before, after in pairwise(seconds)]
    assert steps[0] / 1 > steps[2] / 4 > steps[3] / 8  # per request: fewer and fewer new ones


def test_a_placement_never_gets_slower_on_a_better_card():
    for field in ("memory_bytes", "host_to_device_bandwidth_bytes_per_second"):
        rates = []
        for factor in (1, 2, 4):
            device = card(memory_bytes=24 * GIB)
            device[field] *= factor
            fields = document(
                model=LLAMA_70B, device=device, workload={**GENERATE, "batch_size": 8}
            )
            placed = best_placement(EstimateRequest.model_validate(fields))
            rates.append(placed.estimate.performance.tokens_per_second)
        assert all(after >= before * 0.999 for before, after in pairwise(rates)), field
        assert rates[-1] > rates[0], field


def test_padding_is_computed_and_is_no_text():
    plain = {**TRAIN, "method": "lora"}
    whole = ask(device=CARD, workload=plain).performance
    padded = ask(device=CARD, workload={**plain, "padding_ratio": 0.5}).performance
    assert padded.step_seconds == pytest.approx(whole.step_seconds, rel=0.01)
    assert padded.tokens_per_second == pytest.approx(whole.tokens_per_second / 2, rel=0.01)
