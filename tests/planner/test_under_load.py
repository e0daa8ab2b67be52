"""Serving under load: percentiles around the calibrated means, objectives, and limits."""

import pytest

from planner.cost.quantity import Ledger
from planner.specs.estimate import EstimateRequest
from planner.workload.arrivals import step_costs
from planner.workload.capacity import max_concurrency
from planner.workload.estimator import estimate_request
from planner.workload.generate import decode_pass, prefill_pass
from planner.workload.resolve import resolve
from planner.workload.serve import intake_seconds, saturation_rate, serve
from planner.workload.under_load import simulated_requests
from tests.planner.asking import SERVE, ask

TIMES = ("ttft", "tpot", "latency")


def serving(engine="vllm", devices=1, strategy=None, **workload):
    return ask(
        workload={**SERVE, "concurrency": None, **workload},
        engine=engine,
        devices=devices,
        strategy=strategy or {},
    )


def setting_of(**workload):
    document = {
        "model": "meta-llama/Llama-3.1-8B",
        "cluster": {"device": "h100-sxm-80gb"},
        "workload": {**SERVE, "concurrency": None, **workload},
        "engine": "vllm",
    }
    return resolve(EstimateRequest.model_validate(document))


LOADS = [
    {"concurrency": 1},
    {"concurrency": 64},
    {"concurrency": 3000},
    {"request_rate_per_second": 3.0},
    {"burst_requests": 50},
    {},
]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", TIMES)
def test_percentiles_are_in_order(load, name):
    found = serving(**load).performance
    middle, high, highest = (getattr(found, f"{name}_p{p}_seconds") for p in (50, 90, 99))

    assert 0 < middle <= high <= highest


@pytest.mark.parametrize("load", LOADS)
def test_the_mean_lies_between_none_and_the_highest_percentile(load):
    found = serving(**load).performance

    assert found.ttft_seconds <= found.ttft_p99_seconds * (1 + 1e-9)


def test_each_percentile_is_explained_with_its_mean():
    found = serving(concurrency=64)
    (term,) = (t for t in found.terms if t.key == "ttft_p90")
    mean = next(one for one in term.inputs if one.symbol == "T")

    assert term.value == pytest.approx(found.performance.ttft_p90_seconds)
    assert mean.value == pytest.approx(found.performance.ttft_seconds)
    assert "simulation" in term.source


def test_one_caller_alone_always_waits_the_same():
    found = serving(concurrency=1).performance

    assert found.ttft_p99_seconds == pytest.approx(found.ttft_seconds, rel=1e-6)
    assert found.queue_seconds == 0.0


def test_equal_requests_get_equal_percentiles():
    first, second = (serving(request_rate_per_second=5.0).performance for _ in range(2))

    assert first == second


@pytest.mark.parametrize("field", ["ttft_seconds", "ttft_p90_seconds", "latency_p99_seconds"])
def test_a_higher_rate_waits_longer(field):
    rates = (0.5, 2.0, 8.0, 16.0, 24.0)
    waits = [getattr(serving(request_rate_per_second=r).performance, field) for r in rates]

    assert waits == sorted(waits)


def test_a_rate_beyond_saturation_is_refused_with_the_most_that_can_be_served():
    found = serving(request_rate_per_second=1e4)
    most = found.performance.max_requests_per_second

    assert any(f"the most is {most:.3g}" in warning for warning in found.warnings)
    assert found.performance.ttft_p50_seconds is None
    assert found.performance.requests_per_second == pytest.approx(most, rel=0.02)


def test_a_rate_just_below_saturation_is_served():
    most = serving(request_rate_per_second=1.0).performance.max_requests_per_second
    found = serving(request_rate_per_second=0.9 * most)

    assert found.performance.requests_per_second == pytest.approx(0.9 * most)
    assert not any("cannot be served" in warning for warning in found.warnings)


def test_two_replicas_saturate_at_twice_the_rate():
    one = serving(request_rate_per_second=1.0).performance.max_requests_per_second
    two = serving(request_rate_per_second=1.0, devices=2).performance.max_requests_per_second

    assert two == pytest.approx(2 * one)


def test_two_replicas_at_twice_the_rate_answer_as_one():
    one = serving(request_rate_per_second=4.0).performance
    two = serving(request_rate_per_second=8.0, devices=2).performance

    assert two.ttft_p99_seconds == pytest.approx(one.ttft_p99_seconds)


def test_a_burst_waits_half_of_all_prefills_in_the_mean():
    found = serving(burst_requests=101).performance

    assert found.queue_seconds == pytest.approx(50 * found.prefill_seconds)


def test_a_burst_beyond_memory_waits_for_half_of_the_lives_before_it():
    most = serving(burst_requests=1).performance.max_concurrency
    full, double = (serving(burst_requests=n).performance for n in (most, 3 * most))
    life = full.latency_seconds - full.queue_seconds

    assert double.queue_seconds - full.queue_seconds == pytest.approx(life, rel=0.05)


def test_objectives_that_all_meet_are_met_by_all():
    found = serving(concurrency=8, ttft_slo_seconds=60.0, tpot_slo_seconds=1.0).performance

    assert found.slo_attainment_ratio == 1.0


def test_impossible_objectives_are_met_by_nobody():
    found = serving(concurrency=8, ttft_slo_seconds=1e-6).performance

    assert found.slo_attainment_ratio == 0.0
    assert found.slo_max_concurrency == 0


def test_the_share_that_meets_an_objective_is_that_of_its_percentile():
    limit = serving(concurrency=64).performance.ttft_p90_seconds
    found = serving(concurrency=64, ttft_slo_seconds=limit).performance

    assert found.slo_attainment_ratio == pytest.approx(0.9, abs=0.03)


def test_the_most_callers_that_meet_an_objective_are_exactly_the_most():
    most = serving(concurrency=4, tpot_slo_seconds=0.02).performance.slo_max_concurrency
    at, beyond = (serving(concurrency=n).performance.tpot_seconds for n in (most, most + 1))

    assert at <= 0.02 < beyond


def test_the_highest_rate_that_meets_an_objective_meets_it():
    wanted = {"request_rate_per_second": 1.0, "ttft_slo_seconds": 0.1}
    most = serving(**wanted).performance.slo_max_requests_per_second
    at, beyond = (
        serving(request_rate_per_second=rate).performance.ttft_seconds
        for rate in (most, 1.05 * most)
    )

    assert at <= 0.1 < beyond


def test_a_search_that_needs_no_explanation_needs_no_simulation():
    document = {
        "model": "meta-llama/Llama-3.1-8B",
        "cluster": {"device": "h100-sxm-80gb"},
        "workload": {**SERVE, "concurrency": 8},
        "engine": "vllm",
    }
    found = estimate_request(EstimateRequest.model_validate(document), explain=False)
    assert found.performance.ttft_p50_seconds is None


def ratios(engine="vllm", **workload):
    """Return what the simulation finds of TTFT, TPOT and latency, over the closed forms.

    It begins where an engine has taken a request in: what that takes is added.
    """
    setting = setting_of(**workload)
    means = serve(setting, setting.workload, Ledger()).performance
    in_flight = (setting.workload.request_rate_per_second or 0.0) * means.latency_seconds
    found = simulated_requests(setting, setting.workload, means.max_concurrency, in_flight)
    intake = intake_seconds(setting)
    before = {"ttft": intake, "tpot": 0.0, "latency": intake}
    return [
        float(getattr(found, f"{name}_s").mean() + before[name])
        / getattr(means, f"{name}_seconds")
        for name in TIMES
    ]


SHAPES = [(512, 128), (1024, 256), (4096, 256)]


@pytest.mark.parametrize(("prompt", "output"), SHAPES)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_the_closed_form_of_an_open_loop_meets_its_simulation(prompt, output, share):
    """Within a quarter up to 80 % of saturation, for every time."""
    lengths = {"input_tokens": prompt, "output_tokens": output}
    setting = setting_of(request_rate_per_second=1.0, **lengths)
    most = max_concurrency(setting, setting.workload)
    rate = share * saturation_rate(setting, setting.workload, most)

    assert ratios(request_rate_per_second=rate, **lengths) == pytest.approx([1, 1, 1], rel=0.25)


@pytest.mark.parametrize(("prompt", "output"), SHAPES)
@pytest.mark.parametrize("size", [16, 64])
def test_the_closed_form_of_a_burst_meets_its_simulation(prompt, output, size):
    """Within a third: an engine that decodes beside prefill ends its prompts in whole steps."""
    lengths = {"input_tokens": prompt, "output_tokens": output}

    assert ratios(burst_requests=size, **lengths) == pytest.approx([1, 1, 1], rel=0.33)


@pytest.mark.parametrize(("prompt", "output"), SHAPES)
@pytest.mark.parametrize("callers", [1, 8, 64])
def test_the_closed_form_of_a_closed_loop_meets_its_simulation(prompt, output, callers):
    """TPOT and latency within a fifth; few measured callers wait up to twice as long for TTFT."""
    ttft, tpot, latency = ratios(concurrency=callers, input_tokens=prompt, output_tokens=output)

    assert (tpot, latency) == pytest.approx((1, 1), rel=0.2)
    assert 0.45 < ttft < 1.4


def test_interpolated_steps_cost_what_the_passes_cost():
    """Between the sizes that were costed; a full step is three prompts, a long one is half."""
    setting = setting_of(concurrency=48, input_tokens=2048, output_tokens=512)
    costs = step_costs(setting, setting.workload, 256, 8192.0)
    decode = decode_pass(setting, Ledger(), 48.0, 2300.0).total_s
    prefill = prefill_pass(setting, Ledger(), 3.0, 2048.0).total_s

    assert costs.decode_seconds(48, 48 * 2300.0) == pytest.approx(decode, rel=0.05)
    assert costs.prefill_seconds(3 * 2048.0) == pytest.approx(prefill, rel=0.05)
