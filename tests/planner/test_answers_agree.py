"""One answer, many figures: they follow from each other, and each has its record."""

import inspect
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.memory import MemoryUse
from planner.cost.quantity import Equation
from planner.cost.roofline import (
    drawn_watts,
    joules_per_token,
    of_electricity,
    run_joules,
    run_usd,
)
from planner.search.engine import explore
from planner.specs.estimate import Performance, PlanRequest
from planner.workload.outcome import HIGH, LOW, Confidence, Outcome, active_ratio
from tests.planner.asking import (
    CPU,
    GENERATE,
    LLAMA_8B,
    LLAMA_70B,
    SERVE,
    TINY,
    TRAIN,
    ask,
    document,
    held,
)

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


@cache
def answers():
    """Return an answer for each kind of work, by its kind."""
    return {
        kind: ask(device=PRICED, devices=1 if kind == "compress" else 2, workload=work)
        for kind, work in WORKLOADS.items()
    }


def test_the_peak_is_the_sum_of_its_classes_on_the_fullest_stage():
    for answer in answers().values():
        memory = answer.memory
        assert memory.per_device_peak_bytes == max(memory.per_stage_peak_bytes)
        assert sum(memory.breakdown_bytes.values()) == pytest.approx(
            memory.per_device_peak_bytes, abs=len(memory.breakdown_bytes)
        )
        assert all(size > 0 for size in memory.breakdown_bytes.values())


def test_a_peak_is_reported_for_each_stage_and_held_against_the_capacity():
    # A pipeline reports a peak for each stage.
    found = ask(model=LLAMA_70B, devices=4, strategy={"pipeline_parallel_size": 4})
    stages = found.memory.per_stage_peak_bytes
    assert len(stages) == 4
    assert found.memory.per_device_peak_bytes == max(stages)
    assert min(stages) > 0.8 * max(stages)  # 80 equal layers are 20 a stage

    # What fits is below the capacity and what does not says so.
    fitting, spilling = ask(device=PRICED), ask(device=PRICED, model=LLAMA_70B)
    assert fitting.fits
    assert fitting.memory.per_device_peak_bytes < fitting.memory.capacity_bytes
    assert not spilling.fits
    assert spilling.memory.per_device_peak_bytes > 0.9 * spilling.memory.capacity_bytes
    assert spilling.bound_by == "memory_capacity"

    # A peak is never said to be below the weights and the cache.
    found = ask(model=LLAMA_8B, device=PRICED, workload={**SERVE, "concurrency": 300})
    exact = found.memory.breakdown_bytes["weights"] + found.memory.breakdown_bytes["kv_cache"]
    assert found.interval["per_device_peak_bytes"][0] >= exact


def test_every_figure_lies_inside_its_interval():
    for answer in (*answers().values(), *every_kind()):
        for name, (low, high) in answer.interval.items():
            value = getattr(answer.performance, name, None) or getattr(answer, name, None)
            value = answer.memory.per_device_peak_bytes if value is None else value
            assert low <= value <= high, name
            assert 0 < low < high, name


def test_intervals_are_as_wide_as_what_is_known():
    # A rate and its time are equally unsure.
    found = ask(device=PRICED, workload=GENERATE).interval
    rate, time = found["requests_per_second"], found["latency_seconds"]
    assert rate[1] / rate[0] == pytest.approx(time[1] / time[0])
    # An alone batch waits for nobody so its first token is as sure.
    first, read = found["ttft_seconds"], found["prefill_seconds"]
    assert first == pytest.approx(read)
    # The first token of a queue is less sure than the pass that makes it.
    found = ask(device=PRICED, engine="tgi").interval
    waited, read = found["ttft_seconds"], found["prefill_seconds"]
    assert waited[1] / waited[0] > 1.4 * read[1] / read[0]

    # A measured device narrows its intervals.
    published = {**CPU, "provenance": "published"}
    measured, paper = (
        ask(model=TINY, device=device, workload=GENERATE).interval["per_device_peak_bytes"]
        for device in (CPU, published)
    )
    assert measured[1] / measured[0] <= paper[1] / paper[0]


def test_each_second_of_a_pass_is_in_exactly_one_class():
    for answer in answers().values():
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


def test_the_bill_and_the_power_follow_from_the_hours():
    # The bill is the hourly price times the hours.
    for answer in answers().values():
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

    # A device never draws more than its rating.
    for answer in answers().values():
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


def test_rates_and_times_of_a_run_follow_from_each_other():
    # A share of the devices does a share of the tokens.
    for kind in ["serve", "generate", "train"]:
        work = {**WORKLOADS[kind]}
        if kind == "generate":
            work["batch_size"] = 4
        found = ask(device=PRICED, devices=4, workload=work).performance
        assert found.tokens_per_second_per_device * 4 == pytest.approx(found.tokens_per_second)

    # A run takes its tokens at the rate of its steps.
    found = ask(device=PRICED, devices=2, workload=LORA).performance
    in_a_step = LORA["global_batch_size"] * LORA["sequence_length"]
    assert found.tokens_per_second == pytest.approx(in_a_step / found.step_seconds)
    assert found.duration_seconds == pytest.approx(10_000_000 * found.step_seconds / in_a_step)
    assert found.samples_per_second == pytest.approx(16 / found.step_seconds)

    # A given time trains the tokens that take that time.
    budget = ask(device=PRICED, workload={**TRAIN, "method": "lora", "time_budget_seconds": 3600})
    tokens = round(budget.performance.trained_tokens)
    asked = ask(device=PRICED, workload={**TRAIN, "method": "lora", "tokens": tokens})
    assert asked.performance.duration_seconds == pytest.approx(3600, rel=1e-4)

    # Utilisation is the arithmetic done over the peak.
    used = ask(device=PRICED, workload={**TRAIN, "method": "full"}).performance
    assert used.mfu == pytest.approx(used.model_flops_per_second_per_device / 1e15)


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


@cache
def every_kind():
    """Return an answer of two cards for each kind of work."""
    return [ask(devices=2, workload=work) for work in {**WORKLOADS, "train": TRAIN}.values()]


def test_every_term_has_an_equation_a_unit_and_inputs_by_symbol():
    rates = {"compute", "memory_bandwidth", "communication", "overhead"}
    for explained in every_kind():
        assert explained.terms or explained.strategy
        for name, value in explained.performance:
            assert value is None or math.isfinite(value), name
        for term in explained.terms:
            assert "=" in term.equation
            assert term.unit
            assert term.name
            assert all(entry.symbol for entry in term.inputs), term
            assert all(isinstance(entry.value, int | float | str) for entry in term.inputs), term
            # A calibrated equation lists its factor by the symbol that it has.
            assert "= k · (" not in term.equation or "k" in {one.symbol for one in term.inputs}
            # Every modelled rate says who published it.
            assert term.source or term.operator_class not in rates, term


def _equations() -> Iterator[Equation]:
    """Yield the equations that modules of the planner hold, also in their tables."""
    modules = [module for name, module in sys.modules.items() if name.startswith("planner.")]
    for value in [each for module in modules for each in vars(module).values()]:
        inner = value.values() if isinstance(value, Mapping) else value
        for one in inner if isinstance(inner, Iterable) else (value,):
            if type(one) is Equation:
                yield one


def test_an_equation_lists_every_symbol_also_of_what_nobody_gives():
    """Arguments with a default were left out: the number of all-reduces, the chunks of a stage."""
    formulas = {id(one): one for one in _equations()}.values()
    assert len(formulas) > 40
    for formula in formulas:
        needed = inspect.signature(formula.compute).parameters.values()
        given = {one.name: 1.0 for one in needed if one.default is inspect.Parameter.empty}
        listed = {one.symbol for one in formula.inputs(given)}
        optional = {one.name for one in needed if one.default is None}
        told = {symbol for name, symbol in formula.symbols.items() if name not in optional}
        assert told <= listed, formula.key


def test_terms_add_up_to_the_memory_and_the_seconds_of_the_answer():
    # The memory terms are the memory of the answer.
    found = ask()
    for name in ("weights", "kv_cache"):
        recorded = sum(t.value for t in found.terms if (t.group, t.key) == ("memory", name))
        assert recorded == pytest.approx(held(found, name), abs=1)

    # The terms of a pass add up to its seconds.
    found = ask(engine="vllm", devices=4, strategy={"tensor_parallel_size": 4})
    seconds = [term.value for term in found.terms if term.group == "prefill" and term.unit == "s"]
    assert sum(seconds) == pytest.approx(found.performance.prefill_seconds)
    # The breakdown of a phase adds up to its seconds.
    found = ask(model=TINY, device=CPU, workload=GENERATE)
    decode = sum(found.time_breakdown_seconds["decode"].values())
    assert decode == pytest.approx(found.performance.tpot_seconds)

    # An equation of a roofline can be checked by hand.
    (term,) = [t for t in ask().terms if (t.group, t.key) == ("decode", "linear")]
    given = {entry.symbol: entry.value for entry in term.inputs}
    compute = given["F"] / (given["peak"] * given["e_c"])
    memory = given["Q"] / (given["bandwidth"] * given["e_m"])
    assert term.value == pytest.approx(max(compute, memory))

    # Only the fullest stage is explained.
    found = ask(model=LLAMA_70B, devices=4, strategy={"pipeline_parallel_size": 4})
    assert len([t for t in found.terms if (t.group, t.key) == ("memory", "weights")]) == 1
    # The bound is the class that takes the most time.
    found = ask(workload={**GENERATE, "output_tokens": 500})
    decode = found.time_breakdown_seconds["decode"]
    assert found.bound_by == max(decode, key=decode.get)


few = settings(max_examples=25, deadline=None)
RATED = {
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
    return {"device": RATED, **grid}


@few
@given(active=st.floats(0.0, 1.0), idle=st.floats(0.0, 1.0))
def test_a_device_draws_between_idle_and_its_rating(active, idle):
    watts = float(drawn_watts(power_watts=700, idle_ratio=idle, active_ratio=active))
    assert 700 * idle - 1e-9 <= watts <= 700 + 1e-9


def test_power_goes_by_what_the_time_is_spent_on():
    # Arithmetic draws more than reading and reading more than waiting.
    classes = ("compute", "memory_bandwidth", "communication", "overhead")
    drawn = [active_ratio(outcome(**{name: 1.0})) for name in classes]
    assert drawn == sorted(drawn, reverse=True)
    # Power is weighted by the time of each class.
    half = active_ratio(outcome(compute=1.0, overhead=1.0))
    ends = active_ratio(outcome(compute=1.0)) + active_ratio(outcome(overhead=1.0))
    assert half == pytest.approx(ends / 2)
    # Work without a record counts as arithmetic.
    assert active_ratio(outcome()) == active_ratio(outcome(compute=1.0))

    # Cards that decode draw what was measured at the wall.
    for card in sorted(WALL):
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

    # Energy has an interval around it.
    low, high = found.interval["energy_joules_per_token"]
    assert low < found.energy_joules_per_token < high
    # Training draws nearly the rated power.
    found = ask(workload=TRAIN, engine="megatron")
    watts = next(term.value for term in found.terms if term.key == "drawn_watts")
    assert watts > 0.85 * 700


@few
@given(batch=st.sampled_from([1, 2, 4, 8]), times=st.sampled_from([2, 4]))
def test_a_larger_batch_never_takes_more_energy_per_token(batch, times):
    """APEX+ and GenZ charge the rated power whatever the work: batching looked free of power."""
    few_at_once, more = (
        ask(workload={**GENERATE, "batch_size": size}, engine="vllm").energy_joules_per_token
        for size in (batch, batch * times)
    )
    assert more < few_at_once


def test_a_run_of_known_length_has_energy_and_a_price():
    found = ask(workload=RUN, device=RATED, engine="megatron")
    seconds = found.performance.duration_seconds
    tokens = RUN["tokens"]
    assert found.run_cost_usd == pytest.approx(3.6 / 3600 * seconds)
    assert found.run_energy_joules == pytest.approx(found.energy_joules_per_token * tokens)
    assert found.run_cost_usd == pytest.approx(found.cost_usd_per_million_tokens * tokens / 1e6)

    # What has no end has no price of a run.
    found = ask(workload=SERVE, device=RATED)
    assert found.run_cost_usd is found.run_energy_joules is None
    # A compression costs energy for as long as it takes.
    found = ask(workload={"kind": "compress", "method": "gptq"}, device=RATED)
    assert found.energy_joules_per_token is None
    assert 0 < found.run_energy_joules <= 700 * found.performance.duration_seconds

    # Carbon and cost of a run can be limited.
    limits = {"run_cost_usd": {"max": 1e-6}}
    lora = {**RUN, "method": "lora", "global_batch_size": 1}
    fields = {"model": TINY, "device": RATED, "engine": "megatron"}
    request = document(**fields, workload=lora, constraints=limits)
    found = explore(PlanRequest.model_validate(request))
    assert not len(found.table.feasible)
    assert any(one.constraint == "run_cost_usd" for one in found.rejected.values())

    # An hour costs the hourly price.
    assert float(run_usd(num_devices=8, hourly_usd=2.5, duration_s=3600)) == 20.0


def test_carbon_needs_a_grid_and_a_rating():
    without = ask(cluster=placed())
    with_grid = ask(cluster=placed(grid_gco2_per_kwh=400.0))
    joules = with_grid.energy_joules_per_token
    assert without.carbon_grams_per_million_tokens is None
    assert with_grid.carbon_grams_per_million_tokens == pytest.approx(joules * 1e6 / 3.6e6 * 400)

    # A grid and a tariff price the whole run.
    grid = {"grid_gco2_per_kwh": 50.0, "electricity_usd_per_kwh": 0.2}
    found = ask(cluster=placed(**grid), workload=RUN, engine="megatron")
    kwh = found.run_energy_joules / 3.6e6
    assert found.run_carbon_grams == pytest.approx(50 * kwh)
    assert found.run_electricity_usd == pytest.approx(0.2 * kwh)

    # A grid without carbon emits nothing.
    found = ask(cluster=placed(grid_gco2_per_kwh=0.0))
    assert found.carbon_grams_per_million_tokens == 0.0
    # A device without a rating has no energy.
    device = {name: value for name, value in RATED.items() if name != "tdp_watts"}
    found = ask(cluster={"device": device, "grid_gco2_per_kwh": 400.0})
    assert found.energy_joules_per_token is found.carbon_grams_per_million_tokens is None
    # A kilowatt hour is three point six megajoules.
    assert float(of_electricity(energy_joules=3.6e6, per_kwh=400)) == 400.0


@few
@given(devices=st.integers(1, 64), watts=st.floats(10, 1000), seconds=st.floats(1.0, 1e6))
def test_a_run_is_its_rate_times_its_tokens(devices, watts, seconds):
    rate = 100.0
    each = joules_per_token(num_devices=devices, power_watts=watts, tokens_per_s=rate)
    whole = run_joules(num_devices=devices, power_watts=watts, duration_s=seconds)
    assert float(whole) == pytest.approx(float(each) * rate * seconds)
