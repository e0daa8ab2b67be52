"""Placements as candidates of the search: ranked beside what fits, proven, and quick."""

import numpy as np
import pytest

from planner.catalog.engines import get_engine
from planner.fitting.pages.offload_examples import T4_HOST
from planner.search.placement import (
    SHARES,
    best_placement,
    costs_of,
    moves_of,
    placements,
    shares_of,
    tokens_per_second,
)
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import OffloadSpec
from planner.workload.estimator import estimate_request
from planner.workload.resolve import resolve
from tests.planner.asking import LLAMA_8B, LLAMA_70B, MIXTRAL, search

GB = 10**9
WORK = {"kind": "generate", "batch_size": 96, "input_tokens": 512, "output_tokens": 32}
RTX = {"device": "rtx-4090", "host_memory_bytes": 256 * GB}


def request(model="facebook/opt-30b", batch_size=96, engine="flexgen", **cluster):
    return EstimateRequest.model_validate(
        {
            "model": model,
            "cluster": {**T4_HOST, **cluster},
            "workload": {**WORK, "batch_size": batch_size},
            "strategy": {"weight_dtype": "fp16", "kv_cache_dtype": "fp16"},
            "engine": engine,
        }
    )


def found(**fields):
    return search(**{"model": "facebook/opt-30b", "cluster": T4_HOST, "workload": WORK, **fields})


def moved(plan):
    return plan.strategy.offload


def test_a_model_too_large_for_its_card_is_ranked_with_the_programmes_shares():
    answer = found(engine="flexgen", objective="throughput")
    formats = [plan.strategy.weight_dtype for plan in answer.plans]

    assert sorted(formats) == ["fp16", "int4", "int8"]
    assert all(plan.fits and moved(plan).weights_cpu > 0.2 for plan in answer.plans)
    speeds = [plan.performance.tokens_per_second for plan in answer.plans]
    assert speeds == sorted(speeds, reverse=True)


def test_the_candidate_is_what_the_programme_alone_would_choose():
    answer = found(engine="flexgen", pins={"weight_dtype": "fp16", "kv_cache_dtype": "fp16"})

    best = best_placement(request())
    assert moved(answer.plans[0]) == best.offload
    assert answer.plans[0].strategy.micro_batch_size == best.micro_batch_size


def test_a_placement_names_its_technique_and_its_family():
    answer = found(engine="flexgen")

    assert "flexgen" in answer.plans[0].techniques
    assert not answer.suggestions


def test_what_fits_on_the_card_is_not_placed_elsewhere():
    answer = found(model=LLAMA_8B, cluster=RTX, workload={**WORK, "batch_size": 4})

    assert all(moved(plan) is None for plan in answer.plans)


def test_a_format_that_fits_stands_beside_one_that_is_placed():
    cluster = {**RTX, "device": "rtx-6000-ada"}
    answer = found(model=LLAMA_70B, cluster=cluster, workload={**WORK, "batch_size": 1})
    away = {plan.strategy.weight_dtype: moved(plan) for plan in answer.plans}

    assert away["int4"] is None
    assert away["bf16"].weights_cpu > 0.5


def test_a_host_that_nobody_described_is_not_counted_on():
    answer = found(cluster={"device": "t4"})

    assert not answer.plans


def test_no_disk_is_used_that_nobody_described():
    answer = found(cluster={"device": "t4", "host_memory_bytes": 208 * GB})

    assert answer.plans
    assert all(moved(plan).weights_disk == moved(plan).kv_disk == 0 for plan in answer.plans)


def test_a_disk_is_left_alone_while_the_host_has_room():
    answer = found(engine="flexgen")

    assert all(moved(plan).weights_disk == 0 for plan in answer.plans)


def test_pins_hold_for_placements():
    answer = found(pins={"micro_batch_size": 4, "weight_dtype": "bf16"})

    assert [plan.strategy.micro_batch_size for plan in answer.plans] == [4]
    assert not found(pins={"offload": {"weights_cpu": 0.1}}).plans


@pytest.mark.parametrize(
    ("engine", "shares"),
    [
        ("torch", SHARES),
        ("flexgen", SHARES),
        ("vllm", ("weights_cpu",)),
        ("llama_cpp", ("weights_cpu",)),
        ("tensorrt_llm", ()),
    ],
)
def test_an_engine_keeps_off_the_device_what_it_can(engine, shares):
    assert shares_of(get_engine(engine, "gpu")) == shares


def test_an_engine_without_offloading_has_no_placement():
    assert not found(model=LLAMA_70B, cluster=RTX, engine="tensorrt_llm").plans


def test_vllm_moves_weights_alone_and_splits_no_batch():
    answer = found(model=LLAMA_70B, cluster=RTX, engine="vllm", workload={**WORK, "batch_size": 4})

    assert answer.plans
    assert all(moved(plan).kv_cpu == moved(plan).activations_cpu == 0 for plan in answer.plans)
    assert all(plan.strategy.micro_batch_size is None for plan in answer.plans)


def test_every_device_holds_a_replica():
    cluster = {**T4_HOST, "devices_per_node": 4, "host_memory_bytes": 800 * GB}
    answer = found(cluster=cluster, engine="flexgen", objective="throughput")

    one = found(engine="flexgen", objective="throughput").plans[0].performance
    assert answer.plans[0].strategy.data_parallel_size == 4
    assert answer.plans[0].performance.tokens_per_second > one.tokens_per_second


def test_all_micro_batches_are_solved_as_each_alone():
    asked = request()
    together = {one.micro_batch_size: one for one in placements(asked, [8, 32, 96])}
    for size, one in together.items():
        alone = next(placements(asked, [size]))
        assert tokens_per_second(one) == pytest.approx(tokens_per_second(alone), rel=1e-3)


def test_columns_of_micro_batches_cost_what_each_costs_alone():
    setting = resolve(request())
    away = OffloadSpec(weights_cpu=0.7, kv_cpu=0.5)
    together = costs_of(setting, away, [4, 16, 96])
    for index, size in enumerate((4, 16, 96)):
        alone = costs_of(setting, away, [size])
        np.testing.assert_allclose(together.channels_s[..., index], alone.channels_s[..., 0])
        np.testing.assert_allclose(together.tiers_bytes[:, index], alone.tiers_bytes[:, 0])


def mixtral(share):
    asked = request(model=MIXTRAL, batch_size=1, device="rtx-4090")
    strategy = asked.strategy.model_copy(
        update={"offload": OffloadSpec(weights_cpu=share), "micro_batch_size": 1}
    )
    return estimate_request(asked.model_copy(update={"strategy": strategy}), explain=False)


def test_experts_leave_piece_by_piece():
    setting = resolve(request(model=MIXTRAL, batch_size=1, device="rtx-4090"))
    pieces = [move for move in moves_of(setting) if move.share == "weights_cpu"]
    times = [mixtral(move.end).performance.tpot_seconds for move in pieces]
    slopes = np.diff([mixtral(0.0).performance.tpot_seconds, *times]) / [m.width for m in pieces]

    assert len(pieces) == 5
    assert sum(move.width for move in pieces) == pytest.approx(1.0)
    assert all(slopes[1:] >= slopes[:-1] * 0.999)  # convex: what the programme relies on


def test_no_share_of_experts_on_the_host_beats_the_programmes():
    best = best_placement(request(model=MIXTRAL, batch_size=1, device="rtx-4090"))
    others = [mixtral(share / 50) for share in range(51)]
    fitting = [one.performance.tokens_per_second for one in others if one.fits]

    assert best.offload.weights_disk == 0
    assert tokens_per_second(best) >= 0.995 * max(fitting)
