"""Our own runner: one batch, eager kernels, rates measured on the host."""

import pytest

from tests.planner.asking import CPU, GENERATE, TINY, ask, held


def on_cpu(dtype="bf16", **workload):
    return ask(
        model=TINY,
        device=CPU,
        workload={**GENERATE, **workload},
        strategy={"weight_dtype": dtype},
    )


def test_latency_is_one_prefill_and_a_step_per_further_token():
    found = on_cpu().performance

    expected = found.ttft_seconds + 63 * found.tpot_seconds
    assert found.latency_seconds == pytest.approx(expected)


def test_speeds_are_those_of_the_whole_batch():
    found = on_cpu(batch_size=4).performance

    assert found.prefill_tokens_per_second == pytest.approx(4 * 128 / found.ttft_seconds)
    assert found.decode_tokens_per_second == pytest.approx(4 / found.tpot_seconds)


def test_one_token_has_no_gap():
    found = on_cpu(output_tokens=1).performance

    assert found.tpot_seconds is None
    assert found.latency_seconds == found.ttft_seconds


def test_issuing_operators_dominates_a_small_model():
    assert on_cpu().bound_by == "overhead"


def test_products_dominate_a_long_prompt():
    phase = on_cpu(batch_size=8, input_tokens=512).time_breakdown_seconds["prefill"]

    assert max(phase, key=phase.get) == "compute"


def test_a_slower_operator_slows_every_step():
    slow = {**CPU, "op_overhead_seconds": 5e-6}
    found = ask(model=TINY, device=slow, workload=GENERATE)

    assert found.performance.tpot_seconds > 3 * on_cpu().performance.tpot_seconds


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_eager_kernels_dequantise_so_that_fewer_bits_save_memory_but_no_time(dtype):
    plain, packed = on_cpu("bf16"), on_cpu(dtype)

    assert packed.memory.breakdown_bytes["weights"] < plain.memory.breakdown_bytes["weights"]
    assert packed.performance.tpot_seconds > plain.performance.tpot_seconds


def test_int4_stands_for_nf4_in_our_own_runner_and_its_evidence_is_nf4s():
    assert "NF4" in on_cpu("int4").quality.evidence[0]


def test_measured_rates_are_said_to_be_measured_with_their_date():
    sources = {term.source for term in on_cpu().terms if term.provenance == "measured"}

    assert sources == {"rates measured on this host on 2026-11-21"}


def test_a_measured_device_is_surer_than_a_datasheet():
    assert on_cpu().error_class == "same family"
    assert ask(workload=GENERATE).error_class == "datasheet only"


def test_a_batch_that_does_not_fit_says_memory():
    found = ask(workload={**GENERATE, "batch_size": 4096, "input_tokens": 8000})

    assert not found.fits
    assert found.bound_by == "memory_capacity"


def test_a_measured_stream_rate_replaces_the_share_of_the_bandwidth():
    fast = {**CPU, "weight_stream_bytes_per_second": {"bf16": 100e9}}
    found = ask(model=TINY, device=fast, workload=GENERATE)

    assert found.performance.tpot_seconds < on_cpu().performance.tpot_seconds


def test_what_the_host_measured_replaces_the_prior_of_the_runtime():
    measured = {**CPU, "runtime_overhead_bytes": 380_000_000}

    found = ask(model=TINY, device=measured, workload=GENERATE)

    assert held(found, "runtime_overhead") == 380_000_000


def test_another_engine_keeps_its_own_overhead():
    measured = {**CPU, "runtime_overhead_bytes": 380_000_000}

    found = ask(model=TINY, device=measured, workload=GENERATE, engine="llama_cpp")

    assert held(found, "runtime_overhead") != 380_000_000
