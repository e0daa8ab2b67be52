"""Targets beyond the arithmetic of all devices: refused without a search, and never wrongly."""

import numpy as np
import pytest

from planner.api import plan
from planner.search import engine
from planner.search.engine import (
    best_of,
    ceiling_of,
    exceeds_peak,
    explore,
    most_tokens_per_second,
)
from planner.search.question import questions
from planner.search.scoring import ESTIMATES
from planner.specs.estimate import Bound, PlanRequest
from planner.workload import capacity
from tests.planner.asking import LLAMA_8B, SERVE, document

TRAIN = {"kind": "train", "sequence_length": 2048, "global_batch_size": 16}
WORKLOADS = {
    "closed": SERVE,
    "open": {**SERVE, "concurrency": None, "request_rate_per_second": 1000.0},
    "burst": {**SERVE, "concurrency": None, "burst_requests": 512},
    "short prompts": {**SERVE, "input_tokens": 1, "concurrency": 4096},
    "whole training": {**TRAIN, "method": "pretrain"},
    "adapters": {**TRAIN, "method": "lora"},
}
PLACES = [
    (LLAMA_8B, "h100-sxm-80gb"),
    ("Qwen/Qwen3-30B-A3B", "b200-sxm"),
    ("Qwen/Qwen3-0.6B", "mi300x"),
]


def asked(workload, model=LLAMA_8B, device="rtx-4090", devices=1, **fields):
    cluster = {"device": device, "devices_per_node": devices}
    return PlanRequest.model_validate(
        document(model=model, cluster=cluster, workload=workload, **fields)
    )


def limited(least, **fields):
    return asked(SERVE, constraints={"tokens_per_second": {"min": least}}, **fields)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize(("model", "device"), PLACES)
def test_no_strategy_comes_near_the_ceiling(name, model, device):
    request = asked(WORKLOADS[name], model, device, devices=4)
    ceiling = min(ceiling_of(question) for question in questions(request))

    speeds = np.concatenate([part.merit.speed for part in explore(request).parts])

    assert len(speeds)
    assert 0 < speeds.max() < ceiling / 2


def test_the_ceiling_by_hand():
    # 2 devices of 1 PFLOP/s and 10^9 weights: 10^6 tokens a second, and the slack on top.
    found = most_tokens_per_second.compute(
        devices=2, peak_flops_per_s=1e15, weights_per_token=1e9, slack=1.0
    )

    assert found == pytest.approx(1e6)


def test_more_devices_raise_the_ceiling_in_proportion():
    one, eight = (next(questions(asked(SERVE, devices=count))) for count in (1, 8))

    assert ceiling_of(eight) == pytest.approx(8 * ceiling_of(one))


@pytest.mark.parametrize("least", [None, 1.0])
def test_a_modest_target_is_searched(least):
    question = next(questions(asked(SERVE)))

    assert not exceeds_peak(question, {"tokens_per_second": Bound(min=least, max=9.0)})


def test_pruned_weights_are_not_held_against_the_datasheet():
    question = next(questions(asked(SERVE, pins={"sparsity": 0.5})))

    assert ceiling_of(question) == float("inf")


def test_a_target_out_of_reach_is_refused_without_scoring(monkeypatch):
    ESTIMATES.forget()
    monkeypatch.setattr(engine, "score", lambda *_: pytest.fail("a strategy was scored"))

    assert best_of(limited(1e12)) is None


def test_what_is_refused_unsearched_is_refused_by_searching():
    unreachable = plan(limited(1e12))

    assert not unreachable.plans
    assert unreachable.rejected
    assert [one.title for one in unreachable.suggestions] == ["no limit on tokens per second"]


def test_memory_is_costed_once_for_fitting_and_for_the_score(monkeypatch):
    ESTIMATES.forget()
    held, asked_for = capacity._held, []
    monkeypatch.setattr(
        capacity, "_held", lambda *found: asked_for.append(found[0]) or held(*found)
    )

    assert explore(asked(SERVE), only_fitting=True).parts

    assert asked_for
    assert len(asked_for) == len({id(setting) for setting in asked_for})
