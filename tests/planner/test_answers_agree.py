"""One answer, many figures: whatever follows from two of them by arithmetic is the third."""

import math
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.workload.outcome import Confidence
from tests.planner.asking import CPU, GENERATE, LLAMA_8B, LLAMA_70B, SERVE, TINY, TRAIN, ask

GIB = 1024**3
PRICED = {
    "id": "priced",
    "memory_bytes": 80 * GIB,
    "memory_bandwidth_bytes_per_second": 3e12,
    "peak_flops_per_second": {"bf16": 1e15},
    "intra_node_bandwidth_bytes_per_second": 450e9,
    "price_usd_per_hour": 3.6,
    "tdp_watts": 700,
}
COMPRESS = {"kind": "compress", "method": "gptq"}
LORA = {**TRAIN, "method": "lora", "tokens": 10_000_000}
WORKLOADS = {"serve": SERVE, "generate": GENERATE, "train": LORA, "compress": COMPRESS}
# The 90 % quantile of the normal distribution, from a printed table.
QUANTILE = 1.2816


@pytest.fixture(params=sorted(WORKLOADS))
def answer(request):
    devices = 1 if request.param == "compress" else 2
    return ask(device=PRICED, devices=devices, workload=WORKLOADS[request.param])


def test_the_peak_is_the_sum_of_its_classes_on_the_fullest_stage(answer):
    memory = answer.memory

    assert memory.per_device_peak_bytes == max(memory.per_stage_peak_bytes)
    assert sum(memory.breakdown_bytes.values()) == pytest.approx(
        memory.per_device_peak_bytes, abs=len(memory.breakdown_bytes)
    )
    assert all(size > 0 for size in memory.breakdown_bytes.values())


def test_a_pipeline_reports_a_peak_for_each_stage():
    found = ask(model=LLAMA_70B, devices=4, strategy={"pipeline_parallel_size": 4})

    stages = found.memory.per_stage_peak_bytes
    assert len(stages) == 4
    assert found.memory.per_device_peak_bytes == max(stages)
    assert min(stages) > 0.8 * max(stages)  # 80 equal layers are 20 a stage


def test_what_fits_is_below_the_capacity_and_what_does_not_says_so():
    fitting, spilling = ask(device=PRICED), ask(device=PRICED, model=LLAMA_70B)

    assert fitting.fits
    assert fitting.memory.per_device_peak_bytes < fitting.memory.capacity_bytes
    assert not spilling.fits
    assert spilling.memory.per_device_peak_bytes > 0.9 * spilling.memory.capacity_bytes
    assert spilling.bound_by == "memory_capacity"


def test_every_figure_lies_inside_its_interval(answer):
    for name, (low, high) in answer.interval.items():
        value = getattr(answer.performance, name, None) or getattr(answer, name, None)
        value = answer.memory.per_device_peak_bytes if value is None else value
        assert low <= value <= high, name
        assert 0 < low < high, name


def test_a_rate_and_its_time_are_equally_unsure():
    found = ask(device=PRICED, workload=GENERATE).interval

    rate, time = found["requests_per_second"], found["latency_seconds"]
    assert rate[1] / rate[0] == pytest.approx(time[1] / time[0])


def test_each_second_of_a_pass_is_in_exactly_one_class(answer):
    seconds = answer.performance
    wholes = {
        "prefill": seconds.prefill_seconds,
        "train_step": seconds.step_seconds,
        "compress": seconds.duration_seconds,
    }

    for phase, split in answer.time_breakdown_seconds.items():
        assert all(part > 0 for part in split.values())
        if phase in wholes:
            assert sum(split.values()) == pytest.approx(wholes[phase])


def test_the_bill_is_the_hourly_price_times_the_hours(answer):
    devices = 1 if answer.performance.tokens_per_second is None else 2

    # 3.6 dollars an hour are 0.001 dollars a second.
    if answer.cost_usd_per_million_tokens is not None:
        rate = answer.performance.tokens_per_second
        expected = devices * 0.001 * 1e6 / rate
        assert answer.cost_usd_per_million_tokens == pytest.approx(expected)
    if answer.run_cost_usd is not None:
        expected = devices * 0.001 * answer.performance.duration_seconds
        assert answer.run_cost_usd == pytest.approx(expected)
    assert answer.cost_usd_per_million_tokens or answer.run_cost_usd


def test_a_device_never_draws_more_than_its_rating(answer):
    if answer.run_energy_joules is not None:
        devices = 1 if answer.performance.tokens_per_second is None else 2
        watts = answer.run_energy_joules / answer.performance.duration_seconds / devices
    else:
        watts = answer.energy_joules_per_token * answer.performance.tokens_per_second / 2

    assert 0 < watts <= 700


@given(batch=st.integers(1, 64), prompt=st.integers(1, 2000), output=st.integers(2, 500))
@settings(max_examples=25, deadline=None)
def test_a_generated_batch_takes_its_prompt_and_its_further_tokens(batch, prompt, output):
    work = {"kind": "generate", "batch_size": batch, "input_tokens": prompt}

    found = ask(device=PRICED, workload={**work, "output_tokens": output}).performance

    seconds = found.prefill_seconds + (output - 1) * found.tpot_seconds
    assert found.latency_seconds == pytest.approx(seconds)
    assert found.tokens_per_second == pytest.approx(batch * output / seconds)
    assert found.requests_per_second == pytest.approx(batch / seconds)
    assert found.prefill_tokens_per_second == pytest.approx(batch * prompt / found.prefill_seconds)


@given(callers=st.integers(1, 300), output=st.integers(2, 400))
@settings(max_examples=20, deadline=None)
def test_callers_who_ask_again_at_once_are_what_little_counts(callers, output):
    work = {"kind": "serve", "input_tokens": 512, "concurrency": callers, "output_tokens": output}

    found = ask(device=PRICED, engine="vllm", workload=work).performance

    inside = found.requests_per_second * found.latency_seconds
    assert inside == pytest.approx(callers, rel=1e-6)
    assert found.tokens_per_second == pytest.approx(found.requests_per_second * output)
    assert found.latency_seconds == pytest.approx(
        found.ttft_seconds + (output - 1) * found.tpot_seconds
    )


@pytest.mark.parametrize("kind", ["serve", "generate", "train"])
def test_a_share_of_the_devices_does_a_share_of_the_tokens(kind):
    work = {**WORKLOADS[kind]}
    if kind == "generate":
        work["batch_size"] = 4

    found = ask(device=PRICED, devices=4, workload=work).performance

    assert found.tokens_per_second_per_device * 4 == pytest.approx(found.tokens_per_second)


def test_a_run_takes_its_tokens_at_the_rate_of_its_steps():
    found = ask(device=PRICED, devices=2, workload=LORA).performance

    in_a_step = LORA["global_batch_size"] * LORA["sequence_length"]
    assert found.tokens_per_second == pytest.approx(in_a_step / found.step_seconds)
    assert found.duration_seconds == pytest.approx(10_000_000 * found.step_seconds / in_a_step)
    assert found.samples_per_second == pytest.approx(16 / found.step_seconds)


def test_a_given_time_trains_the_tokens_that_take_that_time():
    budget = ask(device=PRICED, workload={**TRAIN, "method": "lora", "time_budget_seconds": 3600})

    tokens = round(budget.performance.trained_tokens)
    asked = ask(device=PRICED, workload={**TRAIN, "method": "lora", "tokens": tokens})

    assert asked.performance.duration_seconds == pytest.approx(3600, rel=1e-4)


def test_utilisation_is_the_arithmetic_done_over_the_peak():
    found = ask(device=PRICED, workload={**TRAIN, "method": "full"}).performance

    assert found.mfu == pytest.approx(found.model_flops_per_second_per_device / 1e15)


@given(value=st.floats(1e-6, 1e9), spread=st.floats(0.0, 2.0))
def test_an_interval_is_as_many_times_above_as_below(value, spread):
    sure = Confidence("same family", spread, spread)

    low, high = sure.interval(value, spread)

    assert low * high == pytest.approx(value**2)
    assert math.log(high / value) == pytest.approx(QUANTILE * spread, rel=1e-3, abs=1e-9)


def test_an_interval_holds_four_fifths_of_log_normal_errors():
    """Normal quantiles 0.1 to 0.9 in even steps: the middle eight tenths must lie inside."""
    spread, errors = 0.25, [NormalDist().inv_cdf((i + 0.5) / 1000) for i in range(1000)]
    low, high = Confidence("datasheet only", spread, spread).interval(1.0, spread)

    inside = sum(low <= math.exp(spread * error) <= high for error in errors)

    assert inside == pytest.approx(800, abs=2)


def test_the_first_token_of_a_queue_is_less_sure_than_the_pass_that_makes_it():
    found = ask(device=PRICED, engine="tgi").interval

    waited, read = found["ttft_seconds"], found["prefill_seconds"]
    assert waited[1] / waited[0] > 1.5 * read[1] / read[0]


def test_an_alone_batch_waits_for_nobody_so_its_first_token_is_as_sure():
    found = ask(device=PRICED, workload=GENERATE).interval

    first, read = found["ttft_seconds"], found["prefill_seconds"]
    assert first == pytest.approx(read)


def test_a_peak_is_never_said_to_be_below_the_weights_and_the_cache():
    found = ask(model=LLAMA_8B, device=PRICED, workload={**SERVE, "concurrency": 300})

    exact = found.memory.breakdown_bytes["weights"] + found.memory.breakdown_bytes["kv_cache"]
    assert found.interval["per_device_peak_bytes"][0] >= exact


def test_a_measured_device_narrows_its_intervals():
    published = {**CPU, "provenance": "published"}

    measured, paper = (
        ask(model=TINY, device=device, workload=GENERATE).interval["per_device_peak_bytes"]
        for device in (CPU, published)
    )

    assert measured[1] / measured[0] <= paper[1] / paper[0]
