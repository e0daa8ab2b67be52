"""Suggestions: each is asked again, and a brute force over small spaces finds no smaller one."""

import contextlib
import json
import math
from functools import cache
from itertools import chain, combinations
from math import inf

import pytest

from planner.api import estimate, plan
from planner.catalog.devices import get_device, list_devices
from planner.specs.base import NotPossibleError
from planner.specs.estimate import EstimateRequest, PlanRequest
from tests.planner.asking import CPU, GENERATE, LLAMA_8B, LLAMA_70B, LLAMA_405B, TRAIN, document
from tests.plugins.extent import sample

LONG = {"kind": "serve", "input_tokens": 32768, "output_tokens": 128, "concurrency": 16}
WIDE = {"weight_dtype": "bf16", "kv_cache_dtype": "bf16"}
INFEASIBLE = {
    "wide weights": {"model": LLAMA_70B, "engine": "vllm", "pins": {"weight_dtype": "bf16"}},
    "a big batch": {
        "device": "rtx-4090",
        "engine": "vllm",
        "pins": WIDE,
        "workload": {**GENERATE, "batch_size": 512, "input_tokens": 4096, "at_once": True},
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
DRAWN = sample(INFEASIBLE.items(), share=0.4)


def asked(**fields):
    return PlanRequest.model_validate(document(**fields))


@cache
def answer_of(name):
    return plan(asked(**INFEASIBLE[name]))


def changed(fields, suggestion):
    """Return the request with a suggestion's own words put into it."""
    return PlanRequest.model_validate({**document(**fields), **suggestion.changes})


def suggested(title, **fields):
    found = [one for one in plan(asked(**fields)).suggestions if title in one.title]
    assert len(found) == 1, f"{title!r} is said {len(found)} times"
    return found[0]


def test_an_own_estimate_of_every_suggestion_says_that_it_fits():
    for name, fields in DRAWN:
        answer = answer_of(name)

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
            assert again.fits, name
            assert again.memory == suggestion.estimate.memory, name
            assert again.performance.tokens_per_second == pytest.approx(
                suggestion.estimate.performance.tokens_per_second
            )
        assert answer.suggestions, name


def test_a_request_that_takes_a_suggestion_gets_a_plan():
    for name, fields in DRAWN:
        for suggestion in answer_of(name).suggestions:
            as_text = json.loads(json.dumps(suggestion.changes))
            answer = plan(PlanRequest.model_validate({**document(**fields), **as_text}))
            assert answer.plans, name
            assert answer.plans[0].strategy == suggestion.estimate.strategy, name


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


def test_more_devices_are_the_fewest_that_help_or_several_nodes():
    fields = {"model": LLAMA_70B, "device": "rtx-4090", "engine": "vllm"}
    fields["pins"] = {"weight_dtype": "bf16"}
    cluster = suggested("devices instead of 1", **fields).changes["cluster"]
    count = cluster["devices_per_node"]
    assert (count, cluster.get("nodes", 1)) == (7, 1)
    assert not any(plan(asked(**fields, devices=fewer)).plans for fewer in range(1, count))

    fields = {"model": LLAMA_70B, "device": "rtx-4090", "devices": 8, "workload": TRAIN}
    cluster = suggested("devices instead of 8", **fields).changes["cluster"]
    assert cluster["devices_per_node"] == 8
    assert 2 <= cluster["nodes"] <= 16


def test_a_smaller_workload_is_the_largest_that_keeps_the_promise():
    for field, figure, limit, step in (
        ("concurrency", "tpot_seconds", 0.025, 1),
        ("input_tokens", "ttft_seconds", 0.5, 16),
    ):
        fields = {"engine": "vllm", "pins": WIDE, "constraints": {figure: {"max": limit}}}
        found = suggested(field.replace("_", " "), **fields, workload=LONG)
        size = found.changes["workload"][field]
        assert size % step == 0, (field, figure, limit)
        assert getattr(found.estimate.performance, figure) <= limit, (field, figure, limit)
        assert not plan(asked(**fields, workload={**LONG, field: size + step})).plans


def test_a_limit_that_no_plan_meets_is_put_at_the_best_of_that_very_figure():
    pins = {"weight_dtype": "bf16", "tensor_parallel_size": 1}
    for name, unit in (
        ("ttft_p95_seconds", "TTFT p95 of "),
        ("ttft_seconds", "TTFT of "),
        ("tpot_seconds", "TPOT of "),
    ):
        others = {"latency_seconds": {"max": 1000.0}}
        bounds = {**others, name: {"max": 1e-6}}
        found = suggested(unit, engine="vllm", constraints=bounds)
        best = found.changes["constraints"][name]["max"]
        assert set(found.changes["constraints"]) == {name, "latency_seconds"}, name
        assert f"{best * 1e3:.3g} ms" in found.title, name
        assert not plan(asked(engine="vllm", constraints={name: {"max": best * 0.99}})).plans, name
        # A strategy of one's own is no better.
        own = plan(asked(engine="vllm", pins=pins, constraints={"latency_seconds": {"max": 1e3}}))
        reached = getattr(own.plans[0].performance, name)
        assert reached is None or reached >= best * 0.99, name

    # The objective of a workload is a limit too.
    slo = {**CHAT, "ttft_slo_seconds": 1e-6}
    assert (
        "ttft_seconds" in suggested("TTFT of ", workload=slo, engine="vllm").changes["constraints"]
    )


def test_a_plan_needs_no_change_six_are_enough_and_a_processor_does_not_multiply():
    answer = plan(asked(engine="vllm"))
    assert answer.plans
    assert answer.suggestions == ()

    for name, _ in DRAWN:
        answer = answer_of(name)
        titles = [one.title for one in answer.suggestions]
        assert 0 < len(titles) <= 6, name
        assert len(set(titles)) == len(titles), name

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


CHAT = {"kind": "serve", "input_tokens": 1024, "output_tokens": 256, "concurrency": 16}
TARGETS = {"ttft_slo_seconds": 1.0, "tpot_slo_seconds": 0.05}
BF16 = {"weight_dtype": "bf16"}
SMALL = {
    "wide weights": {"model": LLAMA_70B, "device": "rtx-4090", "pins": BF16},
    "one device of two": {
        "model": LLAMA_70B,
        "devices": 8,
        "device": "rtx-4090",
        "pins": {**BF16, "tensor_parallel_size": 2, "data_parallel_size": 4},
    },
    "two pins": {
        "device": "rtx-3060-12gb",
        "devices": 2,
        "pins": {**BF16, "data_parallel_size": 2, "kv_cache_dtype": "bf16"},
    },
}
SIZES = (*((each, 1) for each in range(2, 9)), *((8, nodes) for nodes in range(2, 33)))


def request_of(**fields):
    fields = {"engine": "vllm", "workload": CHAT, **fields}
    return PlanRequest.model_validate(document(**fields))


def test_nothing_fits_in_the_small_spaces_as_they_are():
    assert not any(fits(request_of(**fields)) for fields in SMALL.values())


def fits(request, **changes):
    try:
        return bool(plan(request.model_copy(update=changes).without_targets()).plans)
    except NotPossibleError:  # the engine refuses the pins on this device
        return False


def titles(request, purpose="fit"):
    return [one.title for one in plan(request).suggestions if one.purpose == purpose]


def subsets(names):
    return chain.from_iterable(combinations(names, size) for size in range(1, len(names) + 1))


def test_a_brute_force_over_pins_frees_as_few_of_the_layout():
    for name, fields in SMALL.items():
        request = request_of(**fields)
        pins = {key: value for key, value in request.pins if value is not None}
        layout = [key for key in pins if key.endswith("_size")]

        def works(freed, request=request, pins=pins):
            rest = {key: value for key, value in pins.items() if key not in freed}
            return fits(request, pins=type(request.pins).model_validate(rest))

        working = [freed for freed in subsets(pins) if set(freed) & set(layout) and works(freed)]
        found = [one for one in titles(request) if "not pinned" in one and "dtype not" not in one]

        assert bool(found) == bool(working), name
        if working:
            fewest = min(map(len, working))
            freed = found[0].removesuffix(" not pinned").replace(" and ", ", ").split(", ")
            assert len(freed) == fewest, name


def test_a_brute_force_over_numbers_of_devices_finds_the_same():
    for name in ("wide weights", "two pins"):
        request = request_of(**SMALL[name])
        now = request.cluster.num_devices

        def grown(size, cluster=request.cluster):
            inside, nodes = size
            return cluster.model_copy(update={"devices_per_node": inside, "nodes": nodes})

        larger = (size for size in SIZES if now < size[0] * size[1] <= 16 * now)
        smallest = next((size for size in larger if fits(request, cluster=grown(size))), None)
        found = [one for one in titles(request) if "devices instead of" in one]

        expected = [] if smallest is None else [f"{math.prod(smallest)} devices instead of {now}"]
        assert found == expected, name


def test_a_brute_force_over_sizes_and_methods_finds_the_same():
    batch = {"kind": "generate", "input_tokens": 2048, "output_tokens": 64, "at_once": True}
    tight = {**BF16, "kv_cache_dtype": "bf16"}
    for device, size in (("rtx-4090", 40), ("rtx-3090", 25)):
        workload = {**batch, "batch_size": size}
        request = request_of(device=device, workload=workload, pins=tight)

        def smaller(count, workload=request.workload):
            return workload.model_copy(update={"batch_size": count})

        working = [n for n in range(1, size) if fits(request, workload=smaller(n))]
        found = [one for one in titles(request) if one.startswith("batch size")]
        assert found == [f"batch size {max(working)}"], device

    training = {"kind": "train", "sequence_length": 2048, "global_batch_size": 16}
    for method, told in (("lora", ["method qlora"]), ("qlora", [])):
        work = {**training, "method": method}
        request = request_of(device="rtx-3060-12gb", workload=work, engine=None)
        found = [one for one in titles(request) if one.startswith("method")]
        assert found == told, method


def test_a_brute_force_over_all_devices_finds_none_that_is_cheaper():
    for name in sample(("wide weights", "two pins")):
        request = request_of(**SMALL[name])

        def price(device):
            return device.price_usd_per_hour or math.inf

        found = [one for one in plan(request).suggestions if "instead of NVIDIA" in one.title]
        chosen = get_device(found[0].changes["cluster"]["device"])
        working = [
            device
            for device in list_devices()
            if device.kind == "gpu"
            and price(device) < price(chosen)
            and fits(request, cluster=request.cluster.model_copy(update={"device": device.id}))
        ]

        assert working == [], name


def test_what_fits_is_offered_before_the_target_and_only_what_is_missed_is_told():
    request = request_of(**SMALL["wide weights"], workload={**CHAT, **TARGETS})
    assert titles(request)[0] == "7 devices instead of 1"
    assert "16 devices instead of 1" in titles(request, "target")
    assert "16 devices instead of 1" not in titles(request)
    request = request_of(device="rtx-4090", workload={**CHAT, **TARGETS, "concurrency": 256})
    assert titles(request) == []
    assert titles(request, "target")
    assert titles(request_of(**SMALL["wide weights"]), "target") == []


def test_changes_go_from_what_costs_least_to_what_costs_most():
    request = request_of(**SMALL["one device of two"])
    found = titles(request)
    kinds = ("not pinned", "weights in ", "devices instead of", "instead of NVIDIA", "host memory")
    at = [max(n for n, kind in enumerate(kinds) if kind in title) for title in found]
    assert at == sorted(at)
    assert found[0].endswith("parallel size not pinned")
    assert len(found) >= 3


DEVICES = ("rtx-3060-12gb", "rtx-4090", "h100-sxm5-80gb", "mi355x", "gb300-nvl72", "a2")


def test_no_card_training_or_processor_is_left_without_an_offer():
    for device in sample(DEVICES):
        request = request_of(
            device=device, model=LLAMA_405B, pins=BF16, workload={**CHAT, **TARGETS}
        )
        answer = plan(request)
        assert answer.plans or answer.suggestions, device

    work = {"kind": "train", "sequence_length": 4096, "global_batch_size": 16, "method": "full"}
    request = request_of(device="rtx-4090", model=LLAMA_405B, workload=work, engine=None)
    [offered] = plan(request).suggestions
    assert "\N{MULTIPLICATION SIGN}" in offered.title
    fewer = offered.changes["cluster"] | {"nodes": offered.changes["cluster"]["nodes"] // 2}
    assert not fits(request, cluster=type(request.cluster).model_validate(fewer))

    large = {**CPU, "memory_bytes": 2**40}
    wish = {**CHAT, "tpot_slo_seconds": 0.1}
    found = titles(request_of(model=LLAMA_8B, device=large, workload=wish, engine=None), "target")
    assert [one for one in found if "instead of this-host" in one]


QLORA = {"kind": "train", "sequence_length": 2048, "global_batch_size": 16, "method": "qlora"}


def test_a_training_too_large_for_the_runner_may_run_in_deepspeed_which_searches_itself():
    """Published: QLoRA of 70B models on two cards of 24 GB with CPU offload (FSDP-QLoRA)."""
    request = request_of(
        model=LLAMA_70B, device="rtx-4090", devices=2, workload=QLORA, engine=None
    )
    first = plan(request).suggestions[0]
    changed = request.model_copy(update=first.changes)

    assert first.title.startswith("DeepSpeed")
    assert first.changes == {"engine": "deepspeed"}
    assert {"accelerate", "deepspeed"} <= set(plan(changed).plans[0].exports)
    assert first.estimate.memory.host_bytes

    small = {"host_memory_bytes": 2**30, "disk_capacity_bytes": 2**30}
    host = request.cluster.model_copy(update=small)
    for unserved in (changed.model_copy(update={"cluster": host}), request_of(workload=CHAT)):
        assert not [one for one in titles(unserved) if one.startswith("DeepSpeed")]


def test_a_training_that_fits_with_its_states_in_host_memory_has_a_plan_for_it():
    fields = {"device": "rtx-4090", "engine": None, "workload": {**QLORA, "method": "full"}}
    tight = plan(request_of(model="Qwen/Qwen3-1.7B", **fields))
    roomy = plan(request_of(model="meta-llama/Llama-3.2-1B", **fields))
    assert tight.plans[0].strategy.offload_places == ("optimiser states on cpu",)
    assert not any(each.strategy.offload_places for each in roomy.plans)


def test_a_served_model_too_large_for_a_card_may_keep_weights_on_the_host_or_take_fewer_bits():
    lone = {"kind": "serve", "input_tokens": 1024, "output_tokens": 256, "concurrency": 1}
    for model, device, devices, engine, told in (
        ("openai/gpt-oss-120b", "rtx-4090", 1, "vllm", "llama.cpp instead of vLLM, with"),
        ("deepseek-ai/DeepSeek-V3", "h100-sxm5-80gb", 8, "vllm", "weights in int4"),
    ):
        fields = {"model": model, "device": device, "devices": devices, "engine": engine}
        found = suggested(told, workload=lone, **fields)
        assert plan(changed({"workload": lone, **fields}, found)).plans, model


def test_no_shorter_sequence_is_offered_beside_a_schedule_of_lengths():
    """Its longest length would be above the sequence, which no request can be."""
    work = {
        "kind": "train",
        "method": "full",
        "sequence_length": 4096,
        "global_batch_size": 8,
        "tokens": 10**9,
        "length_schedule": [[512, 0.5], [4096, 0.5]],
    }
    request = PlanRequest.model_validate(
        {"model": "meta-llama/Llama-3.1-8B", "cluster": {"device": "rtx-4090"}, "workload": work}
    )
    offered = [one.changes.get("workload") or {} for one in plan(request).suggestions]
    assert not [one for one in offered if one.get("sequence_length", 4096) != 4096]
    for changes in offered:
        PlanRequest.model_validate({**request.model_dump(), "workload": {**work, **changes}})
