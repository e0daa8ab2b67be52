"""Suggestions: each is taken at its word, asked again, and is the smallest of its kind."""

import contextlib
import json
from math import inf

import pytest

from planner.api import estimate, plan
from planner.catalog.devices import get_device, list_devices
from planner.errors import NotPossibleError
from planner.specs.estimate import EstimateRequest, PlanRequest
from tests.planner.asking import CPU, GENERATE, LLAMA_8B, LLAMA_70B, TRAIN, document

LONG = {"kind": "serve", "input_tokens": 32768, "output_tokens": 128, "concurrency": 16}
WIDE = {"weight_dtype": "bf16", "kv_cache_dtype": "bf16"}
INFEASIBLE = {
    "wide weights": {"model": LLAMA_70B, "engine": "vllm", "pins": {"weight_dtype": "bf16"}},
    "a big batch": {
        "device": "rtx-4090",
        "engine": "vllm",
        "pins": WIDE,
        "workload": {**GENERATE, "batch_size": 512, "input_tokens": 4096},
    },
    "full tuning": {"device": "rtx-4090", "workload": TRAIN},
    "streamed weights": {
        "model": LLAMA_70B,
        "device": "rtx-4090",
        "workload": GENERATE,
        "pins": {"weight_dtype": "bf16"},
    },
    "a promise": {"engine": "vllm", "constraints": {"tpot_seconds": {"max": 1e-4}}},
}


def asked(**fields):
    return PlanRequest.model_validate(document(**fields))


def changed(fields, suggestion):
    """Return the request with a suggestion's own words put into it."""
    return PlanRequest.model_validate({**document(**fields), **suggestion.changes})


def suggested(title, **fields):
    found = [one for one in plan(asked(**fields)).suggestions if title in one.title]
    assert len(found) == 1, f"{title!r} is said {len(found)} times"
    return found[0]


@pytest.mark.parametrize("name", INFEASIBLE)
def test_an_own_estimate_of_every_suggestion_says_that_it_fits(name):
    fields = INFEASIBLE[name]
    answer = plan(asked(**fields))

    for suggestion in answer.suggestions:
        request = changed(fields, suggestion)
        again = estimate(
            EstimateRequest(
                model=request.model,
                cluster=request.cluster,
                workload=request.workload,
                engine=request.engine,
                strategy=suggestion.estimate.strategy,
            )
        )
        assert again.fits
        assert again.memory == suggestion.estimate.memory
        assert again.performance.tokens_per_second == pytest.approx(
            suggestion.estimate.performance.tokens_per_second
        )
    assert answer.suggestions


@pytest.mark.parametrize("name", INFEASIBLE)
def test_a_request_that_takes_a_suggestion_gets_a_plan(name):
    fields = INFEASIBLE[name]

    for suggestion in plan(asked(**fields)).suggestions:
        as_text = json.loads(json.dumps(suggestion.changes))
        answer = plan(PlanRequest.model_validate({**document(**fields), **as_text}))
        assert answer.plans
        assert answer.plans[0].strategy == suggestion.estimate.strategy


def test_another_device_is_the_cheapest_that_helps():
    fields = {"model": LLAMA_70B, "engine": "vllm", "pins": {"weight_dtype": "bf16"}}

    found = get_device(suggested("instead of NVIDIA H100", **fields).changes["cluster"]["device"])

    cheaper = {
        one.id
        for one in list_devices()
        if one.kind == "gpu" and (one.price_usd_per_hour or inf) < found.price_usd_per_hour
    }
    assert cheaper
    for device in cheaper:
        with contextlib.suppress(NotPossibleError):  # the engine has no bf16 there
            assert not plan(asked(**fields, device=device)).plans, device


def test_more_devices_are_the_fewest_doublings_that_help():
    fields = {"model": LLAMA_70B, "device": "rtx-4090", "engine": "vllm"}
    fields["pins"] = {"weight_dtype": "bf16"}

    cluster = suggested("devices instead of 1", **fields).changes["cluster"]

    count = cluster["devices_per_node"]
    assert (count, cluster.get("nodes", 1)) == (8, 1)
    assert not plan(asked(**fields, devices=count // 2)).plans


def test_a_server_beyond_eight_devices_is_suggested_as_several_nodes():
    fields = {"model": LLAMA_70B, "device": "rtx-4090", "devices": 8, "workload": TRAIN}

    cluster = suggested("devices instead of 8", **fields).changes["cluster"]

    assert cluster["devices_per_node"] == 8
    assert cluster["nodes"] in {2, 4, 8, 16}


@pytest.mark.parametrize(
    ("field", "figure", "limit"),
    [("concurrency", "tpot_seconds", 0.025), ("input_tokens", "ttft_seconds", 0.5)],
)
def test_a_smaller_workload_is_the_first_halving_that_keeps_the_promise(field, figure, limit):
    fields = {"engine": "vllm", "pins": WIDE, "constraints": {figure: {"max": limit}}}

    found = suggested(field.replace("_", " "), **fields, workload=LONG)

    size = found.changes["workload"][field]
    assert LONG[field] % size == 0
    assert getattr(found.estimate.performance, figure) <= limit
    assert not plan(asked(**fields, workload={**LONG, field: 2 * size})).plans


def test_a_dropped_limit_is_the_one_that_the_suggested_plan_breaks():
    bounds = {"tpot_seconds": {"max": 1e-4}, "ttft_seconds": {"max": 60.0}}

    found = suggested("no limit on", engine="vllm", constraints=bounds)

    assert found.title == "no limit on tpot seconds"
    assert list(found.changes["constraints"]) == ["ttft_seconds"]
    assert found.estimate.performance.tpot_seconds > 1e-4
    assert found.estimate.performance.ttft_seconds <= 60.0


def test_a_request_that_has_a_plan_is_told_to_change_nothing():
    answer = plan(asked(engine="vllm"))

    assert answer.plans
    assert answer.suggestions == ()


@pytest.mark.parametrize("name", INFEASIBLE)
def test_nobody_is_told_more_than_six_changes_and_none_twice(name):
    answer = plan(asked(**INFEASIBLE[name]))

    titles = [one.title for one in answer.suggestions]
    assert 0 < len(titles) <= 6
    assert len(set(titles)) == len(titles)


def test_a_processor_is_not_told_to_multiply():
    answer = plan(asked(model=LLAMA_8B, device={**CPU, "memory_bytes": 2**32}, workload=TRAIN))

    assert answer.plans == ()
    assert not [one.title for one in answer.suggestions if "devices instead of" in one.title]


def test_a_placement_that_is_suggested_moves_something_off_the_device():
    found = suggested("placed over host memory", **INFEASIBLE["streamed weights"])

    offload = found.estimate.strategy.offload
    assert 0 < offload.weights_cpu + offload.weights_disk <= 1
    held = (found.estimate.memory.host_bytes or 0) + (found.estimate.memory.disk_bytes or 0)
    assert held > 0.5 * 141e9  # 70.6 billion weights in two bytes; a 24 GB card holds the rest
    assert found.changes["pins"]["weight_dtype"] == "bf16"
