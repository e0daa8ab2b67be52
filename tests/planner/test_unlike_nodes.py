"""Training over unlike nodes: the layers go where they are computed fastest and fit."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from planner.api import plan
from planner.cost.quantity import Unrecorded
from planner.cost.stages import Pace
from planner.errors import NotCoveredError, UnknownDeviceError
from planner.search.question import questions
from planner.search.rank import order_of
from planner.search.serving_space import MOST, unlike_strategies
from planner.specs.estimate import EstimateRequest, PlanRequest
from planner.workload.device_groups import devices_of
from planner.workload.estimator import estimate_request
from planner.workload.inference_memory import usable_bytes
from planner.workload.resolve import resolve
from planner.workload.train import stage_devices, stage_seconds
from planner.workload.training_memory import stage_memory

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


def test_a_faster_device_takes_more_layers():
    layers = trained(MIXED).memory.per_stage_layers

    assert sum(layers) == 32
    assert min(layers[:2]) > max(layers[2:])


def test_the_order_of_the_nodes_is_the_order_of_the_stages():
    forth = trained(MIXED).memory.per_stage_devices
    back = trained({**SLOW, "other_nodes": [FAST]}).memory.per_stage_devices

    assert forth == tuple(reversed(back))
    assert forth[0].startswith("h100")


@pytest.mark.parametrize("cluster", [MIXED, {**SLOW, "other_nodes": [SMALL]}])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_split_is_the_best_of_all_splits(cluster, stages):
    """Every split of the layers, each stage costed and held against its own device's memory."""
    setting = resolve(request(cluster, pipeline_parallel_size=stages))
    best = min(every_split(setting, stages), default=None)
    found = trained(cluster, stages)

    assert max(stage_times(found)) == pytest.approx(best, rel=1e-3)


def every_split(setting, stages):
    """Yield the slowest stage's seconds of every split that fits."""
    from_devices = stage_devices(setting)
    seconds, fits = {}, {}
    for stage, held in product(range(stages), range(1, 33 - stages + 1)):
        at = setting_at(setting, from_devices[stage], stage, stages, held)
        pace = Pace(held, float(stage == stages - 1), 1.0)
        seconds[stage, held] = float(stage_seconds(at, setting.workload, pace))
        peak = stage_memory(at, Unrecorded(), setting.workload, stage).peak_bytes
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


def test_a_small_device_takes_only_what_fits():
    found = trained({**FAST, "other_nodes": [SMALL]}, zero_stage=0)
    held = zip(
        found.memory.per_stage_peak_bytes, found.memory.per_stage_capacity_bytes, strict=True
    )

    assert all(peak <= capacity for peak, capacity in held)


def test_an_uneven_split_is_faster_than_the_slow_nodes_alone_and_slower_than_the_fast():
    slow, mixed, fast = (
        trained(cluster).performance.step_seconds
        for cluster in ({**SLOW, "nodes": 2}, MIXED, {**FAST, "nodes": 2})
    )

    assert fast < mixed < slow


def test_alike_nodes_named_apart_are_no_slower_than_named_together():
    together = trained({**FAST, "nodes": 2}).performance.step_seconds
    apart = trained({**FAST, "other_nodes": [FAST]}).performance.step_seconds

    assert apart <= together * 1.001


def test_a_stage_over_both_kinds_goes_at_the_slower_pace():
    over = trained(MIXED, stages=1).performance.step_seconds
    slow = trained({**SLOW, "nodes": 2}, stages=1).performance.step_seconds

    assert over == pytest.approx(slow, rel=0.05)


def test_every_stage_is_explained_with_its_layers_and_device():
    found = trained(MIXED)
    titles = [term.name for term in found.terms if term.key == "stage"]

    for place, (title, layers) in enumerate(
        zip(titles, found.memory.per_stage_layers, strict=True), start=1
    ):
        assert title.startswith(f"Stage {place}: {layers} layers on ")


def test_an_even_pipeline_shows_its_layers_too():
    """Thirty-two layers in three stages: the last one, with the logits, takes less."""
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


def test_all_devices_are_counted_in_the_order_of_the_cluster():
    setting = resolve(request(MIXED, pipeline_parallel_size=2))

    assert setting.cluster.num_devices == 8
    assert [one.id[:4] for one in devices_of(setting)] == ["h100"] * 4 + ["a100"] * 4


def test_other_nodes_of_an_unknown_device_are_refused():
    with pytest.raises(UnknownDeviceError):
        trained({**FAST, "other_nodes": [{"device": "h900"}]})


def test_compression_on_unlike_nodes_is_refused_by_name():
    asked = {"model": MODEL, "cluster": MIXED, "workload": {"kind": "compress", "method": "gptq"}}
    with pytest.raises(NotCoveredError, match="nodes of one kind") as caught:
        estimate_request(EstimateRequest.model_validate(asked))

    assert caught.value.field == "cluster.other_nodes"


PAIR = {"device": "h100-sxm-80gb", "other_nodes": [{"device": "a100-sxm4-40gb"}]}
TRIO = {"device": "h200-sxm-141gb", "devices_per_node": 2, "other_nodes": [{"device": "l40s"}]}
LORA = {**WORK, "method": "lora", "global_batch_size": 2}
PLAIN = {"pipeline_schedule": "1f1b", "offload": {}}
SPACES = [
    (PAIR, LORA, "throughput", PLAIN),
    (PAIR, LORA, "memory", PLAIN),
    (TRIO, {**LORA, "global_batch_size": 3}, "latency", PLAIN),
]


@pytest.mark.parametrize(("cluster", "workload", "objective", "pins"), SPACES)
def test_a_search_over_unlike_nodes_answers_what_costing_everything_answers(
    cluster, workload, objective, pins
):
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
    strategies = unlike_strategies(question, asked.workload)
    costed = [
        estimate_request(question.estimate_request(one), explain=False) for one in strategies
    ]
    best = min((one for one in costed if one.fits), key=lambda one: order_of(one, objective))

    assert len(strategies) < MOST
    assert plan(asked).plans[0].strategy == best.strategy
