"""Limits on percentiles: the search answers what simulating every strategy answers."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.api import plan
from planner.search.engine import explore
from planner.search.question import (
    FAR_BEYOND,
    constraints_of,
    family_of,
    first_violation,
    is_percentile,
    is_simulated,
    mean_bound,
)
from planner.search.rank import criteria, frontier, order_of
from planner.search.select import Table
from planner.specs.estimate import APPLICABILITY, Bound, PlanRequest
from planner.workload.estimator import estimate_request
from tests.planner.asking import LLAMA_8B, LLAMA_70B, SERVE, ask, document, stored_first

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


@pytest.mark.parametrize("name", SPACES)
def test_the_best_plans_are_those_of_simulating_everything(name):
    best = {}
    for estimate in feasible(name):
        best.setdefault(family_of(estimate.strategy), estimate)

    ranked = stored_first(best.values(), asked(name).objective)
    expected = [estimate.strategy for estimate in ranked][:4]
    assert [found.strategy for found in answer(name).plans] == expected


@pytest.mark.parametrize("name", SPACES)
def test_the_frontier_is_that_of_simulating_everything(name):
    whole = [criteria(one) for one in frontier(feasible(name))]

    assert [criteria(found) for found in answer(name).pareto] == whole[:24]


@pytest.mark.parametrize("name", SPACES)
def test_a_rejected_family_has_no_member_that_simulating_lets_through(name):
    through = {family_of(one.strategy) for one in feasible(name)}
    lost = {family_of(one.strategy) for one in everything(name)} - through
    found = answer(name).rejected.values()

    families = {one.family for one in found if one.constraint != APPLICABILITY}
    assert families == lost


@pytest.mark.parametrize("name", SPACES)
def test_a_row_passes_by_its_percentiles_alone_where_its_whole_estimate_does(name):
    found = explore(asked(name))
    quick, whole = (Table(found.parts, found.limits) for _ in range(2))
    unsure = [int(row) for row in np.flatnonzero(whole.unsure)[::3]]

    assert unsure or not len(whole.feasible)  # hopeless ones need no simulation
    assert [quick.passes(row) for row in unsure] == [whole.settle(row) for row in unsure]
    assert not quick.simulated or not all(map(is_percentile, found.limits))


@pytest.mark.parametrize("side", ["min", "max"])
def test_a_limit_as_near_as_rounding_is_left_to_the_whole_estimate(side):
    found = explore(asked("open within p99"))
    (value,) = found.parts[0].percentiles(0, {"ttft_p99_seconds"}).values()
    near = Table(found.parts, {"ttft_p99_seconds": Bound.model_validate({side: value})})

    assert near.passes(0)
    assert near.simulated == {0}


def test_a_plan_within_a_percentile_shows_the_percentile():
    for found in answer("open within p99").plans:
        assert found.performance.ttft_p99_seconds <= 0.12


def test_a_family_that_misses_a_percentile_says_by_how_much():
    lost = answer("burst within none").rejected.values()
    missed = [one for one in lost if one.constraint == "ttft_p99_seconds"]

    assert missed
    assert all(one.limit == 0.3 and one.required > 0.3 for one in missed)


def test_a_family_that_cannot_serve_the_rate_says_the_most_it_can():
    lost = answer("more than can be served").rejected.values()

    assert any("more requests come than can be served" in one.reason for one in lost)


@pytest.mark.parametrize("name", SPACES)
def test_what_is_taken_for_hopeless_really_is(name):
    """The mean that makes a simulation needless never belongs to a strategy within its limit."""
    for limit, bound in asked(name).constraints.items():
        far = mean_bound(limit, bound)
        for estimate in everything(name) if far else []:
            mean = getattr(estimate.performance, far[0])
            value = getattr(estimate.performance, limit)
            assert value is None or mean <= far[1] or value > bound.max


LOADS = st.fixed_dictionaries(
    {
        "load": st.sampled_from(["request_rate_per_second", "concurrency", "burst_requests"]),
        "size": st.sampled_from([1, 2, 7, 30, 150]),
        "input_tokens": st.sampled_from([64, 512, 4096]),
        "output_tokens": st.sampled_from([16, 128, 512]),
    }
)


@settings(max_examples=40, deadline=None)
@given(drawn=LOADS)
def test_no_percentile_is_further_below_its_mean_than_hopeless_assumes(drawn):
    load = {drawn["load"]: drawn["size"]}
    lengths = {name: drawn[name] for name in ("input_tokens", "output_tokens")}
    workload = {"kind": "serve", **lengths, **load}
    found = ask(workload=workload, engine="vllm", devices=1).performance

    for name, percent in product(("ttft", "tpot", "latency"), FAR_BEYOND):
        value = getattr(found, f"{name}_p{percent}_seconds")
        mean = getattr(found, f"{name}_seconds")
        assert value is None or value >= mean / FAR_BEYOND[percent]


@pytest.mark.parametrize("name", ["ttft_p95_seconds", "slo_attainment_ratio"])
def test_some_figures_come_of_a_simulation_alone(name):
    assert is_simulated(name)
    assert not is_simulated("ttft_seconds")


def test_a_lower_limit_on_a_percentile_has_no_mean_that_decides_it():
    assert mean_bound("ttft_p99_seconds", Bound(min=0.5)) is None
