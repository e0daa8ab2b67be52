"""A search over unlike nodes scores what the exact door costs, and finds the best of all."""

from functools import cache

import numpy as np
import pytest

from planner.api import plan
from planner.search.engine import explore, scored
from planner.search.question import figure, questions
from planner.search.rank import criteria, order_of
from planner.search.select import frontier_rows
from planner.specs.estimate import PlanRequest
from planner.specs.workload import Strategy
from tests.planner.asking import GENERATE, LLAMA_8B, LLAMA_70B, MIXTRAL, SERVE, stored_first
from tests.plugins.extent import first

PAIR = {"device": "h100-sxm-80gb", "other_nodes": [{"device": "a100-sxm4-40gb"}]}
TRIO = {"device": "h200-sxm-141gb", "devices_per_node": 2, "other_nodes": [{"device": "l40s"}]}
FULL = {**SERVE, "concurrency": None}
OPEN = {**FULL, "request_rate_per_second": 2.0}
LONG = {**SERVE, "input_tokens": 2048}
BATCH = {**GENERATE, "batch_size": 32}
SPACES = {
    "pair closed": (LLAMA_8B, PAIR, SERVE, "throughput"),
    "pair alone": (LLAMA_8B, PAIR, {**SERVE, "concurrency": 1}, "latency"),
    "pair open": (LLAMA_8B, PAIR, OPEN, "balanced"),
    "pair cheap": (LLAMA_8B, PAIR, FULL, "cost"),
    "pair batch": (LLAMA_8B, PAIR, BATCH, "throughput"),
    "trio closed": (LLAMA_70B, TRIO, SERVE, "throughput"),
    "trio long prompts": (LLAMA_70B, TRIO, LONG, "latency"),
    "trio frugal": (LLAMA_70B, TRIO, SERVE, "energy"),
    "trio batch": (LLAMA_70B, TRIO, BATCH, "memory"),
    "trio of experts": (MIXTRAL, TRIO, SERVE, "throughput"),
}
FIGURES = (
    "tokens_per_second",
    "ttft_seconds",
    "tpot_seconds",
    "latency_seconds",
    "max_concurrency",
    "communication_ratio",
    "per_device_peak_bytes",
    "cost_usd_per_million_tokens",
    "energy_joules_per_token",
)


def asked(space):
    model, cluster, workload, objective = SPACES[space]
    return PlanRequest.model_validate(
        {
            "model": model,
            "cluster": cluster,
            "workload": workload,
            "objective": objective,
            "engine": "vllm",
        }
    )


@cache
def costed(space):
    """Return every strategy of a space with its figures in columns and by the exact door."""
    found = []
    for question in questions(asked(space)):
        for part in scored(question)[0]:
            found += [(part, row, part.exact(row)) for row in range(len(part))]
    return found


# The others differ from these in the objective, the length of prompts or the load alone.
SOME = first(
    sorted(SPACES, key=lambda name: name in {"pair cheap", "trio frugal", "trio long prompts"}),
    len(SPACES) - 3,
)


@pytest.mark.parametrize("space", SOME)
@pytest.mark.parametrize("name", FIGURES)
def test_a_column_of_figures_is_what_the_exact_door_costs_one_by_one(space, name):
    for part, row, estimate in costed(space):
        column, value = part.figures(name), figure(estimate, name)
        if value is None:
            assert column is None
        else:
            assert column[row] == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("space", SOME)
def test_columns_and_the_exact_door_agree_on_what_fits(space):
    for part, row, estimate in costed(space):
        assert bool(part.fits[row]) == estimate.fits


@pytest.mark.parametrize("space", SOME)
def test_the_first_plan_is_the_best_of_all_strategies_on_both_kinds_and_on_each_alone(space):
    request = asked(space)
    fitting = [one for _, _, one in costed(space) if one.fits]
    fitting.sort(key=lambda one: order_of(one, request.objective))
    first = plan(request).plans[0]

    best = stored_first(fitting, request.objective)[0]
    assert order_of(first, request.objective)[:3] == order_of(best, request.objective)[:3]


@pytest.mark.parametrize("space", ["pair closed", "pair batch", "trio closed"])
def test_the_frontier_is_that_of_all_strategies(space):
    values = np.array([criteria(one) for _, _, one in costed(space) if one.fits])
    beaten = [((values <= own).all(axis=1) & (values < own).any(axis=1)).any() for own in values]
    table = explore(asked(space)).table
    found = {tuple(criteria(table.exact(row))) for row in frontier_rows(table)}

    assert found == {tuple(own) for own, worse in zip(values, beaten, strict=True) if not worse}


def test_a_search_looks_at_both_kinds_together_and_at_each_alone():
    kinds = [question.hardware[0] for question in questions(asked("pair closed"))]

    assert kinds == ["h100-sxm5-80gb + a100-sxm4-40gb", "h100-sxm5-80gb", "a100-sxm4-40gb"]


def test_one_caller_is_served_by_the_fast_node_alone():
    first = plan(asked("pair alone")).plans[0]

    assert first.cluster.device == "h100-sxm-80gb"
    assert first.cluster.other_nodes == ()


def test_formats_that_one_kind_lacks_are_offered_on_the_other_alone():
    with_fp8 = {
        part.question.hardware[0]
        for part, row, _ in costed("pair closed")
        if part.strategy(row).weight_dtype == "fp8"
    }

    assert with_fp8 == {"h100-sxm5-80gb"}


def test_a_layout_that_spans_both_kinds_is_among_the_candidates():
    uneven = [
        one.memory.per_stage_layers
        for part, _, one in costed("pair closed")
        if part.question.cluster.other_nodes and one.strategy.pipeline_parallel_size == 2
    ]

    assert uneven
    assert all(sum(layers) == 32 and layers[0] > layers[1] for layers in uneven)


def test_a_plan_says_what_the_nodes_of_each_kind_would_do_alone():
    pins = Strategy(weight_dtype="int4")
    first = plan(asked("pair closed").model_copy(update={"pins": pins})).plans[0]
    alone = [one for one in first.reasons if " alone: " in one]

    assert first.cluster.other_nodes
    assert [one.split(" alone")[0] for one in alone] == ["h100-sxm5-80gb", "a100-sxm4-40gb"]
    assert all("tokens/s (\N{MINUS SIGN}" in one for one in alone)


def test_a_plan_on_one_kind_says_what_both_would_do_together():
    first = plan(asked("pair alone")).plans[0]
    (told,) = (one for one in first.reasons if "together: " in one)
    best = min(
        one.performance.latency_seconds
        for part, _, one in costed("pair alone")
        if one.fits and part.question.cluster.other_nodes and one.strategy.weight_dtype == "bf16"
    )

    assert f"{best:.3g} s each" in told


def test_what_fits_on_no_node_alone_is_said():
    request = asked("trio closed").model_copy(update={"model": "meta-llama/Llama-3.1-405B"})
    whole = request.cluster.model_copy(update={"devices_per_node": 4})
    answer = plan(request.model_copy(update={"cluster": whole}))

    assert answer.plans
    assert any("l40s alone: nothing fits" in one for one in answer.plans[0].reasons)


def test_what_fits_nowhere_is_rejected_with_numbers():
    request = asked("pair closed").model_copy(update={"model": "meta-llama/Llama-3.1-405B"})
    answer = plan(request)

    assert answer.plans == ()
    memory = [one for one in answer.rejected.values() if one.constraint == "memory"]
    assert memory
    assert all(one.required > one.limit for one in memory)
