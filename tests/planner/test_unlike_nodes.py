"""Unlike nodes: the layers go where they are fastest, and the search finds the best of all."""

import itertools
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from planner.api import plan
from planner.cost.communication import Pace
from planner.cost.quantity import NullLedger
from planner.search.engine import explore, score_question
from planner.search.question import figure, questions
from planner.search.rank import criteria, order_of
from planner.search.select import frontier_rows
from planner.search.serving_space import MAX_EXACT_ESTIMATES, heterogeneous_strategies
from planner.specs.base import NotCoveredError, NotPossibleError, UnknownDeviceError
from planner.specs.estimate import EstimateRequest, PlanRequest
from planner.specs.workload import Strategy
from planner.workload.costing import estimate_request
from planner.workload.device_groups import devices_of
from planner.workload.inference_memory import usable_bytes
from planner.workload.resolve import resolve
from planner.workload.train import stage_devices, stage_seconds
from planner.workload.training_memory import stage_memory
from tests.planner.asking import GENERATE, LLAMA_8B, LLAMA_70B, MIXTRAL, SERVE, stored_first
from tests.plugins.extent import first, sample

FAST = {"device": "h100-sxm-80gb", "devices_per_node": 4}
SLOW = {"device": "a100-sxm-80gb", "devices_per_node": 4}
SMALL = {"device": "a100-sxm4-40gb", "devices_per_node": 4}
MIXED = {**FAST, "other_nodes": [SLOW]}
WORK = {"kind": "train", "method": "full", "sequence_length": 2048, "global_batch_size": 32}
LAYOUT = {"tensor_parallel_size": 2, "micro_batch_size": 1, "zero_stage": 1}
MODEL = "meta-llama/Llama-3.1-8B"


def request(cluster, model=MODEL, workload=WORK, **strategy):
    document = {"model": model, "cluster": cluster, "workload": workload, "engine": "megatron"}
    return EstimateRequest.model_validate({**document, "strategy": {**LAYOUT, **strategy}})


def trained(cluster, stages=4, **strategy):
    return estimate_request(request(cluster, pipeline_parallel_size=stages, **strategy))


def stage_times(estimate):
    return [term.value for term in estimate.terms if term.key == "stage"]


def test_a_faster_device_takes_more_layers_as_they_fit_in_the_order_of_the_nodes():
    layers = trained(MIXED).memory.per_stage_layers
    assert sum(layers) == 32
    assert min(layers[:2]) > max(layers[2:])

    forth = trained(MIXED).memory.per_stage_devices
    back = trained({**SLOW, "other_nodes": [FAST]}).memory.per_stage_devices
    assert forth == tuple(reversed(back))
    assert forth[0].startswith("h100")

    found = trained({**FAST, "other_nodes": [SMALL]}, zero_stage=0)
    held = zip(
        found.memory.per_stage_peak_bytes, found.memory.per_stage_capacity_bytes, strict=True
    )
    assert all(peak <= capacity for peak, capacity in held)


def test_the_split_is_the_best_of_all_and_between_the_slow_and_the_fast_alone():
    # Every split of the layers, each stage costed and held against its own device's memory.
    for cluster, stages in itertools.product((MIXED, {**SLOW, "other_nodes": [SMALL]}), (2, 4)):
        setting = resolve(request(cluster, pipeline_parallel_size=stages))
        best = min(every_split(setting, stages), default=None)
        found = trained(cluster, stages)
        assert max(stage_times(found)) == pytest.approx(best, rel=1e-3), (cluster, stages)

    slow, mixed, fast = (
        trained(cluster).performance.step_seconds
        for cluster in ({**SLOW, "nodes": 2}, MIXED, {**FAST, "nodes": 2})
    )
    assert fast < mixed < slow


def every_split(setting, stages):
    """Yield the slowest stage's seconds of every split that fits."""
    from_devices = stage_devices(setting)
    seconds, fits = {}, {}
    for stage, held in product(range(stages), range(1, 33 - stages + 1)):
        at = setting_at(setting, from_devices[stage], stage, stages, held)
        pace = Pace(held, float(stage == stages - 1), 1.0)
        seconds[stage, held] = float(stage_seconds(at, setting.workload, pace))
        peak = stage_memory(at, NullLedger(), setting.workload, stage).peak_bytes
        fits[stage, held] = peak <= usable_bytes(at)
    if stages == 2:
        splits = [(first, 32 - first) for first in range(1, 32)]
    else:
        splits = [
            (*three, 32 - sum(three))
            for three in product(range(1, 20), repeat=3)
            if 1 <= 32 - sum(three) <= 29
        ]
    for split in splits:
        if all(fits[pair] for pair in enumerate(split)):
            yield max(seconds[pair] for pair in enumerate(split))


def setting_at(setting, device, stage, stages, held):
    split = tuple(held if one == stage else 1 for one in range(stages))
    return replace(setting, device=device, split=split)


def test_alike_nodes_named_apart_lose_nothing_and_a_mixed_stage_goes_at_the_slower_pace():
    together = trained({**FAST, "nodes": 2}).performance.step_seconds
    apart = trained({**FAST, "other_nodes": [FAST]}).performance.step_seconds
    assert apart <= together * 1.001
    over = trained(MIXED, stages=1).performance.step_seconds
    slow = trained({**SLOW, "nodes": 2}, stages=1).performance.step_seconds
    assert over == pytest.approx(slow, rel=0.05)


def test_every_stage_is_explained_with_its_layers_in_even_pipelines_too():
    found = trained(MIXED)
    titles = [term.name for term in found.terms if term.key == "stage"]
    for place, (title, layers) in enumerate(
        zip(titles, found.memory.per_stage_layers, strict=True), start=1
    ):
        assert title.startswith(f"Stage {place}: {layers} layers on ")

    # Thirty-two layers in three stages: the last one, with the logits, takes less.
    cluster = {**FAST, "devices_per_node": 6}
    found = trained(cluster, stages=3, data_parallel_size=1)
    assert found.memory.per_stage_layers == (11, 11, 10)


def test_unlike_devices_cost_and_draw_their_mean():
    fast, slow, mixed = (
        estimate_request(request(cluster, pipeline_parallel_size=4)).cost_usd_per_million_tokens
        for cluster in ({**FAST, "nodes": 2}, {**SLOW, "nodes": 2}, MIXED)
    )
    rates = [
        trained(one).performance.tokens_per_second
        for one in ({**FAST, "nodes": 2}, {**SLOW, "nodes": 2}, MIXED)
    ]
    hourly = [cost * rate for cost, rate in zip((fast, slow, mixed), rates, strict=True)]

    assert hourly[2] == pytest.approx(np.mean(hourly[:2]))


def test_all_devices_are_counted_and_unknown_or_compressing_nodes_refused():
    setting = resolve(request(MIXED, pipeline_parallel_size=2))
    assert setting.cluster.num_devices == 8
    assert [one.id[:4] for one in devices_of(setting)] == ["h100"] * 4 + ["a100"] * 4

    with pytest.raises(UnknownDeviceError):
        trained({**FAST, "other_nodes": [{"device": "h900"}]})

    asked = {"model": MODEL, "cluster": MIXED, "workload": {"kind": "compress", "method": "gptq"}}
    with pytest.raises(NotCoveredError, match="nodes of one kind") as caught:
        estimate_request(EstimateRequest.model_validate(asked))
    assert caught.value.field == "cluster.other_nodes"


PAIR = {"device": "h100-sxm-80gb", "other_nodes": [{"device": "a100-sxm4-40gb"}]}
TRIO = {"device": "h200-sxm-141gb", "devices_per_node": 2, "other_nodes": [{"device": "l40s"}]}
LORA = {**WORK, "method": "lora", "global_batch_size": 2}
PLAIN = {"pipeline_schedule": "1f1b", "offload": {}}
TRAINING_SPACES = [
    (PAIR, LORA, "throughput", PLAIN),
    (PAIR, LORA, "memory", PLAIN),
    (TRIO, {**LORA, "global_batch_size": 3}, "latency", PLAIN),
]


def test_a_batch_that_no_layout_of_unlike_nodes_divides_is_refused_by_its_field():
    three = {"device": "apple-m3-max-30gpu", "nodes": 2, "other_nodes": [{"device": "gaudi3"}]}
    work = {**WORK, "method": "qlora", "global_batch_size": 8}
    asked = {"model": "gpt2", "engine": "torch", "cluster": three, "workload": work}
    with pytest.raises(NotPossibleError, match="a multiple of data_parallel_size 3"):
        plan(PlanRequest.model_validate(asked))


def test_a_search_over_unlike_nodes_answers_what_costing_everything_answers():
    for cluster, workload, objective, pins in TRAINING_SPACES:
        asked = PlanRequest.model_validate(
            {
                "model": MODEL,
                "cluster": cluster,
                "workload": workload,
                "objective": objective,
                "engine": "megatron",
                "pins": pins,
            }
        )
        (question,) = questions(asked)
        strategies = heterogeneous_strategies(question, asked.workload)
        costed = [
            estimate_request(question.estimate_request(one), explain=False) for one in strategies
        ]
        best = min((one for one in costed if one.fits), key=lambda one: order_of(one, objective))

        assert len(strategies) < MAX_EXACT_ESTIMATES, (cluster, workload, objective, pins)
        assert plan(asked).plans[0].strategy == best.strategy, (cluster, workload, objective, pins)


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
    "tokens_per_second", "ttft_seconds", "tpot_seconds", "latency_seconds", "max_concurrency",
    "communication_ratio", "per_device_peak_bytes", "cost_usd_per_million_tokens",
    "energy_joules_per_token",
)  # fmt: skip


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
        for part in score_question(question)[0]:
            found += [(part, row, part.exact(row)) for row in range(len(part))]
    return found


# The others differ from these in the objective, the length of prompts or the load alone.
SOME = sample(
    first(
        sorted(
            SPACES, key=lambda name: name in {"pair cheap", "trio frugal", "trio long prompts"}
        ),
        len(SPACES) - 3,
    ),
    share=0.4,
    kind=lambda name: SPACES[name][2]["kind"],
)


def test_a_column_of_figures_is_what_the_exact_door_costs_one_by_one():
    for space, name in itertools.product(SOME, FIGURES):
        for part, row, estimate in costed(space):
            column, value = part.figures(name), figure(estimate, name)
            if value is None:
                assert column is None or np.isnan(column[row]), (space, name)
            else:
                assert column[row] == pytest.approx(value, rel=1e-9), (space, name)


def test_columns_and_the_exact_door_agree_on_what_fits():
    for space in SOME:
        for part, row, estimate in costed(space):
            assert bool(part.fits[row]) == estimate.fits, space


def test_the_first_plan_is_the_best_of_all_strategies_on_both_kinds_and_on_each_alone():
    for space in SOME:
        request = asked(space)
        fitting = [one for _, _, one in costed(space) if one.fits]
        fitting.sort(key=lambda one: order_of(one, request.objective))
        first = plan(request).plans[0]
        best = stored_first(fitting, request.objective)[0]
        assert order_of(first, request.objective)[:3] == order_of(best, request.objective)[:3]


def test_the_frontier_is_that_of_all_strategies():
    for space in ("pair closed", "pair batch", "trio closed"):
        values = np.array([criteria(one) for _, _, one in costed(space) if one.fits])
        beaten = [
            ((values <= own).all(axis=1) & (values < own).any(axis=1)).any() for own in values
        ]
        table = explore(asked(space)).table
        found = {tuple(criteria(table.exact(row))) for row in frontier_rows(table)}
        assert found == {
            tuple(own) for own, worse in zip(values, beaten, strict=True) if not worse
        }


def test_a_search_looks_at_both_kinds_and_serves_one_caller_on_the_fast_alone():
    kinds = [question.hardware[0] for question in questions(asked("pair closed"))]
    assert kinds == ["h100-sxm5-80gb + a100-sxm4-40gb", "h100-sxm5-80gb", "a100-sxm4-40gb"]
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


def test_a_plan_says_what_one_kind_alone_and_both_together_would_do():
    pins = Strategy(weight_dtype="int4")
    first = plan(asked("pair closed").model_copy(update={"pins": pins})).plans[0]
    alone = [one for one in first.reasons if " alone: " in one]
    assert first.cluster.other_nodes
    assert [one.split(" alone")[0] for one in alone] == ["h100-sxm5-80gb", "a100-sxm4-40gb"]
    assert all("tokens/s (\N{MINUS SIGN}" in one for one in alone)

    first = plan(asked("pair alone")).plans[0]
    (told,) = (one for one in first.reasons if "together: " in one)
    best = min(
        one.performance.latency_seconds
        for part, _, one in costed("pair alone")
        if one.fits and part.question.cluster.other_nodes and one.strategy.weight_dtype == "bf16"
    )
    assert f"{best:.3g} s each" in told


def test_what_fits_on_no_node_alone_or_nowhere_is_said_with_numbers():
    request = asked("trio closed").model_copy(update={"model": "meta-llama/Llama-3.1-405B"})
    whole = request.cluster.model_copy(update={"devices_per_node": 4})
    answer = plan(request.model_copy(update={"cluster": whole}))
    assert answer.plans
    assert any("l40s alone: nothing fits" in one for one in answer.plans[0].reasons)

    request = asked("pair closed").model_copy(update={"model": "meta-llama/Llama-3.1-405B"})
    found = explore(request)
    assert not len(found.table.feasible)
    memory = [one for one in found.rejected.values() if one.constraint == "memory"]
    assert memory
    assert all(one.required > one.limit for one in memory)
