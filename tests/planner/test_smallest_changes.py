"""Fit and target are two questions; a brute force over small spaces finds the same changes."""

import math
from itertools import chain, combinations

import pytest

from planner.api import plan
from planner.catalog.devices import get_device, list_devices
from planner.errors import NotPossibleError
from planner.specs.estimate import PlanRequest
from tests.planner.asking import CPU, LLAMA_8B, LLAMA_70B, LLAMA_405B, document

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
SIZES = ((2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8), (8, 16), (8, 32))


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


@pytest.mark.parametrize("name", SMALL)
def test_a_brute_force_over_pins_frees_as_few_of_the_layout(name):
    request = request_of(**SMALL[name])
    pins = {key: value for key, value in request.pins if value is not None}
    layout = [key for key in pins if key.endswith("_size")]

    def works(freed):
        rest = {key: value for key, value in pins.items() if key not in freed}
        return fits(request, pins=type(request.pins).model_validate(rest))

    working = [freed for freed in subsets(pins) if set(freed) & set(layout) and works(freed)]
    found = [one for one in titles(request) if "not pinned" in one and "dtype not" not in one]

    assert bool(found) == bool(working)
    if working:
        fewest = min(map(len, working))
        freed = found[0].removesuffix(" not pinned").replace(" and ", ", ").split(", ")
        assert len(freed) == fewest


@pytest.mark.parametrize("name", ["wide weights", "two pins"])
def test_a_brute_force_over_numbers_of_devices_finds_the_same(name):
    request = request_of(**SMALL[name])
    now = request.cluster.num_devices

    def grown(size):
        inside, nodes = size
        return request.cluster.model_copy(update={"devices_per_node": inside, "nodes": nodes})

    larger = (size for size in SIZES if now < size[0] * size[1] <= 16 * now)
    smallest = next((size for size in larger if fits(request, cluster=grown(size))), None)
    found = [one for one in titles(request) if "devices instead of" in one]

    expected = [] if smallest is None else [f"{math.prod(smallest)} devices instead of {now}"]
    assert found == expected


@pytest.mark.parametrize("name", ["wide weights", "two pins"])
def test_a_brute_force_over_all_devices_finds_none_that_is_cheaper(name):
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

    assert working == []


def test_what_fits_on_eight_cards_is_offered_eight_before_what_meets_the_target():
    request = request_of(**SMALL["wide weights"], workload={**CHAT, **TARGETS})

    assert titles(request)[0] == "8 devices instead of 1"
    assert "16 devices instead of 1" in titles(request, "target")
    assert "16 devices instead of 1" not in titles(request)


def test_what_fits_but_misses_its_target_is_told_nothing_of_fitting():
    request = request_of(device="rtx-4090", workload={**CHAT, **TARGETS, "concurrency": 256})

    assert titles(request) == []
    assert titles(request, "target")


def test_without_a_target_nothing_is_said_of_one():
    assert titles(request_of(**SMALL["wide weights"]), "target") == []


def test_changes_go_from_what_costs_least_to_what_costs_most():
    request = request_of(**SMALL["one device of two"])

    found = titles(request)

    kinds = ("not pinned", "weights in", "devices instead of", "instead of NVIDIA")
    at = [next(n for n, kind in enumerate(kinds) if kind in title) for title in found]
    assert at == sorted(at)
    assert found[0].endswith("parallel size not pinned")
    assert len(found) >= 3


DEVICES = ("rtx-3060-12gb", "rtx-4090", "h100-sxm5-80gb", "mi355x", "gb300-nvl72", "a2")


@pytest.mark.parametrize("device", DEVICES)
def test_no_card_is_left_without_an_offer(device):
    request = request_of(device=device, model=LLAMA_405B, pins=BF16, workload={**CHAT, **TARGETS})
    answer = plan(request)

    assert answer.plans or answer.suggestions


def test_a_training_that_no_single_change_of_number_fits_gets_the_cheapest_cluster():
    work = {"kind": "train", "sequence_length": 4096, "global_batch_size": 16, "method": "full"}
    request = request_of(device="rtx-4090", model=LLAMA_405B, workload=work, engine=None)

    [offered] = plan(request).suggestions

    assert "\N{MULTIPLICATION SIGN}" in offered.title
    fewer = offered.changes["cluster"] | {"nodes": offered.changes["cluster"]["nodes"] // 2}
    assert not fits(request, cluster=type(request.cluster).model_validate(fewer))


def test_a_processor_is_offered_a_device_whatever_its_own_memory():
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
