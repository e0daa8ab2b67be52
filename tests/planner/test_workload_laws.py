"""Laws of single workloads: what scales exactly, what is linear, and what never gets worse."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search.placement import best_placement
from planner.specs.estimate import EstimateRequest
from tests.planner.asking import (
    CARD,
    GENERATE,
    LLAMA_70B,
    MIXTRAL,
    SERVE,
    TINY,
    TRAIN,
    ask,
    document,
    held,
)

GIB = 1024**3
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


@pytest.mark.parametrize("factor", [2, 4])
def test_a_lone_stream_reads_as_much_faster_as_the_memory_is(factor):
    slow = decode_of(device=CARD)
    fast = decode_of(device=card(memory_bandwidth_bytes_per_second=factor * 2e12))

    assert fast["memory_bandwidth"] == pytest.approx(slow["memory_bandwidth"] / factor)


def test_a_higher_peak_does_nothing_for_a_lone_stream():
    assert decode_of(device=CARD) == decode_of(device=card(peak_flops_per_second={"bf16": 5e15}))


def test_a_long_prompt_is_read_as_much_faster_as_the_peak_is_higher():
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


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_replicas_with_callers_of_their_own_are_so_many_engines(replicas):
    alone = ask(device=CARD, engine="vllm", workload={**SERVE, "concurrency": 8})
    together = ask(
        device=CARD,
        devices=replicas,
        engine="vllm",
        workload={**SERVE, "concurrency": 8 * replicas},
        strategy={"data_parallel_size": replicas},
    )

    assert together.memory.breakdown_bytes == alone.memory.breakdown_bytes
    assert together.performance.tpot_seconds == pytest.approx(alone.performance.tpot_seconds)
    assert together.performance.tokens_per_second == pytest.approx(
        replicas * alone.performance.tokens_per_second
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_slower_link_costs_tensor_ranks_time_and_no_memory(ranks):
    fields = {"devices": ranks, "engine": "vllm", "model": LLAMA_70B}
    layout = {"tensor_parallel_size": ranks}

    fast = ask(device=CARD, strategy=layout, **fields)
    slow = ask(device=card(intra_node_bandwidth_bytes_per_second=30e9), strategy=layout, **fields)

    assert slow.performance.communication_ratio > fast.performance.communication_ratio > 0
    assert slow.performance.latency_seconds > fast.performance.latency_seconds
    assert slow.memory == fast.memory


def test_one_rank_says_nothing_to_nobody():
    found = ask(device=CARD, engine="vllm")

    assert found.performance.communication_ratio == 0
    assert "communication" not in found.time_breakdown_seconds["decode"]


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_sparse_model_never_reads_more_than_all_of_its_experts(batch):
    work = {**GENERATE, "batch_size": batch}
    found = ask(model=MIXTRAL, device=card(memory_bytes=160 * GIB), workload=work, engine="vllm")

    # All 46.7 billion weights in two bytes at the datasheet's rate, over the least efficiency.
    whole = 46.7e9 * 2 / 2e12
    assert found.time_breakdown_seconds["decode"]["memory_bandwidth"] < whole / 0.5


def test_more_requests_meet_more_experts_until_all_are_met():
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


@pytest.mark.parametrize("field", ["memory_bytes", "host_to_device_bandwidth_bytes_per_second"])
def test_a_placement_never_gets_slower_on_a_better_card(field):
    rates = []
    for factor in (1, 2, 4):
        device = card(memory_bytes=24 * GIB)
        device[field] *= factor
        fields = document(model=LLAMA_70B, device=device, workload={**GENERATE, "batch_size": 8})
        placed = best_placement(EstimateRequest.model_validate(fields))
        rates.append(placed.estimate.performance.tokens_per_second)

    assert all(after >= before * 0.999 for before, after in pairwise(rates))
    assert rates[-1] > rates[0]


def test_padding_is_computed_and_is_no_text():
    plain = {**TRAIN, "method": "lora"}

    whole = ask(device=CARD, workload=plain).performance
    padded = ask(device=CARD, workload={**plain, "padding_ratio": 0.5}).performance

    assert padded.step_seconds == pytest.approx(whole.step_seconds, rel=0.01)
    assert padded.tokens_per_second == pytest.approx(whole.tokens_per_second / 2, rel=0.01)
