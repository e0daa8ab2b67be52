"""Blocks of training strategies share what does not differ: grids, defaults, what cannot fit."""

from functools import cache

import pytest

from planner.search.engine import blocks_of
from planner.search.question import questions
from planner.search.scoring import Fitting
from planner.search.training_space import SCHEDULES
from planner.specs.estimate import PlanRequest
from planner.workload.estimator import fits_of
from planner.workload.resolve import resolve
from tests.planner.asking import LLAMA_8B, LLAMA_70B, MIXTRAL, TRAIN, document

CASES = {
    "one card": {"engine": None, "device": "rtx-4090"},
    "a node": {"engine": "megatron", "devices": 8},
    "a pin": {"engine": "torchtitan", "devices": 4, "pins": {"tensor_parallel_size": 2}},
    "offloading": {"engine": "deepspeed", "devices": 2},
    "a mixture": {"engine": "megatron", "devices": 8, "model": MIXTRAL},
    "too large": {"engine": "megatron", "devices": 8, "model": LLAMA_70B},
}
METHODS = ("full", "lora", "qlora")


@cache
def blocks(case, method="full"):
    fields = {"model": LLAMA_8B, **CASES[case], "workload": {**TRAIN, "method": method}}
    request = PlanRequest.model_validate(document(**fields))
    return blocks_of(next(questions(request)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_where_nothing_fits_that_recomputes_all_nothing_does_that_recomputes_less(case, method):
    fitting = Fitting(blocks(case, method))

    for block in blocks(case, method):
        assert fitting.anything(block) == block.column(fits_of(block.setting)).any()


@pytest.mark.parametrize("case", CASES)
def test_recomputing_more_never_keeps_a_strategy_from_fitting(case):
    order = {"none": 0, "selective": 1, "full": 2}
    groups = {}
    for block in blocks(case):
        shared = {**block.shared, "activation_recomputation": None}
        fits = block.column(fits_of(block.setting)) > 0
        groups.setdefault(str(shared), {})[block.shared["activation_recomputation"]] = fits

    for found in groups.values():
        less, more = ([found[name] for name in sorted(found, key=order.get)][at] for at in (0, -1))
        assert (less <= more).all()


@pytest.mark.parametrize(
    ("engine", "schedules"), [("torchtitan", set(SCHEDULES)), ("megatron", {*SCHEDULES[:2]})]
)
@pytest.mark.parametrize("stages", [2, 4])
def test_every_schedule_of_the_engine_is_weighed_however_few_the_stages(stages, engine, schedules):
    fields = {"model": LLAMA_8B, "engine": engine, "devices": 8, "workload": TRAIN}
    request = PlanRequest.model_validate(document(**fields))
    shared = [block.shared for block in blocks_of(next(questions(request)))]
    found = [one for one in shared if one["pipeline_parallel_size"] == stages]

    assert {one.get("pipeline_schedule") for one in found} == schedules


@pytest.mark.parametrize("case", CASES)
def test_a_block_has_the_defaults_that_each_of_its_strategies_resolves_to(case):
    sizes = {"micro_batch_size", "gradient_accumulation_steps", "zero_stage"}
    for block in blocks(case):
        own = resolve(block.question.estimate_request(block.strategy(0))).strategy
        shared = set(block.shared) | {"optimizer_dtype", "gradient_dtype", "attention"} - sizes

        for name in shared - set(block.sizes):
            assert getattr(block.setting.strategy, name) == getattr(own, name)
