"""The simulated engine and its queues, and prefill and decode on different devices."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.specs.base import BadRequestError, NotCoveredError, NotPossibleError
from planner.workload.arrivals import (
    Batching,
    StepCosts,
    Traffic,
    _Engine,
    poisson_calls,
    simulate,
    steps_until,
)
from tests.planner.asking import SERVE, ask, search


def serving(prefill=2, decode=2, load=None, link=None, strategy=None, **workload):
    cluster = {"device": "h100-sxm-80gb", "devices_per_node": 16}
    if link:
        cluster["intra_node_bandwidth_bytes_per_second"] = link
    split = {"prefill_devices": prefill, "decode_devices": decode}
    return ask(
        cluster=cluster,
        engine="vllm",
        workload={**SERVE, "concurrency": None, **(load or {"concurrency": 32}), **workload},
        strategy={"disaggregated": split, **(strategy or {})},
    )


def together(devices=4, **load):
    return ask(devices=devices, engine="vllm", workload={**SERVE, "concurrency": None, **load})


LOADS = [
    {"concurrency": 1},
    {"concurrency": 32},
    {"concurrency": 2000},
    {"request_rate_per_second": 2.0},
    {"burst_requests": 40},
    {},
]


def test_every_load_is_answered():
    for load in LOADS:
        found = serving(load=load)
        assert found.fits
        assert 0 < found.performance.tpot_seconds < found.performance.latency_seconds
        assert (
            found.performance.requests_per_second
            <= found.performance.max_requests_per_second + 1e-9
        )


def test_devices_of_each_pool_help_what_it_does():
    # The slower pool sets the most requests a second.
    found = serving(load={"request_rate_per_second": 1.0})
    pools = {t.key: t.value for t in found.terms if t.key in {"prefill_pool", "decode_pool"}}
    assert found.performance.max_requests_per_second == min(pools.values())

    # More prefill devices help long prompts and more decode devices long answers.
    def rate(prefill, **lengths):
        found = serving(prefill, 8 - prefill, {"request_rate_per_second": 0.1}, **lengths)
        return found.performance.max_requests_per_second

    reading = {"input_tokens": 8000, "output_tokens": 16}
    writing = {"input_tokens": 32, "output_tokens": 2000}
    assert rate(6, **reading) > rate(2, **reading)
    assert rate(2, **writing) > rate(6, **writing)

    # No prompt interrupts the tokens of others: The gap is the decode step alone: shorter than
    # where the same devices do both.
    apart, mixed = serving(load={"concurrency": 128}), together(concurrency=128)
    assert apart.performance.tpot_seconds < mixed.performance.tpot_seconds

    # The cache travels once at the speed of the link.
    fast, slow = serving(link=100e9), serving(link=1e9)
    sent = {t.key: t for t in slow.terms}["kv_transfer"]
    longer = slow.performance.ttft_seconds - fast.performance.ttft_seconds
    assert sent.value == pytest.approx(1024 * 131072 / 0.75e9, rel=0.05)
    assert longer == pytest.approx(sent.value * 0.99, rel=0.35)


def test_littles_law_holds_below_and_beyond_both_pools():
    # Little's law holds in a closed loop.
    for callers in (2, 16, 64, 256):
        for prefill in (2, 4, 6):
            found = serving(prefill, 8 - prefill, {"concurrency": callers}).performance
            running = found.requests_per_second * found.latency_seconds
            assert running == pytest.approx(callers, rel=0.01), (callers, prefill)
    # Callers beyond both pools wait as little says.
    found = serving(load={"concurrency": 20_000}).performance
    assert found.requests_per_second == pytest.approx(found.max_requests_per_second, rel=0.01)
    assert found.queue_seconds > 0.5 * found.latency_seconds


def test_an_open_loop_serves_what_arrives_up_to_the_most():
    # A slow open loop serves exactly what arrives.
    found = serving(load={"request_rate_per_second": 0.25}).performance
    assert found.requests_per_second == pytest.approx(0.25, rel=1e-3)
    # A rate that no pool serves is named with the most.
    found = serving(load={"request_rate_per_second": 1e5})
    assert any("cannot be served: the most is" in warning for warning in found.warnings)
    assert found.performance.requests_per_second < 1e5

    # A higher rate waits longer for the first token.
    waits = [
        serving(load={"request_rate_per_second": rate}).performance.ttft_seconds
        for rate in (1.0, 10.0, 40.0)
    ]
    assert waits == sorted(waits)


def test_both_pools_are_held_paid_and_named():
    # Both pools are in the answers memory.
    found = serving()
    assert len(found.memory.per_stage_peak_bytes) == 2
    assert found.memory.per_device_peak_bytes == max(found.memory.per_stage_peak_bytes)

    # Energy and money count the devices of both pools.
    found = serving(prefill=2, decode=6)
    rates = found.performance.tokens_per_second, found.performance.tokens_per_second_per_device
    assert rates[0] == pytest.approx(8 * rates[1])
    assert found.strategy.data_parallel_size == 8

    # Uneven pools are named and even ones are not.
    uneven, even = (
        serving(1, decode, {"request_rate_per_second": 1.0}).warnings for decode in (9, 1)
    )
    assert any("uneven pools" in warning for warning in uneven)
    assert not any("uneven pools" in warning for warning in even)


def test_pools_that_cannot_be_are_refused_by_name():
    with pytest.raises(NotPossibleError, match="multiple of the 2 devices"):
        serving(prefill=3, decode=3, strategy={"tensor_parallel_size": 2})
    with pytest.raises(NotPossibleError, match="the cluster has 16"):
        serving(prefill=16, decode=16)
    with pytest.raises(NotPossibleError, match=r"data_parallel_size is 1.* set it to 4"):
        serving(prefill=2, decode=2, strategy={"data_parallel_size": 1})
    with pytest.raises(BadRequestError, match="output_tokens is 1"):
        serving(output_tokens=1)

    # A fixed batch has no pools.
    with pytest.raises(NotCoveredError, match="costed for workload"):
        ask(
            devices=2,
            workload={"kind": "generate", "batch_size": 1, "input_tokens": 8, "output_tokens": 8},
            strategy={"disaggregated": {"prefill_devices": 1, "decode_devices": 1}},
        )

    # Pools that no search can lay out are refused by name.
    for pools, pins, words in [
        ((4, 6), {}, "take 10 devices, the cluster has 8"),
        ((1, 2), {"tensor_parallel_size": 2}, "must be a multiple of the 2 devices"),
    ]:
        split = dict(zip(("prefill_devices", "decode_devices"), pools, strict=True))
        with pytest.raises(NotPossibleError, match=words):
            search(devices=8, engine="vllm", pins={"disaggregated": split, **pins})


def test_a_search_finds_the_best_layout_of_pinned_pools_and_costs_it_as_the_estimate_does():
    pools = {"prefill_devices": 2, "decode_devices": 4}

    found = search(devices=8, engine="vllm", pins={"disaggregated": pools})

    best = found.plans[0]
    strategy = best.strategy.model_dump(exclude_none=True)
    alone = ask(devices=8, engine="vllm", workload=SERVE, strategy=strategy)
    ranks = best.strategy.tensor_parallel_size * best.strategy.pipeline_parallel_size
    assert best.strategy.disaggregated.model_dump() == pools
    assert 2 % ranks == 0
    assert best.strategy.data_parallel_size * ranks == 6  # two devices are left idle
    assert alone.performance.tpot_seconds == pytest.approx(best.performance.tpot_seconds)
    assert {one.strategy.disaggregated for one in found.plans} == {best.strategy.disaggregated}
    kept = search(
        devices=8, engine="vllm", pins={"disaggregated": pools, "tensor_parallel_size": 2}
    )
    assert {one.strategy.tensor_parallel_size for one in kept.plans} == {2}


def test_attention_ranks_of_a_replica_read_a_prompt_each():
    """Eight data-parallel attention ranks read eight prompts while one rank reads one."""

    def rate(ranks):
        strategy = {"tensor_parallel_size": 8 // ranks, "expert_parallel_size": 8}
        found = ask(
            model="deepseek-ai/DeepSeek-V3",
            cluster={"device": "h200-sxm-141gb", "devices_per_node": 8, "nodes": 2},
            engine="sglang",
            workload={**SERVE, "concurrency": 512},
            strategy={
                **strategy,
                "weight_dtype": "fp8",
                "attention_data_parallel_size": ranks,
                "disaggregated": {"prefill_devices": 8, "decode_devices": 8},
            },
        )
        return next(term.value for term in found.terms if term.key == "prefill_pool")

    assert rate(8) > 1.2 * rate(1)


# 1 ms per prompt token; a decode step takes 10 ms and 1 ms per request, whatever is cached.
COSTS = StepCosts([0.0, 10_000.0], [0.0, 10.0], [0.0, 1000.0], [0.010, 1.010], [0.0, 0.0])
GROWING = StepCosts([0.0, 10_000.0], [0.0, 10.0], [0.0, 1000.0], [0.010, 1.010], [1e-6, 1e-6])
UNEVEN = ([0.01, 0.013, 0.0307], [1.1e-6, 1.3e-6, 1.7e-6])
OPEN = Batching(slots=1000, budget_tokens=8192)


def closed(callers=8, calls=5, spread=0.0, batching=OPEN, prompt=100.0, output=20):
    traffic = Traffic(prompt, output, [0.0] * callers, calls, spread)
    return simulate(batching, traffic, COSTS)


def opened(rate, count=400, batching=OPEN, seed=0, costs=COSTS):
    traffic = Traffic(100.0, 20, poisson_calls(rate, count, seed), 1, 0.1)
    return simulate(batching, traffic, costs)


def test_one_request_takes_its_prefill_and_then_its_steps():
    alone = closed(callers=1, calls=1)
    assert alone.ttft_s == pytest.approx([0.1])
    assert alone.tpot_s == pytest.approx([0.011])
    assert alone.latency_s == pytest.approx([0.1 + 19 * 0.011])

    # A request of one token is done with its first.
    one = closed(callers=1, calls=1, output=1)
    assert one.latency_s == pytest.approx(one.ttft_s)
    assert len(one.tpot_s) == 0
    # Steps get longer with what is cached: Twenty tokens after a prompt of 100: the k-th step
    # reads 100 + k cached tokens.
    alone = simulate(OPEN, Traffic(100.0, 20, [0.0]), GROWING)
    expected = sum(0.011 + 1e-6 * (100 + k) for k in range(1, 20))
    assert alone.latency_s[0] - alone.ttft_s[0] == pytest.approx(expected)
    # A prompt longer than the budget is read in chunks.
    small = closed(callers=1, calls=1, batching=Batching(10, 30.0))
    assert small.ttft_s == pytest.approx([0.1])
    assert small.events > closed(callers=1, calls=1).events
    # An almost idle engine answers as if alone.
    assert np.median(opened(0.01).ttft_s) == pytest.approx(0.1)


@settings(max_examples=25, deadline=None)
@given(callers=st.integers(1, 40), slots=st.integers(1, 40), spread=st.sampled_from([0.0, 0.3]))
def test_every_request_is_answered_after_it_was_sent(callers, slots, spread):
    found = closed(callers, 3, spread, Batching(slots, 256))
    assert len(found.sent_s) == 3 * callers
    assert np.all(found.first_s > found.sent_s)
    assert np.all(found.done_s >= found.first_s)


@settings(max_examples=25, deadline=None)
@given(callers=st.integers(1, 40), slots=st.integers(1, 20))
def test_never_more_requests_run_than_there_are_places(callers, slots):
    found = closed(callers, 3, 0.2, Batching(slots, 8192))
    times = np.concatenate([found.first_s, found.done_s])
    changes = np.concatenate([np.ones(len(found.first_s)), -np.ones(len(found.done_s))])
    order = np.lexsort((changes, times))
    assert np.cumsum(changes[order]).max() <= slots


def test_littles_law_holds():
    """Requests in flight, averaged over time, are the rate times the mean latency."""
    for rate in [0.5, 2.0, 5.0]:
        found = opened(rate)
        span = found.done_s.max() - found.sent_s.min()
        ends = np.sort(np.concatenate([found.sent_s, found.done_s]))
        inside = np.searchsorted(np.sort(found.sent_s), ends, "right") - np.searchsorted(
            np.sort(found.done_s), ends, "right"
        )
        in_flight = float((inside[:-1] * np.diff(ends)).sum() / span)
        assert in_flight == pytest.approx(found.requests_per_s * found.latency_s.mean(), rel=1e-6)


def test_callers_without_a_place_wait_for_those_who_have_one():
    # A place less makes one caller wait a whole life.
    free, short = (closed(4, 20, 0.0, Batching(slots, 8192)) for slots in (4, 3))
    life = short.latency_s.min()
    assert short.ttft_s.mean() - free.ttft_s.mean() == pytest.approx(life / 3, rel=0.5)
    # One place serves one after another.
    found = closed(5, 1, 0.0, Batching(1, 8192))
    life = 0.1 + 19 * 0.011
    assert np.sort(found.done_s) == pytest.approx(life * np.arange(1, 6))


@given(
    seconds=st.floats(0.01, 50), first=st.floats(0.001, 1), growth=st.sampled_from([0, 1e-5, 1e-3])
)
def test_the_steps_until_a_moment_are_the_fewest_that_reach_it(seconds, first, growth):
    steps = steps_until(seconds, first, growth)

    def reached(count):
        return count * first + growth * count * (count - 1) / 2

    assert reached(steps) >= seconds * (1 - 1e-6)
    assert steps == 1 or reached(steps - 1) < seconds * (1 + 1e-6)


def test_a_moment_that_has_passed_still_takes_a_step():
    assert steps_until(0.0, 0.1, 0.0) == 1


def test_calls_come_at_their_rate_and_a_faster_stream_waits_longer():
    # Poisson calls come at their rate.
    calls = poisson_calls(4.0, 4000)
    assert calls == sorted(calls)
    assert len(calls) / calls[-1] == pytest.approx(4.0, rel=0.05)
    # Equal seeds give equal answers.
    assert np.array_equal(opened(3.0).done_s, opened(3.0).done_s)
    assert not np.array_equal(opened(3.0).done_s, opened(3.0, seed=1).done_s)
    # A faster stream of the same calls waits longer.
    means = [opened(rate).ttft_s.mean() for rate in (0.5, 2.0, 4.0, 8.0)]
    assert means == sorted(means)
    # More than the engine can do makes the queue grow: A prefill takes 0.1 s, so that ten a
    # second are the most whatever the batch.
    waits = opened(20.0).ttft_s
    assert waits[-100:].mean() > 3 * waits[:100].mean()


def test_the_steps_of_a_closed_loop_are_timed_bit_by_bit_as_they_were_taken():
    uneven = StepCosts([1.0, 32.0, 512.0], [0.011, 0.013, 0.07], [1.0, 4.0, 16.0], *UNEVEN)
    sizes = ((4, 64, 100.0), (9, 512, 37.5))
    for (slots, budget, prompt), spread in product(sizes, (0.0, 0.03)):
        batching = Batching(slots, budget)
        traffic = Traffic(prompt, 20, [0.0] * 7, 5, spread)
        engine = _Engine(batching, traffic, uneven)
        engine.run()
        timed = simulate(batching, traffic, uneven)
        assert timed.events == engine.events
        assert timed.sent_s.tolist() == engine.requests.sent_s
        assert timed.first_s.tolist() == engine.requests.first_s
        assert timed.done_s.tolist() == engine.requests.done_s
