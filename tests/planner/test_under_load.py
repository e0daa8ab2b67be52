"""Serving under load: waiting by hand, percentiles around the means, and limits on them."""

import itertools
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.api import plan
from planner.cost.quantity import Ledger
from planner.cost.queueing import (
    chance_of_decode_overlap,
    mean_token_gap,
    poisson_prompts_before,
    slot_wait,
    steps_in_burst,
    time_to_first_token,
    usual_time_to_first_token,
)
from planner.search.engine import explore
from planner.search.question import (
    FAR_BEYOND,
    constraints_of,
    first_violation,
    is_percentile,
    is_simulated,
    mean_bound,
    strategy_family_of,
)
from planner.search.rank import criteria, frontier, order_of
from planner.search.select import Table
from planner.specs.estimate import APPLICABILITY, Bound, EstimateRequest, Performance, PlanRequest
from planner.workload.arrivals import Traffic, _lengths, step_costs
from planner.workload.costing import estimate_request
from planner.workload.generate import decode_pass, max_concurrency, prefill_pass
from planner.workload.outcome import Admission
from planner.workload.resolve import resolve
from planner.workload.serve import saturation_rate, serve
from planner.workload.under_load import RequestTimes, percentiles, simulated_requests
from tests.planner.asking import LLAMA_8B, LLAMA_70B, SERVE, ask, document, stored_first
from tests.plugins.extent import sample

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
    {"concurrency": 1}, {"concurrency": 64}, {"concurrency": 3000},
    {"request_rate_per_second": 3.0}, {"burst_requests": 50}, {},
]  # fmt: skip


def test_percentiles_are_in_order():
    wrong = []
    for load, name in itertools.product(LOADS, TIMES):
        found = serving(**load).performance
        middle, high, highest = (getattr(found, f"{name}_p{p}_seconds") for p in (50, 90, 99))
        if not 0 < middle <= high <= highest:
            wrong.append((load, name))
    assert not wrong, wrong


def test_each_percentile_is_explained_beside_a_mean_between_none_and_the_highest():
    for load in LOADS:
        found = serving(**load).performance
        assert found.ttft_seconds <= found.ttft_p99_seconds * (1 + 1e-9), load

    found = serving(concurrency=64)
    (term,) = (t for t in found.terms if t.key == "ttft_p90")
    mean = next(one for one in term.inputs if one.symbol == "T")
    assert term.value == pytest.approx(found.performance.ttft_p90_seconds)
    assert mean.value == pytest.approx(found.performance.ttft_seconds)
    assert "simulation" in term.source


def test_one_caller_always_waits_the_same_and_a_higher_rate_longer():
    found = serving(concurrency=1).performance
    assert found.ttft_p99_seconds == pytest.approx(found.ttft_seconds, rel=1e-6)
    assert found.queue_seconds == 0.0

    first, second = (serving(request_rate_per_second=5.0).performance for _ in range(2))
    assert first == second

    rates = (0.5, 2.0, 8.0, 16.0, 24.0)
    for field in ("ttft_seconds", "ttft_p90_seconds", "latency_p99_seconds"):
        waits = [getattr(serving(request_rate_per_second=r).performance, field) for r in rates]
        assert waits == sorted(waits), field


def test_a_rate_is_served_up_to_saturation_and_refused_beyond():
    found = serving(request_rate_per_second=1e4)
    most = found.performance.max_requests_per_second
    assert any(f"the most is {most:.3g}" in warning for warning in found.warnings)
    assert found.performance.ttft_p50_seconds is None
    assert found.performance.requests_per_second == pytest.approx(most, rel=0.05)

    most = serving(request_rate_per_second=1.0).performance.max_requests_per_second
    found = serving(request_rate_per_second=0.9 * most)
    assert found.performance.requests_per_second == pytest.approx(0.9 * most)
    assert not any("cannot be served" in warning for warning in found.warnings)


def test_two_replicas_at_twice_the_rate_are_as_one():
    one = serving(request_rate_per_second=1.0).performance.max_requests_per_second
    two = serving(request_rate_per_second=1.0, devices=2).performance.max_requests_per_second
    assert two == pytest.approx(2 * one)
    one = serving(request_rate_per_second=4.0).performance
    two = serving(request_rate_per_second=8.0, devices=2).performance
    assert two.ttft_p99_seconds == pytest.approx(one.ttft_p99_seconds)


def test_a_burst_waits_half_of_its_prefills_and_beyond_memory_for_lives():
    # Prompts are read in full steps, which take a prompt less than they would alone.
    found = serving(burst_requests=101).performance
    assert 0.4 < found.queue_seconds / (101 * found.prefill_seconds) < 0.6
    most = serving(burst_requests=1).performance.max_concurrency
    full, double = (serving(burst_requests=n).performance for n in (most, 3 * most))
    life = full.latency_seconds - full.queue_seconds
    # Two more waves, of which a request waits for one; full steps take longer than the first ones.
    assert life < double.queue_seconds - full.queue_seconds < 3 * life


def test_objectives_are_met_by_all_none_or_the_share_of_their_percentile():
    found = serving(concurrency=8, ttft_slo_seconds=60.0, tpot_slo_seconds=1.0).performance
    assert found.slo_attainment_ratio == 1.0
    found = serving(concurrency=8, ttft_slo_seconds=1e-6).performance
    assert found.slo_attainment_ratio == 0.0
    assert found.slo_max_concurrency == 0
    limit = serving(concurrency=64).performance.ttft_p90_seconds
    found = serving(concurrency=64, ttft_slo_seconds=limit).performance
    assert found.slo_attainment_ratio == pytest.approx(0.9, abs=0.03)


def test_the_most_callers_and_the_highest_rate_that_meet_an_objective_are_the_most():
    most = serving(concurrency=4, tpot_slo_seconds=0.02).performance.slo_max_concurrency
    at, beyond = (serving(concurrency=n).performance.tpot_seconds for n in (most, most + 1))
    assert at <= 0.02 < beyond

    wanted = {"request_rate_per_second": 1.0, "ttft_slo_seconds": 0.06}
    most = serving(**wanted).performance.slo_max_requests_per_second
    at, beyond = (
        serving(request_rate_per_second=rate).performance.ttft_seconds
        for rate in (most, 1.05 * most)
    )

    assert at <= 0.06 < beyond


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

    It begins where a step can read a prompt: what passes until then is added.
    """
    setting = setting_of(**workload)
    outcome = serve(setting, setting.workload, Ledger())
    means, admission = outcome.performance, sum(outcome.admission)
    in_flight = (setting.workload.request_rate_per_second or 0.0) * means.latency_seconds
    found = simulated_requests(setting, setting.workload, means.max_concurrency, in_flight)
    before = {"ttft": admission, "tpot": 0.0, "latency": admission}
    return [
        float(getattr(found, f"{name}_s").mean() + before[name])
        / getattr(means, f"{name}_seconds")
        for name in TIMES
    ]


SHAPES = [(512, 128), (1024, 256), (4096, 256)]


def test_the_closed_forms_of_every_load_meet_their_simulation():
    # Within 15 % up to 80 % of saturation, for every time.
    for (prompt, output), share in itertools.product(SHAPES, (0.2, 0.5, 0.8)):
        lengths = {"input_tokens": prompt, "output_tokens": output}
        setting = setting_of(request_rate_per_second=1.0, **lengths)
        most = max_concurrency(setting, setting.workload)
        rate = share * saturation_rate(setting, setting.workload, most)
        found = ratios(request_rate_per_second=rate, **lengths)
        assert found == pytest.approx([1, 1, 1], rel=0.15), (prompt, output, share)

    # Within a third: an engine that decodes beside prefill ends its prompts in whole steps.
    for (prompt, output), size in itertools.product(SHAPES, (16, 64)):
        lengths = {"input_tokens": prompt, "output_tokens": output}
        assert ratios(burst_requests=size, **lengths) == pytest.approx([1, 1, 1], rel=0.33)

    # Within a tenth; of lengths that vary within a sixth.
    for (prompt, output), callers in itertools.product(SHAPES, (1, 8, 64)):
        load = {"concurrency": callers, "input_tokens": prompt, "output_tokens": output}
        assert ratios(**load) == pytest.approx([1, 1, 1], rel=0.1), load
        assert ratios(**load, length_variation=0.5) == pytest.approx([1, 1, 1], rel=0.16), load


def test_lengths_have_the_mean_and_the_variation_that_are_stated():
    for variation, longest in ((0.06, 1.2), (0.5, 2.0), (1.0, 15.0), (2.0, 60.0)):
        traffic = Traffic(1000.0, 500, [0.0], 20_000, length_variation=variation)
        for mean, lengths in zip((1000, 500), _lengths(traffic, 20_000), strict=True):
            assert np.mean(lengths) == pytest.approx(mean, rel=0.01), variation
            assert np.std(lengths) / mean == pytest.approx(variation, rel=0.05), variation
            assert min(lengths) >= 1
            assert max(lengths) <= longest * mean, variation
    prompts, answers = _lengths(Traffic(1000.0, 500, [0.0], 9, 0.03), 9)
    assert set(prompts) == {1000.0}
    assert max(answers) < 1.04 * min(answers) * 1.04


def test_no_request_is_longer_than_the_longest_that_is_accepted():
    traffic = Traffic(100.0, 100, [0.0] * 5000, length_variation=1.5, longest_tokens=400)
    prompts, answers = (np.array(each) for each in _lengths(traffic, 5000))
    assert (prompts + answers).max() == pytest.approx(400, abs=1)
    free, _ = (np.array(each) for each in _lengths(replace(traffic, longest_tokens=np.inf), 5000))
    assert (prompts == free).sum() > 2500
    assert free.max() > 400


def test_looks_for_requests_come_at_any_time_and_so_do_open_loops():
    """A look every 31st step makes some wait none of 30 steps and some all of them."""
    plain, seldom = (
        ask(
            engine="sglang",
            workload={**SERVE, "concurrency": None, "request_rate_per_second": 4.0},
            strategy={"scheduler_recv_interval": interval},
        ).performance
        for interval in (1, 31)
    )
    added = seldom.ttft_seconds - plain.ttft_seconds
    step = plain.tpot_seconds
    assert added == pytest.approx(15 * step, rel=0.25)
    # Evenly spread: the 90th percentile waits four fifths of the mean longer than the median.
    apart = [one.ttft_p90_seconds - one.ttft_p50_seconds for one in (plain, seldom)]
    assert apart[1] - apart[0] == pytest.approx(0.8 * added, rel=0.35)


def test_one_caller_shows_the_tail_of_lengths_as_an_idle_open_loop_does():
    lengths = {"input_tokens": 1024, "output_tokens": 256, "length_variation": 1.0}
    alone = serving(concurrency=1, **lengths).performance
    idle = serving(request_rate_per_second=0.01, **lengths).performance
    assert alone.latency_p95_seconds == pytest.approx(idle.latency_p95_seconds, rel=0.15)
    assert alone.latency_p99_seconds > 3.5 * alone.latency_seconds
    rates = [
        serving(**{**SERVE, "concurrency": None, "request_rate_per_second": 1.0}, **more)
        .performance.max_requests_per_second
        for more in ({}, {"length_variation": 0.5}, {"length_variation": 2.0})
    ]  # fmt: skip
    assert len(set(rates)) == 1


def test_longer_tails_follow_from_lengths_that_vary():
    load = {"request_rate_per_second": 8.0, "input_tokens": 1024, "output_tokens": 256}
    found = [serving(**load, **more).performance for more in (
        {}, {"length_variation": 0.3}, {"length_variation": 0.57}, {"length_variation": 1.0},
    )]  # fmt: skip
    for name in ("ttft", "latency"):
        tails = [getattr(one, f"{name}_p99_seconds") for one in found]
        assert tails == sorted(tails), name
    assert found[-1].latency_p50_seconds < found[0].latency_p50_seconds  # most are short


def test_what_passes_before_a_step_reads_a_prompt_is_the_same_for_all():
    times = np.array([1.0, 2.0, 5.0])
    simulated = RequestTimes(times, times, times)
    means = Performance(ttft_seconds=4.0, tpot_seconds=1.0, latency_seconds=9.0)
    later = means.model_copy(update={"ttft_seconds": 7.0, "latency_seconds": 12.0})
    plain, awaited = (
        percentiles(one, simulated, Ledger(), Admission(admission))
        for one, admission in ((means, 1.0), (later, 4.0))
    )
    for name, seconds in plain.items():
        added = 0.0 if name.startswith("tpot") else 3.0
        assert awaited[name] == pytest.approx(seconds + added), name


def test_interpolated_steps_cost_what_the_passes_cost():
    """Between the sizes that were costed; a full step is three prompts, a long one is half."""
    setting = setting_of(concurrency=48, input_tokens=2048, output_tokens=512)
    costs = step_costs(setting, setting.workload, 256, 8192.0)
    decode = decode_pass(setting, Ledger(), 48.0, 2300.0).total_s
    prefill = prefill_pass(setting, Ledger(), 3.0, 2048.0).total_s
    assert costs.decode_seconds(48, 48 * 2300.0) == pytest.approx(decode, rel=0.05)
    assert costs.prefill_seconds(3 * 2048.0) == pytest.approx(prefill, rel=0.05)


FOUR = {"device": "h100-sxm-80gb", "devices_per_node": 4}
PAIR = {"device": "h200-sxm-141gb", "devices_per_node": 2}
OPEN = {**SERVE, "concurrency": None, "request_rate_per_second": 8.0}
BURST = {**SERVE, "concurrency": None, "burst_requests": 64}
# Each space: the model, the cluster, the workload, the objective and the limits.
SPACES = {
    "open within p99": (LLAMA_8B, FOUR, OPEN, "memory", {"ttft_p99_seconds": {"max": 0.12}}),
    "open within p95": (LLAMA_70B, FOUR, OPEN, "cost", {"ttft_p95_seconds": {"max": 0.5}}),
    "open within two": (
        LLAMA_8B,
        PAIR,
        OPEN,
        "balanced",
        {"ttft_p90_seconds": {"max": 0.1}, "tpot_p99_seconds": {"max": 0.02}},
    ),
    "closed within p99": (LLAMA_8B, FOUR, SERVE, "energy", {"tpot_p99_seconds": {"max": 0.012}}),
    "burst within p50": (LLAMA_70B, PAIR, BURST, "latency", {"ttft_p50_seconds": {"max": 1.0}}),
    "burst within none": (LLAMA_70B, PAIR, BURST, "cost", {"ttft_p99_seconds": {"max": 0.3}}),
    "more than can be served": (
        LLAMA_70B,
        PAIR,
        {**OPEN, "request_rate_per_second": 30.0},
        "throughput",
        {"latency_p90_seconds": {"max": 60.0}},
    ),
    "most of a share": (
        LLAMA_8B,
        PAIR,
        {**SERVE, "ttft_slo_seconds": 0.3},
        "throughput",
        {"slo_attainment_ratio": {"min": 0.5}},
    ),
}
DRAWN = sample(SPACES, share=0.5)


def asked(name):
    model, cluster, workload, objective, constraints = SPACES[name]
    fields = {"engine": "vllm", "constraints": constraints, "top": 4}
    return PlanRequest.model_validate(
        document(model=model, cluster=cluster, workload=workload, objective=objective, **fields)
    )


@cache
def everything(name):
    """Return every strategy of a space by the exact door, each one simulated."""
    costed = []
    for part in explore(asked(name)).parts:
        for row in range(len(part)):
            own = part.question.estimate_request(part.strategy(row))
            costed.append(estimate_request(own, explain=False, simulate=True))
    return costed


@cache
def answer(name):
    return plan(asked(name))


@cache
def feasible(name):
    limits = constraints_of(asked(name))
    kept = [one for one in everything(name) if one.fits and first_violation(one, limits) is None]
    return sorted(kept, key=lambda one: order_of(one, asked(name).objective))


def test_the_best_plans_are_those_of_simulating_everything():
    for name in DRAWN:
        best = {}
        for estimate in feasible(name):
            best.setdefault(strategy_family_of(estimate.strategy), estimate)
        ranked = stored_first(best.values(), asked(name).objective)
        expected = [estimate.strategy for estimate in ranked][:4]
        assert [found.strategy for found in answer(name).plans] == expected, name


def test_frontier_and_rejections_are_those_of_simulating_everything():
    for name in DRAWN:
        whole = [criteria(one) for one in frontier(feasible(name))]
        assert [criteria(found) for found in answer(name).pareto] == whole[:24], name

    for name in DRAWN:
        through = {strategy_family_of(one.strategy) for one in feasible(name)}
        lost = {strategy_family_of(one.strategy) for one in everything(name)} - through
        found = answer(name).rejected.values()
        families = {one.family for one in found if one.constraint != APPLICABILITY}
        assert families == lost, name


def test_a_row_passes_by_its_percentiles_alone_but_for_rounding():
    for name in DRAWN:
        found = explore(asked(name))
        quick, whole = (Table(found.parts, found.limits) for _ in range(2))
        unsure = [int(row) for row in np.flatnonzero(whole.undecided_rows)[::3]]
        assert unsure or not len(whole.feasible), name  # hopeless ones need no simulation
        assert [quick.passes(row) for row in unsure] == [whole.settle(row) for row in unsure], name
        assert not quick.simulated or not all(map(is_percentile, found.limits)), name

    found = explore(asked("open within p99"))
    (value,) = found.parts[0].percentiles(0, {"ttft_p99_seconds"}).values()
    for side in ("min", "max"):
        near = Table(found.parts, {"ttft_p99_seconds": Bound.model_validate({side: value})})
        assert near.passes(0), side
        assert near.simulated == {0}, side


def test_a_plan_shows_its_percentile_and_a_rejected_family_its_miss():
    for found in answer("open within p99").plans:
        assert found.performance.ttft_p99_seconds <= 0.12
    lost = answer("burst within none").rejected.values()
    missed = [one for one in lost if one.constraint == "ttft_p99_seconds"]
    assert missed
    assert all(one.limit == 0.3 and one.required > 0.3 for one in missed)
    lost = answer("more than can be served").rejected.values()
    assert any("requests_per_second is" in one.reason for one in lost)


def test_what_is_taken_for_hopeless_really_is():
    """The mean that makes a simulation needless never belongs to a strategy within its limit."""
    for name in DRAWN:
        for limit, bound in asked(name).constraints.items():
            far = mean_bound(limit, bound)
            for estimate in everything(name) if far else []:
                mean = getattr(estimate.performance, far[0])
                value = getattr(estimate.performance, limit)
                assert value is None or mean <= far[1] or value > bound.max, name


ANY_LOAD = st.fixed_dictionaries(
    {
        "load": st.sampled_from(["request_rate_per_second", "concurrency", "burst_requests"]),
        "size": st.sampled_from([1, 2, 7, 30, 150]),
        "input_tokens": st.sampled_from([64, 512, 4096]),
        "output_tokens": st.sampled_from([16, 128, 512]),
    }
)


@settings(max_examples=40, deadline=None)
@given(drawn=ANY_LOAD)
def test_no_percentile_is_further_below_its_mean_than_hopeless_assumes(drawn):
    load = {drawn["load"]: drawn["size"]}
    lengths = {name: drawn[name] for name in ("input_tokens", "output_tokens")}
    workload = {"kind": "serve", **lengths, **load}
    found = ask(workload=workload, engine="vllm", devices=1).performance
    for name, percent in product(("ttft", "tpot", "latency"), FAR_BEYOND):
        value = getattr(found, f"{name}_p{percent}_seconds")
        mean = getattr(found, f"{name}_seconds")
        assert value is None or value >= mean / FAR_BEYOND[percent]


def test_some_figures_come_of_a_simulation_and_a_lower_limit_has_no_mean():
    for name in ("ttft_p95_seconds", "slo_attainment_ratio"):
        assert is_simulated(name), name
        assert not is_simulated("ttft_seconds"), name
    assert mean_bound("ttft_p99_seconds", Bound(min=0.5)) is None


ALONE = {"steps": 1.0, "read_s": 0.3, "steps_awaited": 1.5, "decoding_ratio": 0.0, "step_s": 0.02}
NO_BURST = {"burst_ratio": 0.0, "burst_steps": 0.0, "burst_s": 0.0, "wait_s": 0.0, "intake_s": 0.0}


def test_a_burst_waits_for_its_mean_place_and_others_prompts_lengthen_a_tokens_step():
    # Of nine prompts that fill a step each, the first waits for none and the last for eight.
    places = range(1, 10)
    assert steps_in_burst(running=9, prompt_steps=1.0) == sum(places) / 9 + 0.5
    assert steps_in_burst(running=1, prompt_steps=0.1) == 1.0
    assert steps_in_burst(running=1, prompt_steps=2.4) == 2.4  # its own prompt alone

    found = mean_token_gap(decode_s=1.0, mixed_ratio=0.25, mixed_s=3.0, step_s=1.0)
    assert found == 1.0 + 0.25 * 2.0
    # A step that verifies a draft makes two tokens here.
    found = mean_token_gap(
        decode_s=0.5, mixed_ratio=0.25, mixed_s=3.0, step_s=1.0, tokens_per_step=2.0
    )
    assert found == 0.5 + 0.25 * 2.0 / 2


def test_the_first_token_waits_for_what_is_before_it_and_an_idle_server_has_nobody():
    assert usual_time_to_first_token(**ALONE) == 0.3
    found = usual_time_to_first_token(**{**ALONE, "decoding_ratio": 1.0})
    assert found == pytest.approx(0.3 + 1.5 * 0.02)
    assert time_to_first_token(usual_s=0.3, **NO_BURST) == 0.3
    together = {**NO_BURST, "burst_ratio": 0.1, "burst_steps": 5.0, "burst_s": 0.4}
    assert time_to_first_token(usual_s=0.3, **together) == pytest.approx(0.9 * 0.3 + 0.1 * 2.0)
    assert slot_wait(offered=8, running=4, life_s=10.0) == 10.0
    assert poisson_prompts_before(busy_ratio=0.0) == 0.0
    # M/D/1 at a load of one half waits half a service.
    assert poisson_prompts_before(busy_ratio=0.5) == pytest.approx(0.5)
    assert chance_of_decode_overlap(in_flight=0.0) == 0.0
    assert chance_of_decode_overlap(in_flight=50.0) == pytest.approx(1.0)
