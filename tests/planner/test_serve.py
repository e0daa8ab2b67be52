"""Serving: what more requests, longer prompts and more devices do."""

import pytest

from planner.errors import NotPossibleError
from tests.planner.asking import LLAMA_70B, MIXTRAL, SERVE, ask


def serving(**workload):
    return ask(workload={**SERVE, **workload}, engine="vllm")


def test_more_concurrency_gives_more_throughput_and_slower_tokens():
    few, many = serving(concurrency=4).performance, serving(concurrency=64).performance

    assert many.output_tokens_per_second > few.output_tokens_per_second
    assert many.tpot_seconds > few.tpot_seconds


def test_throughput_is_what_the_latencies_say():
    """The closed loop of the published rows: concurrency x output / (TTFT + gaps)."""
    found = serving().performance
    latency = found.ttft_seconds + 127 * found.tpot_seconds

    assert found.output_tokens_per_second == pytest.approx(16 * 128 / latency)


def test_requests_that_do_not_fit_wait_and_the_answer_says_so():
    found = serving(concurrency=4000, input_tokens=8000)

    assert found.performance.max_concurrency < 4000
    assert any("the rest wait" in warning for warning in found.warnings)
    assert found.performance.ttft_seconds > serving(input_tokens=8000).performance.ttft_seconds


def test_without_arrivals_the_most_that_memory_allows_is_served():
    found = ask(workload={**SERVE, "concurrency": None}, engine="vllm")

    assert found.performance.max_concurrency > 100
    slower = serving(concurrency=8).performance.output_tokens_per_second
    assert found.performance.output_tokens_per_second > slower


def test_a_slow_open_loop_serves_exactly_what_arrives():
    found = ask(
        workload={**SERVE, "concurrency": None, "request_rate_per_second": 0.5}, engine="vllm"
    )

    assert found.performance.requests_per_second == pytest.approx(0.5)


def test_a_faster_open_loop_waits_longer_for_each_token():
    slow, fast = (
        ask(workload={**SERVE, "concurrency": None, "request_rate_per_second": rate})
        for rate in (0.1, 2.0)
    )

    assert fast.performance.tpot_seconds > slow.performance.tpot_seconds


def test_a_shared_prefix_shortens_the_prefill():
    shared = serving(prefix_share_ratio=0.9).performance

    assert shared.prefill_seconds < 0.5 * serving().performance.prefill_seconds


def test_tensor_parallelism_speeds_up_a_big_model():
    two = ask(model=LLAMA_70B, devices=2, strategy={"tensor_parallel_size": 2}, engine="vllm")
    eight = ask(model=LLAMA_70B, devices=8, strategy={"tensor_parallel_size": 8}, engine="vllm")

    assert eight.performance.tpot_seconds < two.performance.tpot_seconds


def test_a_pipeline_takes_memory_off_each_device_but_no_time_off_a_single_request():
    one = {**SERVE, "concurrency": 1}
    alone = ask(workload=one, engine="vllm")
    piped = ask(workload=one, engine="vllm", devices=4, strategy={"pipeline_parallel_size": 4})

    assert piped.memory.per_device_peak_bytes < 0.5 * alone.memory.per_device_peak_bytes
    assert piped.performance.tpot_seconds >= alone.performance.tpot_seconds


def test_replicas_share_the_load():
    one = ask(engine="vllm")
    four = ask(engine="vllm", devices=4, strategy={"data_parallel_size": 4})

    assert four.performance.tpot_seconds < one.performance.tpot_seconds
    faster = four.performance.output_tokens_per_second
    assert faster > one.performance.output_tokens_per_second


def test_fp8_reads_half_and_computes_faster():
    """Measured kernels reach a smaller share of the doubled peak, and issuing costs the same."""
    wide = ask(engine="vllm").performance
    narrow = ask(engine="vllm", strategy={"weight_dtype": "fp8"}).performance

    assert narrow.tpot_seconds < wide.tpot_seconds
    assert narrow.prefill_seconds < 0.9 * wide.prefill_seconds


def test_a_sparse_model_needs_memory_for_all_experts_and_time_for_the_active_ones():
    """A fifth is active; measured expert kernels reach half of what those of dense layers do."""
    sparse = ask(model=MIXTRAL, devices=2, strategy={"tensor_parallel_size": 2}, engine="vllm")
    dense = ask(model=LLAMA_70B, devices=2, strategy={"tensor_parallel_size": 2}, engine="vllm")

    assert sparse.memory.breakdown_bytes["weights"] > 0.6 * dense.memory.breakdown_bytes["weights"]
    assert sparse.performance.prefill_seconds < 0.6 * dense.performance.prefill_seconds


def test_a_missed_objective_is_a_warning_with_both_figures():
    found = serving(ttft_slo_seconds=0.001)

    assert any("ttft_seconds" in warning and "0.001" in warning for warning in found.warnings)


def test_what_is_too_long_for_the_model_is_refused_or_warned_about():
    """vLLM does not start with a longer context (issue 16757), llama.cpp warns."""
    workload = {**SERVE, "input_tokens": 200_000, "concurrency": 1}
    found = ask(workload=workload, engine="llama_cpp")

    assert any("context of 131072" in warning for warning in found.warnings)
    with pytest.raises(NotPossibleError, match=r"200128 tokens .* context of 131072"):
        ask(workload=workload, engine="vllm")


def test_an_engine_without_figures_falls_back_with_a_warning_and_wider_intervals():
    known, unknown = ask(engine="vllm"), ask(engine="candle")
    widths = [high / low for low, high in (e.interval["tpot_seconds"] for e in (known, unknown))]

    assert any("no figures of its own" in warning for warning in unknown.warnings)
    assert widths[1] > widths[0]


def test_a_price_gives_dollars_per_million_tokens():
    device = {
        "memory_bytes": 80 * 1024**3,
        "memory_bandwidth_bytes_per_second": 3e12,
        "peak_flops_per_second": {"bf16": 9e14},
        "price_usd_per_hour": 3.6,
    }
    found = ask(device=device)
    rate = found.performance.output_tokens_per_second

    assert found.cost_usd_per_million_tokens == pytest.approx(3.6 / 3600 / rate * 1e6)
