"""Energy, money and carbon: from drawn power, prices and a grid, each with its record."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.energy import drawn_watts, joules_per_token, of_electricity, run_joules, run_usd
from planner.cost.memory import MemoryUse
from planner.specs.estimate import Performance
from planner.workload.outcome import HIGH, LOW, Outcome, active_ratio
from tests.planner.asking import GENERATE, SERVE, TRAIN, ask, search

few = settings(max_examples=25, deadline=None)
PRICED = {
    "memory_bytes": 80 * 1024**3,
    "memory_bandwidth_bytes_per_second": 3e12,
    "peak_flops_per_second": {"bf16": 9e14},
    "price_usd_per_hour": 3.6,
    "tdp_watts": 700,
}
RUN = {**TRAIN, "tokens": 10_000_000}
# Peak wall power, in watts, of cards that decode a 14B model in q4_k_m on a Raspberry Pi, which
# takes about 13 W; a tenth is lost in the power supply. Source: geerlingguy/ai-benchmarks,
# README, 2025-12-18.
WALL = {
    "rtx-4090": (450, 397.5),
    "rtx-4070-ti": (285, 253.0),
    "rtx-2080-ti": (250, 275.2),
    "rtx-a4000": (140, 162.8),
    "rtx-3060-12gb": (170, 193.7),
    "radeon-ai-pro-r9700": (300, 279.7),
}
PI_WATTS, SUPPLY = 13.0, 0.9


def outcome(**seconds):
    memory = MemoryUse(stages=(), capacity_bytes=1, usable_bytes=1.0)
    return Outcome(memory, Performance(), seconds, fits=True, phases={})


def placed(**grid):
    return {"device": PRICED, **grid}


@few
@given(active=st.floats(0.0, 1.0), idle=st.floats(0.0, 1.0))
def test_a_device_draws_between_idle_and_its_rating(active, idle):
    watts = float(drawn_watts(power_watts=700, idle_ratio=idle, active_ratio=active))

    assert 700 * idle - 1e-9 <= watts <= 700 + 1e-9


def test_arithmetic_draws_more_than_reading_and_reading_more_than_waiting():
    classes = ("compute", "memory_bandwidth", "communication", "overhead")
    drawn = [active_ratio(outcome(**{name: 1.0})) for name in classes]

    assert drawn == sorted(drawn, reverse=True)


def test_power_is_weighted_by_the_time_of_each_class():
    half = active_ratio(outcome(compute=1.0, overhead=1.0))
    ends = active_ratio(outcome(compute=1.0)) + active_ratio(outcome(overhead=1.0))

    assert half == pytest.approx(ends / 2)


def test_work_without_a_record_counts_as_arithmetic():
    assert active_ratio(outcome()) == active_ratio(outcome(compute=1.0))


@pytest.mark.parametrize("card", sorted(WALL))
def test_cards_that_decode_draw_what_was_measured_at_the_wall(card):
    rated, wall = WALL[card]
    decoding = outcome(memory_bandwidth=9.0, overhead=1.0)
    low, high = (
        float(
            drawn_watts(
                power_watts=rated, idle_ratio=0.15, active_ratio=active_ratio(decoding, which)
            )
        )
        for which in (LOW, HIGH)
    )

    assert low <= (wall - PI_WATTS) * SUPPLY <= 1.02 * high


def test_energy_per_token_is_drawn_power_over_throughput():
    found = ask(engine="vllm")
    rate = found.performance.output_tokens_per_second
    watts = next(term.value for term in found.terms if term.key == "drawn_watts")

    assert found.energy_joules_per_token == pytest.approx(watts / rate)
    assert 0.3 * 700 < watts < 700


def test_energy_has_an_interval_around_it():
    found = ask(engine="vllm")
    low, high = found.interval["energy_joules_per_token"]

    assert low < found.energy_joules_per_token < high


@few
@given(batch=st.sampled_from([1, 2, 4, 8]), times=st.sampled_from([2, 4]))
def test_a_larger_batch_never_takes_more_energy_per_token(batch, times):
    """APEX+ and GenZ charge the rated power whatever the work: batching looked free of power."""
    few_at_once, more = (
        ask(workload={**GENERATE, "batch_size": size}, engine="vllm").energy_joules_per_token
        for size in (batch, batch * times)
    )

    assert more < few_at_once


def test_training_draws_nearly_the_rated_power():
    found = ask(workload=TRAIN, engine="megatron")
    watts = next(term.value for term in found.terms if term.key == "drawn_watts")

    assert watts > 0.85 * 700


def test_a_run_of_known_length_has_energy_and_a_price():
    found = ask(workload=RUN, device=PRICED, engine="megatron")
    seconds = found.performance.duration_seconds
    tokens = RUN["tokens"]

    assert found.run_cost_usd == pytest.approx(3.6 / 3600 * seconds)
    assert found.run_energy_joules == pytest.approx(found.energy_joules_per_token * tokens)
    assert found.run_cost_usd == pytest.approx(found.cost_usd_per_million_tokens * tokens / 1e6)


def test_what_has_no_end_has_no_price_of_a_run():
    found = ask(workload=SERVE, device=PRICED)

    assert found.run_cost_usd is found.run_energy_joules is None


def test_a_compression_costs_energy_for_as_long_as_it_takes():
    found = ask(workload={"kind": "compress", "method": "gptq"}, device=PRICED)

    assert found.energy_joules_per_token is None
    assert 0 < found.run_energy_joules <= 700 * found.performance.duration_seconds


def test_carbon_needs_a_grid():
    without = ask(cluster=placed())
    with_grid = ask(cluster=placed(grid_gco2_per_kwh=400.0))
    joules = with_grid.energy_joules_per_token

    assert without.carbon_grams_per_million_tokens is None
    assert with_grid.carbon_grams_per_million_tokens == pytest.approx(joules * 1e6 / 3.6e6 * 400)


def test_a_grid_and_a_tariff_price_the_whole_run():
    grid = {"grid_gco2_per_kwh": 50.0, "electricity_usd_per_kwh": 0.2}
    found = ask(cluster=placed(**grid), workload=RUN, engine="megatron")
    kwh = found.run_energy_joules / 3.6e6

    assert found.run_carbon_grams == pytest.approx(50 * kwh)
    assert found.run_electricity_usd == pytest.approx(0.2 * kwh)


def test_a_grid_without_carbon_emits_nothing():
    found = ask(cluster=placed(grid_gco2_per_kwh=0.0))

    assert found.carbon_grams_per_million_tokens == 0.0


def test_a_device_without_a_rating_has_no_energy():
    device = {name: value for name, value in PRICED.items() if name != "tdp_watts"}
    found = ask(cluster={"device": device, "grid_gco2_per_kwh": 400.0})

    assert found.energy_joules_per_token is found.carbon_grams_per_million_tokens is None


def test_carbon_and_cost_of_a_run_can_be_limited():
    limits = {"run_cost_usd": {"max": 1e-6}}
    lora = {**RUN, "method": "lora", "global_batch_size": 1}
    answer = search(device=PRICED, workload=lora, engine="megatron", constraints=limits)

    assert not answer.plans
    assert any(one.constraint == "run_cost_usd" for one in answer.rejected.values())


@few
@given(devices=st.integers(1, 64), watts=st.floats(10, 1000), seconds=st.floats(1.0, 1e6))
def test_a_run_is_its_rate_times_its_tokens(devices, watts, seconds):
    rate = 100.0
    each = joules_per_token(num_devices=devices, power_watts=watts, tokens_per_s=rate)
    whole = run_joules(num_devices=devices, power_watts=watts, duration_s=seconds)

    assert float(whole) == pytest.approx(float(each) * rate * seconds)


def test_an_hour_costs_the_hourly_price():
    assert float(run_usd(num_devices=8, hourly_usd=2.5, duration_s=3600)) == 20.0


def test_a_kilowatt_hour_is_three_point_six_megajoules():
    assert float(of_electricity(energy_joules=3.6e6, per_kwh=400)) == 400.0
