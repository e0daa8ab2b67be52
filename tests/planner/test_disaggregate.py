"""Prefill and decode on different devices: two pools, the link between them, and Little's law."""

import pytest

from planner.errors import BadRequestError, NotCoveredError, NotPossibleError
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


@pytest.mark.parametrize("load", LOADS)
def test_every_load_is_answered(load):
    found = serving(load=load)

    assert found.fits
    assert 0 < found.performance.tpot_seconds < found.performance.latency_seconds
    assert (
        found.performance.requests_per_second <= found.performance.max_requests_per_second + 1e-9
    )


def test_the_slower_pool_sets_the_most_requests_a_second():
    found = serving(load={"request_rate_per_second": 1.0})
    pools = {t.key: t.value for t in found.terms if t.key in {"prefill_pool", "decode_pool"}}

    assert found.performance.max_requests_per_second == min(pools.values())


def test_more_prefill_devices_help_long_prompts_and_more_decode_devices_long_answers():
    def rate(prefill, **lengths):
        found = serving(prefill, 8 - prefill, {"request_rate_per_second": 0.1}, **lengths)
        return found.performance.max_requests_per_second

    reading = {"input_tokens": 8000, "output_tokens": 16}
    writing = {"input_tokens": 32, "output_tokens": 2000}

    assert rate(6, **reading) > rate(2, **reading)
    assert rate(2, **writing) > rate(6, **writing)


def test_no_prompt_interrupts_the_tokens_of_others():
    """The gap is the decode step alone: shorter than where the same devices do both."""
    apart, mixed = serving(load={"concurrency": 128}), together(concurrency=128)

    assert apart.performance.tpot_seconds < mixed.performance.tpot_seconds


def test_the_cache_travels_once_at_the_speed_of_the_link():
    fast, slow = serving(link=100e9), serving(link=1e9)
    sent = {t.key: t for t in slow.terms}["kv_transfer"]
    longer = slow.performance.ttft_seconds - fast.performance.ttft_seconds

    assert sent.value == pytest.approx(1024 * 131072 / 0.75e9, rel=0.05)
    assert longer == pytest.approx(sent.value * 0.99, rel=0.35)


def test_littles_law_holds_in_a_closed_loop():
    found = serving(load={"concurrency": 64}).performance

    assert found.requests_per_second * found.latency_seconds == pytest.approx(64, rel=0.1)


def test_callers_beyond_both_pools_wait_as_little_says():
    found = serving(load={"concurrency": 20_000}).performance

    assert found.requests_per_second == pytest.approx(found.max_requests_per_second, rel=0.01)
    assert found.queue_seconds > 0.5 * found.latency_seconds


def test_a_rate_that_no_pool_serves_is_named_with_the_most():
    found = serving(load={"request_rate_per_second": 1e5})

    assert any("cannot be served: the most is" in warning for warning in found.warnings)
    assert found.performance.requests_per_second < 1e5


def test_a_slow_open_loop_serves_exactly_what_arrives():
    found = serving(load={"request_rate_per_second": 0.25}).performance

    assert found.requests_per_second == pytest.approx(0.25, rel=1e-3)


def test_a_higher_rate_waits_longer_for_the_first_token():
    waits = [
        serving(load={"request_rate_per_second": rate}).performance.ttft_seconds
        for rate in (1.0, 10.0, 40.0)
    ]

    assert waits == sorted(waits)


def test_both_pools_are_in_the_answers_memory():
    found = serving()

    assert len(found.memory.per_stage_peak_bytes) == 2
    assert found.memory.per_device_peak_bytes == max(found.memory.per_stage_peak_bytes)


def test_uneven_pools_are_named_and_even_ones_are_not():
    uneven, even = (
        serving(1, decode, {"request_rate_per_second": 1.0}).warnings for decode in (9, 1)
    )

    assert any("uneven pools" in warning for warning in uneven)
    assert not any("uneven pools" in warning for warning in even)


def test_energy_and_money_count_the_devices_of_both_pools():
    found = serving(prefill=2, decode=6)
    rates = found.performance.tokens_per_second, found.performance.tokens_per_second_per_device

    assert rates[0] == pytest.approx(8 * rates[1])
    assert found.strategy.data_parallel_size == 8


def test_a_pool_is_a_whole_number_of_replicas():
    with pytest.raises(NotPossibleError, match="multiple of the 2 devices"):
        serving(prefill=3, decode=3, strategy={"tensor_parallel_size": 2})


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(NotPossibleError, match="the cluster has 16"):
        serving(prefill=16, decode=16)


def test_answers_of_one_token_need_no_decode_pool():
    with pytest.raises(BadRequestError, match="output_tokens is 1"):
        serving(output_tokens=1)


def test_a_fixed_batch_has_no_pools():
    with pytest.raises(NotCoveredError, match="costed for workload"):
        ask(
            devices=2,
            workload={"kind": "generate", "batch_size": 1, "input_tokens": 8, "output_tokens": 8},
            strategy={"disaggregated": {"prefill_devices": 1, "decode_devices": 1}},
        )


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


@pytest.mark.parametrize(
    ("pools", "pins", "words"),
    [
        ((4, 6), {}, "take 10 devices, the cluster has 8"),
        ((1, 2), {"tensor_parallel_size": 2}, "must be a multiple of the 2 devices"),
    ],
)
def test_pools_that_no_search_can_lay_out_are_refused_by_name(pools, pins, words):
    split = dict(zip(("prefill_devices", "decode_devices"), pools, strict=True))

    with pytest.raises(NotPossibleError, match=words):
        search(devices=8, engine="vllm", pins={"disaggregated": split, **pins})


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
