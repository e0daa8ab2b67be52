"""Hardware to choose among: suggestions and inverse questions look at all of it."""

import pytest

from planner.api import inverse, plan
from planner.search.inverse import models_by_size
from planner.search.suggest import larger_sizes
from planner.specs.estimate import InverseRequest, PlanRequest
from tests.planner.asking import GENERATE, LLAMA_8B, LLAMA_70B, SERVE, TRAIN, document

SMALL, LARGER = {"device": "a2"}, {"device": "rtx-4090"}
WIDE = {"weight_dtype": "bf16"}


def asked(*options, **fields):
    base = {"model": LLAMA_70B, "engine": "vllm", "pins": WIDE, "device": "a2", **fields}
    return PlanRequest.model_validate({**document(**base), "hardware_options": list(options)})


def limits(question, *options, **fields):
    request = asked(*options, **fields).model_dump(exclude_none=True)
    return inverse(InverseRequest.model_validate({**request, "question": question}))


def test_a_larger_device_is_suggested_in_place_of_the_largest_option():
    titles = [one.title for one in plan(asked(SMALL, LARGER)).suggestions]

    assert any(title.endswith("instead of NVIDIA GeForce RTX 4090") for title in titles)


def test_more_of_the_largest_option_are_suggested():
    found = [one for one in plan(asked(SMALL, LARGER)).suggestions if "devices" in one.title]

    (more,) = found
    assert more.changes["cluster"]["device"] == "rtx-4090"
    assert more.changes["hardware_options"] == []


def test_a_request_that_takes_such_a_suggestion_gets_a_plan():
    request = asked(SMALL, LARGER)

    for one in plan(request).suggestions:
        merged = {**request.model_dump(exclude_none=True), **one.changes}
        answer = plan(PlanRequest.model_validate(merged))
        assert answer.plans[0].strategy == one.estimate.strategy


def test_without_options_a_suggestion_says_nothing_about_them():
    assert all("hardware_options" not in one.changes for one in plan(asked()).suggestions)


def test_more_of_a_rented_offer_are_suggested_as_its_device():
    offer = {"instance": "aws/p5.48xlarge"}
    found = plan(asked(offer, model="meta-llama/Llama-3.1-405B")).suggestions

    clusters = [one.changes["cluster"] for one in found if "devices" in one.title]
    assert [(one["devices_per_node"], one["nodes"]) for one in clusters] == [(8, 2)]
    assert "instance" not in clusters[0]


@pytest.mark.parametrize(
    ("size", "first"),
    [
        ((1, 1), [(2, 1), (4, 1), (8, 1), (8, 2)]),
        ((6, 1), [(8, 1), (6, 2), (8, 2), (6, 4), (8, 4), (6, 8), (8, 8), (6, 16)]),
        ((8, 1), [(8, 2), (8, 4), (8, 8), (8, 16)]),
        ((3, 1), [(6, 1), (8, 1), (8, 2), (8, 4)]),
        ((4, 2), [(8, 2), (8, 4), (8, 8), (8, 16)]),
        ((16, 1), [(16, 2), (16, 4), (16, 8), (16, 16)]),
    ],
)
def test_sizes_go_up_and_fill_a_server_first(size, first):
    assert larger_sizes(*size)[: len(first)] == first


@pytest.mark.parametrize("inside", range(1, 17))
@pytest.mark.parametrize("nodes", [1, 3])
def test_no_size_is_smaller_than_the_cluster_or_over_sixteen_times(inside, nodes):
    counts = [each * servers for each, servers in larger_sizes(inside, nodes)]

    assert counts == sorted(counts)
    assert all(inside * nodes < count <= 16 * inside * nodes for count in counts)


def test_six_devices_that_do_not_suffice_become_twelve_where_eight_do_not_either():
    pins = {"weight_dtype": "bf16", "kv_cache_dtype": "bf16"}
    workload = {**SERVE, "concurrency": 1}
    request = document(device="rtx-4090", devices=6, model=LLAMA_70B, pins=pins, engine="vllm")

    answer = plan(PlanRequest.model_validate({**request, "workload": workload}))

    found = [one.changes["cluster"] for one in answer.suggestions if "devices" in one.title]
    assert answer.plans or found[0]["devices_per_node"] * found[0].get("nodes", 1) in {8, 12}


def test_the_longest_context_is_that_of_the_better_option():
    alone = limits("longest_context", LARGER, model=LLAMA_8B, workload=GENERATE).limits[0]
    both = limits("longest_context", SMALL, LARGER, model=LLAMA_8B, workload=GENERATE).limits[0]

    assert both.value == alone.value
    assert both.cluster.device == "rtx-4090"


def test_the_largest_model_is_that_of_the_option_with_the_most_memory():
    both = limits("largest_model", SMALL, LARGER, workload=SERVE, pins={}).limits
    alone = limits("largest_model", LARGER, workload=SERVE, pins={}).limits

    assert {one.name for one in both} == {one.name for one in alone}


def test_the_fewest_devices_are_of_the_option_that_needs_the_fewest():
    (limit,) = limits("fewest_devices", SMALL, {"device": "h100-sxm-80gb"}).limits

    assert (limit.value, limit.cluster.device) == (2, "h100-sxm-80gb")


def test_the_cheapest_instance_does_not_depend_on_the_options():
    with_options = limits("cheapest_instance", SMALL, LARGER, model=LLAMA_8B).limits[0]
    without = limits("cheapest_instance", model=LLAMA_8B).limits[0]

    assert with_options.name == without.name


def test_the_largest_training_batch_is_the_larger_of_the_options():
    tuned = {**TRAIN, "method": "lora"}
    fields = {"model": LLAMA_8B, "workload": tuned, "engine": None, "pins": {}}
    cards = ({"device": "rtx-4090"}, {"device": "h100-sxm-80gb", "devices_per_node": 2})

    each = [limits("largest_batch", card, **fields).limits[0].value for card in cards]
    (both,) = limits("largest_batch", *cards, **fields).limits

    assert both.value == max(each)
    assert both.cluster.num_devices == 2


def test_where_no_model_fits_the_smallest_one_says_why():
    tiny = {"id": "tiny", "memory_bytes": 2**20, "memory_bandwidth_bytes_per_second": 1e9}
    device = {**tiny, "peak_flops_per_second": {"bf16": 1e12}}

    answer = limits("largest_model", device=device, engine=None, pins={})

    assert answer.limits == ()
    assert models_by_size()[-1][0] in str(answer.smallest.value)


def test_where_no_number_of_devices_suffices_the_most_that_were_tried_say_why():
    never = {"tpot_seconds": {"max": 1e-9}}

    answer = limits("fewest_devices", {"device": "b200"}, model=LLAMA_8B, constraints=never)

    assert answer.smallest.value == 4096
    assert answer.smallest.constraint == "tpot_seconds"


def test_a_context_shorter_than_the_answer_shortens_the_answer():
    workload = {**GENERATE, "output_tokens": 100_000, "input_tokens": 1}

    (limit,) = limits("longest_context", model=LLAMA_8B, workload=workload, device="t4",
                      pins={"weight_dtype": "int4"}).limits  # fmt: skip

    held = limit.estimate.memory
    assert limit.value < 100_000
    assert held.per_device_peak_bytes <= held.capacity_bytes
    assert limit.beyond.value == limit.value + 16
