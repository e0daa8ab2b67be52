"""Inverse questions: each limit works, how sure it is, and one step beyond does not."""

import json
from functools import cache
from itertools import product

import pytest

from planner.api import estimate, inverse, plan
from planner.catalog.devices import get_instance, list_instances
from planner.search import engine
from planner.search.engine import best_of
from planner.search.inverse import (
    CONTEXT_STEP,
    SEQUENCE_STEP,
    largest_step,
    limit_interval,
    models_by_size,
)
from planner.search.suggest import _Trial, larger_sizes, smaller_workloads
from planner.specs.base import BadRequestError, PlannerError
from planner.specs.estimate import (
    CalibrationFactor,
    EstimateRequest,
    HostCalibration,
    InverseAnswer,
    InverseRequest,
    PlanRequest,
)
from tests.planner.asking import GENERATE, LLAMA_8B, LLAMA_70B, SERVE, TINY, TRAIN, ask, document

LORA = {**TRAIN, "method": "lora"}


def written(question, **fields):
    base = {"engine": "vllm", "device": "rtx-4090", **fields}
    return json.dumps({**document(**base), "question": question})


@cache
def answered(text):
    return inverse(InverseRequest.model_validate_json(text))


def answer_to(question, **fields) -> InverseAnswer:
    """Return the answer to a question, which is computed once."""
    return answered(written(question, **fields))


def works(**fields) -> bool:
    base = {"engine": "vllm", "device": "rtx-4090", **fields}
    try:
        return best_of(PlanRequest.model_validate(document(**base))) is not None
    except PlannerError:
        return False


def test_the_largest_step_is_found_wherever_it_is_by_few_probes():
    found = {
        (limit, top): largest_step(limit.__ge__, top)
        for top in (1, 2, 7, 64, 1000)
        for limit in (0, 1, 2, 3, 63, 64, 999, 5000)
    }
    assert found == {pair: min(pair) for pair in found}
    asked = []
    largest_step(lambda value: asked.append(value) or value <= 60_000, 2**20)
    assert len(asked) < 40
    assert len(set(asked)) == len(asked)


def test_the_first_step_near_any_guess_is_the_first_of_all_and_a_right_guess_takes_two_searches():
    asked = []
    trial = _Trial(PlanRequest.model_validate(document(workload=SERVE)), works, works, "target")
    for length in (1, 2, 7, 40):
        for first, guess in product(range(length + 1), range(length)):
            asked.clear()
            trial._works = lambda step, first=first: asked.append(step) or step >= first
            expected = first if first < length else None
            assert trial._first_near(range(length), guess) == expected
            assert len(set(asked)) == len(asked) <= 2 * length.bit_length()
            assert guess != first or len(asked) <= 2


TAILS = {
    "latency": ({"concurrency": 64}, {"latency_p99_seconds": {"max": 6.0}}),
    "two": ({"concurrency": 40}, {"ttft_p95_seconds": {"max": 1.0}, "tpot_p95_seconds": {"max": 0.02}}),
    "out of reach": ({"concurrency": 40}, {"tpot_p99_seconds": {"max": 1e-4}}),
}  # fmt: skip


@pytest.mark.parametrize("name", TAILS)
def test_a_guess_saves_searches_of_a_ladder_and_changes_no_suggestion(name):
    load, limits = TAILS[name]
    fields = {"device": "rtx-4090", "engine": "vllm", "constraints": limits}
    request = PlanRequest.model_validate(document(workload={**SERVE, **load}, **fields))
    exploration, searched = engine.explore(request), []
    best, has_plan, _ = engine._searches(request, exploration)
    trial = _Trial(request, best, lambda step: searched.append(step) or has_plan(step), "target")

    def found():
        searched.clear()
        steps = [
            step for ladder in smaller_workloads(request) for step in trial._smallest_step(ladder)
        ]
        return [step.model_dump_json() for step in steps], len(searched)

    bisected, many = found()
    trial.miss = engine._miss_of_fastest(exploration)
    guessed, few = found()
    assert guessed == bisected
    assert bool(guessed) == (name != "out of reach")
    assert few <= many if name == "out of reach" else few < many


def test_the_longest_context_fits_and_a_block_more_does_not():
    (limit,) = answer_to("longest_context", workload={**SERVE, "tpot_slo_seconds": 0.03}).limits
    output = SERVE["output_tokens"]

    def at(tokens):
        workload = {**SERVE, "tpot_slo_seconds": 0.03, "input_tokens": tokens - output}
        return works(workload=workload, constraints={"max_concurrency": {"min": 16}})

    assert at(limit.value)
    assert not at(limit.value + CONTEXT_STEP)
    assert limit.beyond.value == limit.value + CONTEXT_STEP
    assert limit.beyond.required > limit.beyond.limit

    # A context that memory does not end is ended by the model.
    (limit,) = answer_to("longest_context", model=TINY, workload=GENERATE).limits
    assert limit.value == 4096
    assert limit.beyond.constraint == "max_position_embeddings"

    # What does not even begin says why.
    answer = answer_to("longest_context", model=LLAMA_70B, pins={"weight_dtype": "bf16"})
    assert answer.limits == ()
    assert answer.smallest.constraint == "memory"
    assert answer.smallest.required > answer.smallest.limit


def test_the_most_users_keep_their_promise_and_one_more_breaks_it():
    workload = {**SERVE, "tpot_slo_seconds": 0.03}
    (limit,) = answer_to("most_users", workload=workload).limits
    assert works(workload={**workload, "concurrency": limit.value})
    assert not works(workload={**workload, "concurrency": limit.value + 1})
    assert limit.beyond.constraint == "tpot_seconds"

    # The estimate at the limit is the one of its strategy.
    again = estimate(
        EstimateRequest(
            model=LLAMA_8B,
            cluster=limit.cluster,
            workload={**workload, "concurrency": limit.value},
            strategy=limit.estimate.strategy,
            engine="vllm",
        )
    )
    assert again.performance == limit.estimate.performance

    # Without a promise memory ends the users.
    (limit,) = answer_to("most_users", pins={"weight_dtype": "bf16"}).limits
    assert limit.beyond.constraint == "max_concurrency"
    assert limit.estimate.performance.max_concurrency >= limit.value


def test_the_largest_batch_and_the_longest_sequence_fit_and_one_more_does_not():
    # The largest batch of a generation fits and one more does not.
    (limit,) = answer_to("largest_batch", workload=GENERATE).limits
    assert works(workload={**GENERATE, "batch_size": limit.value})
    assert not works(workload={**GENERATE, "batch_size": limit.value + 1, "at_once": True})

    # The largest batch of a training goes through in one pass.
    fields = {"device": "h100-sxm-80gb", "engine": None, "workload": LORA}
    (limit,) = answer_to("largest_batch", devices=2, **fields).limits
    strategy = limit.estimate.strategy
    assert strategy.gradient_accumulation_steps == 1
    assert strategy.micro_batch_size * strategy.data_parallel_size == limit.value
    assert limit.beyond.value == limit.value + 2
    assert limit.beyond.constraint == "memory"

    # The longest sequence fits and a block more does not.
    fields = {"device": "rtx-3090", "engine": None}
    (limit,) = answer_to("longest_sequence", workload=LORA, **fields).limits
    assert works(workload={**LORA, "sequence_length": limit.value}, **fields)
    assert not works(workload={**LORA, "sequence_length": limit.value + SEQUENCE_STEP}, **fields)


def test_the_largest_model_of_each_format_fits_and_the_next_larger_does_not():
    found = answer_to("largest_model").limits
    sizes = [name for name, _ in models_by_size()]
    assert {limit.estimate.strategy.weight_dtype for limit in found} >= {"bf16", "fp8", "int4"}
    for limit in found:
        name, dtype = limit.name.split(" in ")
        larger = sizes[sizes.index(name) - 1]
        pins = {"weight_dtype": dtype}
        assert works(model=name, pins=pins)
        assert not works(model=larger, pins=pins)

    # Fewer bits hold a larger model.
    by_bits = {
        one.estimate.strategy.weight_dtype: one.value for one in answer_to("largest_model").limits
    }
    assert by_bits["int4"] > by_bits["fp8"] > by_bits["bf16"]


def test_sizes_that_a_question_changes_stay_possible_together():
    """A prompt grew past the longest request; two sequences were shared among eight replicas."""
    load = {**SERVE, "input_tokens": 1, "max_request_tokens": 258}
    longest = [answer_to("longest_context", workload=each).limits[0] for each in (SERVE, load)]
    assert longest[0].value == longest[1].value > 258
    training = {"workload": TRAIN, "engine": "torch", "device": "h100-sxm-80gb", "devices": 2}
    refused = answer_to("largest_batch", **training, pins={"data_parallel_size": 8})
    assert "8 devices, the cluster has 2" in refused.smallest.reason


def test_the_fewest_devices_of_unlike_nodes_are_those_of_the_first_alone():
    first = {"device": "rtx-4090"}
    mixed = {**first, "other_nodes": [{"device": "a100-sxm4-80gb", "nodes": 2}]}
    alone, among = (
        answer_to("fewest_devices", cluster=cluster).limits[0] for cluster in (first, mixed)
    )
    assert among.value == alone.value
    assert among.cluster == alone.cluster
    assert among.cluster.num_devices == among.value


def test_the_fewest_devices_hold_the_model_and_half_of_them_do_not():
    fields = {"model": LLAMA_70B, "pins": {"weight_dtype": "bf16"}, "device": "h100-sxm-80gb"}
    (limit,) = answer_to("fewest_devices", **fields).limits
    assert limit.value == limit.cluster.num_devices == 2
    assert not works(devices=1, **fields)
    assert limit.beyond.constraint == "memory"


def test_the_cheapest_instance_keeps_the_promise_and_no_cheaper_kind_does():
    workload = {**SERVE, "tpot_slo_seconds": 0.02}
    pins = {"weight_dtype": "bf16"}
    (limit,) = answer_to("cheapest_instance", workload=workload, pins=pins).limits
    cheaper = {
        (one.device, one.devices): one.id
        for one in list_instances()
        if one.device and not one.is_spot and one.price_usd_per_hour < limit.value
    }
    assert limit.value == get_instance(limit.name).price_usd_per_hour
    assert works(cluster=limit.name, workload=workload, pins=pins)
    assert not any(works(cluster=name, workload=workload, pins=pins) for name in cheaper.values())


def test_cost_as_the_objective_takes_the_cheapest_token_not_the_cheapest_hour():
    workload = {**SERVE, "concurrency": 64}
    by_hour = answer_to("cheapest_instance", workload=workload).limits[0]
    by_token = answer_to("cheapest_instance", workload=workload, objective="cost").limits[0]
    assert by_token.estimate.cost_usd_per_million_tokens < (
        by_hour.estimate.cost_usd_per_million_tokens
    )
    assert by_token.value >= by_hour.value


def test_a_question_that_does_not_suit_the_workload_is_refused():
    for question, workload in [
        ("longest_context", TRAIN),
        ("most_users", GENERATE),
        ("largest_batch", SERVE),
        ("longest_sequence", SERVE),
    ]:
        with pytest.raises(BadRequestError, match=question) as caught:
            answer_to(question, workload=workload)
        assert caught.value.field == "workload.kind"


def test_an_answer_is_json_both_ways():
    answer = answer_to("most_users", workload={**SERVE, "tpot_slo_seconds": 0.03})
    assert InverseAnswer.model_validate(json.loads(answer.model_dump_json())) == answer


def limit(question, **fields):
    return answer_to(question, **fields).limits[0]


PROMISED = {"workload": {**SERVE, "tpot_slo_seconds": 0.03}}
LORA_ON_H100 = {"workload": {**TRAIN, "method": "lora"}, "engine": None, "device": "h100-sxm-80gb"}


def test_a_limit_that_memory_or_a_time_ends_lies_inside_its_interval():
    for question, fields in [
        ("most_users", {}),
        ("most_users", PROMISED),
        ("longest_context", {}),
        ("largest_batch", {"workload": GENERATE}),
        ("largest_batch", LORA_ON_H100),
    ]:
        found = limit(question, **fields)
        low, high = found.interval
        assert 0 <= low < found.value < high


def test_an_interval_goes_no_further_than_the_question(monkeypatch):
    found = limit("most_users")
    monkeypatch.setattr("planner.search.inverse.MAX_USERS", found.value + 1)
    (again,) = answered.__wrapped__(written("most_users")).limits
    assert again.interval == (found.interval[0], found.value + 1)


def test_what_is_no_growing_number_has_no_interval():
    # A limit of the own length of the model has no interval.
    assert limit("longest_context", model=TINY, workload=GENERATE).interval is None

    for question in ["largest_model", "fewest_devices", "cheapest_instance"]:
        assert limit(question).interval is None
    # A time that does not grow gives no interval.
    found = ask(engine="vllm")
    assert limit_interval(100, "tpot_seconds", found, lambda: found) is None
    # A value of one has no half.
    assert limit_interval(1, "tpot_seconds", found, lambda: found) is None
    # An estimate without an interval gives none.
    bare = ask(engine="vllm").model_copy(update={"interval": {}})
    assert limit_interval(100, "memory", bare, lambda: bare) is None
    assert limit_interval(100, "tpot_seconds", bare, lambda: bare) is None


def test_at_the_low_end_the_peak_of_a_batch_is_as_far_below_as_it_may_be_above():
    found = limit("largest_batch", workload=GENERATE)
    low = int(found.interval[0])
    peak_there = estimate(
        EstimateRequest(
            model="meta-llama/Llama-3.1-8B",
            cluster=found.cluster,
            workload={**GENERATE, "batch_size": low},
            strategy=found.estimate.strategy,
            engine="vllm",
        )
    ).memory.per_device_peak_bytes
    here = found.estimate
    above = here.interval["per_device_peak_bytes"][1] - here.memory.per_device_peak_bytes
    assert here.memory.per_device_peak_bytes - peak_there == pytest.approx(above, rel=0.25)


def test_a_surer_figure_gives_a_surer_limit():
    found = limit("most_users").estimate
    sure = found.model_copy(
        update={
            "interval": {
                "per_device_peak_bytes": tuple(
                    found.memory.per_device_peak_bytes * factor for factor in (0.99, 1.01)
                )
            }
        }
    )
    wide = limit_interval(100, "memory", found, lambda: found)
    narrow = limit_interval(100, "memory", sure, lambda: sure)
    assert wide[0] < narrow[0] < 100 < narrow[1] < wide[1]


SMALL, LARGER = {"device": "a2"}, {"device": "rtx-4090"}
WIDE = {"weight_dtype": "bf16"}


def asked(*options, **fields):
    base = {"model": LLAMA_70B, "engine": "vllm", "pins": WIDE, "device": "a2", **fields}
    return PlanRequest.model_validate({**document(**base), "hardware_options": list(options)})


def limits(question, *options, **fields):
    request = asked(*options, **fields).model_dump(exclude_none=True)
    return inverse(InverseRequest.model_validate({**request, "question": question}))


def test_larger_and_more_of_the_largest_option_are_suggested():
    request = asked(SMALL, LARGER)
    suggested = plan(request).suggestions
    end = "instead of NVIDIA GeForce RTX 4090"
    assert any(one.title.endswith(end) for one in suggested)

    (more,) = [one for one in suggested if "devices" in one.title]
    assert more.changes["cluster"]["device"] == "rtx-4090"
    assert more.changes["hardware_options"] == []

    # A request that takes such a suggestion gets a plan.
    for one in suggested:
        merged = {**request.model_dump(exclude_none=True), **one.changes}
        answer = plan(PlanRequest.model_validate(merged))
        assert answer.plans[0].strategy == one.estimate.strategy

    # Without options a suggestion says nothing about them.
    assert all("hardware_options" not in one.changes for one in plan(asked()).suggestions)


def test_more_of_a_rented_offer_are_suggested_as_its_device():
    offer = {"instance": "aws/p5.48xlarge"}
    found = plan(asked(offer, model="meta-llama/Llama-3.1-405B")).suggestions
    clusters = [one.changes["cluster"] for one in found if "devices" in one.title]
    assert [(one["devices_per_node"], one["nodes"]) for one in clusters] == [(8, 2)]
    assert "instance" not in clusters[0]


def test_sizes_go_up_and_fill_a_server_first():
    for size, first in [
        ((1, 1), [(2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (8, 2)]),
        ((6, 1), [(7, 1), (8, 1), (6, 2), (8, 2), (6, 3), (8, 3), (6, 4), (6, 5), (8, 4)]),
        ((8, 1), [(8, 2), (8, 3), (8, 4), (8, 5)]),
        ((3, 1), [(4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (8, 2), (8, 3)]),
        ((4, 2), [(5, 2), (6, 2), (7, 2), (8, 2), (8, 3), (8, 4)]),
        ((16, 1), [(16, 2), (16, 3), (16, 4)]),
    ]:
        assert larger_sizes(*size)[: len(first)] == first

    # No size is smaller than the cluster or over sixteen times.
    for inside, nodes in product(range(1, 17), (1, 3)):
        counts = [each * servers for each, servers in larger_sizes(inside, nodes)]
        least = inside * nodes
        assert counts == sorted(counts), (inside, nodes)
        assert all(least < count <= 16 * least for count in counts), (inside, nodes)


def test_six_devices_that_do_not_suffice_become_seven():
    pins = {"weight_dtype": "bf16", "kv_cache_dtype": "bf16"}
    workload = {**SERVE, "concurrency": 1}
    request = document(device="rtx-4090", devices=6, model=LLAMA_70B, pins=pins, engine="vllm")
    answer = plan(PlanRequest.model_validate({**request, "workload": workload}))
    found = [one.changes["cluster"] for one in answer.suggestions if "devices" in one.title]
    assert answer.plans or found[0]["devices_per_node"] * found[0].get("nodes", 1) == 7


def test_a_limit_is_that_of_the_better_option():
    # The longest context is that of the better option.
    alone = limits("longest_context", LARGER, model=LLAMA_8B, workload=GENERATE).limits[0]
    both = limits("longest_context", SMALL, LARGER, model=LLAMA_8B, workload=GENERATE).limits[0]
    assert both.value == alone.value
    assert both.cluster.device == "rtx-4090"

    # The largest model is that of the option with the most memory.
    both = limits("largest_model", SMALL, LARGER, workload=SERVE, pins={}).limits
    alone = limits("largest_model", LARGER, workload=SERVE, pins={}).limits
    assert {one.name for one in both} == {one.name for one in alone}
    # The fewest devices are of the option that needs the fewest.
    (limit,) = limits("fewest_devices", SMALL, {"device": "h100-sxm-80gb"}).limits
    assert (limit.value, limit.cluster.device) == (2, "h100-sxm-80gb")
    # The cheapest instance does not depend on the options.
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


def test_where_nothing_suffices_the_least_that_was_tried_says_why():
    # Where no model fits the smallest one says why.
    tiny = {"id": "tiny", "memory_bytes": 2**20, "memory_bandwidth_bytes_per_second": 1e9}
    device = {**tiny, "peak_flops_per_second": {"bf16": 1e12}}
    answer = limits("largest_model", device=device, engine=None, pins={})
    assert answer.limits == ()
    assert models_by_size()[-1][0] in str(answer.smallest.value)

    # Where no number of devices suffices the most that were tried say why.
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


def test_the_answer_names_the_calibration_of_its_host():
    factor = CalibrationFactor(factor=1.25, n=3, spread=0.0)
    host = HostCalibration(host="lab", factors={"compute": factor}, digest="d1")
    calibrated = answer_to("longest_context", host_calibration=host.model_dump(mode="json"))
    assert calibrated.calibration.endswith("+lab:d1")
