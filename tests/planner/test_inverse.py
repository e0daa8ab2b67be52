"""Inverse questions: each limit works, and one step beyond does not, by an estimate of its own."""

import json

import pytest

from planner.api import estimate, inverse
from planner.catalog.instances import get_instance, list_instances
from planner.errors import BadRequestError, PlannerError
from planner.search.engine import best_of
from planner.search.inverse import CONTEXT_STEP, SEQUENCE_STEP, largest_step, models_by_size
from planner.specs.estimate import EstimateRequest, InverseAnswer, InverseRequest, PlanRequest
from tests.planner.asking import GENERATE, LLAMA_8B, LLAMA_70B, SERVE, TINY, TRAIN, document

LORA = {**TRAIN, "method": "lora"}


def ask(question, **fields) -> InverseAnswer:
    base = {"engine": "vllm", "device": "rtx-4090", **fields}
    return inverse(InverseRequest.model_validate({**document(**base), "question": question}))


def works(**fields) -> bool:
    base = {"engine": "vllm", "device": "rtx-4090", **fields}
    try:
        return best_of(PlanRequest.model_validate(document(**base))) is not None
    except PlannerError:
        return False


@pytest.mark.parametrize("top", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("limit", [0, 1, 2, 3, 63, 64, 999, 5000])
def test_the_largest_step_is_found_wherever_it_is(limit, top):
    assert largest_step(lambda value: value <= limit, top) == min(limit, top)


def test_the_largest_step_takes_few_probes():
    asked = []
    largest_step(lambda value: asked.append(value) or value <= 60_000, 2**20)

    assert len(asked) < 40
    assert len(set(asked)) == len(asked)


def test_the_longest_context_fits_and_a_block_more_does_not():
    (limit,) = ask("longest_context", workload={**SERVE, "tpot_slo_seconds": 0.03}).limits
    output = SERVE["output_tokens"]

    def at(tokens):
        workload = {**SERVE, "tpot_slo_seconds": 0.03, "input_tokens": tokens - output}
        return works(workload=workload, constraints={"max_concurrency": {"min": 16}})

    assert at(limit.value)
    assert not at(limit.value + CONTEXT_STEP)
    assert limit.beyond.value == limit.value + CONTEXT_STEP
    assert limit.beyond.required > limit.beyond.limit


def test_a_context_that_memory_does_not_end_is_ended_by_the_model():
    (limit,) = ask("longest_context", model=TINY, workload=GENERATE).limits

    assert limit.value == 4096
    assert limit.beyond.constraint == "max_position_embeddings"


def test_the_most_users_keep_their_promise_and_one_more_breaks_it():
    workload = {**SERVE, "tpot_slo_seconds": 0.03}
    (limit,) = ask("most_users", workload=workload).limits

    assert works(workload={**workload, "concurrency": limit.value})
    assert not works(workload={**workload, "concurrency": limit.value + 1})
    assert limit.beyond.constraint == "tpot_seconds"


def test_without_a_promise_memory_ends_the_users():
    (limit,) = ask("most_users", pins={"weight_dtype": "bf16"}).limits

    assert limit.beyond.constraint == "max_concurrency"
    assert limit.estimate.performance.max_concurrency >= limit.value


def test_the_largest_batch_of_a_generation_fits_and_one_more_does_not():
    (limit,) = ask("largest_batch", workload=GENERATE).limits

    assert works(workload={**GENERATE, "batch_size": limit.value})
    assert not works(workload={**GENERATE, "batch_size": limit.value + 1})


def test_the_largest_batch_of_a_training_goes_through_in_one_pass():
    fields = {"device": "h100-sxm-80gb", "engine": None, "workload": LORA}
    (limit,) = ask("largest_batch", devices=2, **fields).limits
    strategy = limit.estimate.strategy

    assert strategy.gradient_accumulation_steps == 1
    assert strategy.micro_batch_size * strategy.data_parallel_size == limit.value
    assert limit.beyond.value == limit.value + 2
    assert limit.beyond.constraint == "memory"


def test_the_longest_sequence_fits_and_a_block_more_does_not():
    fields = {"device": "rtx-3090", "engine": None}
    (limit,) = ask("longest_sequence", workload=LORA, **fields).limits

    assert works(workload={**LORA, "sequence_length": limit.value}, **fields)
    assert not works(workload={**LORA, "sequence_length": limit.value + SEQUENCE_STEP}, **fields)


def test_the_largest_model_of_each_format_fits_and_the_next_larger_does_not():
    found = ask("largest_model").limits
    sizes = [name for name, _ in models_by_size()]

    assert {limit.estimate.strategy.weight_dtype for limit in found} >= {"bf16", "fp8", "int4"}
    for limit in found:
        name, dtype = limit.name.split(" in ")
        larger = sizes[sizes.index(name) - 1]
        pins = {"weight_dtype": dtype}
        assert works(model=name, pins=pins)
        assert not works(model=larger, pins=pins)


def test_fewer_bits_hold_a_larger_model():
    sizes = {one.estimate.strategy.weight_dtype: one.value for one in ask("largest_model").limits}

    assert sizes["int4"] > sizes["fp8"] > sizes["bf16"]


def test_the_fewest_devices_hold_the_model_and_half_of_them_do_not():
    fields = {"model": LLAMA_70B, "pins": {"weight_dtype": "bf16"}, "device": "h100-sxm-80gb"}
    (limit,) = ask("fewest_devices", **fields).limits

    assert limit.value == limit.cluster.num_devices == 2
    assert not works(devices=1, **fields)
    assert limit.beyond.constraint == "memory"


def test_the_cheapest_instance_keeps_the_promise_and_no_cheaper_kind_does():
    workload = {**SERVE, "tpot_slo_seconds": 0.02}
    pins = {"weight_dtype": "bf16"}
    (limit,) = ask("cheapest_instance", workload=workload, pins=pins).limits
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
    by_hour = ask("cheapest_instance", workload=workload).limits[0]
    by_token = ask("cheapest_instance", workload=workload, objective="cost").limits[0]

    assert by_token.estimate.cost_usd_per_million_tokens < (
        by_hour.estimate.cost_usd_per_million_tokens
    )
    assert by_token.value >= by_hour.value


@pytest.mark.parametrize(
    ("question", "workload"),
    [
        ("longest_context", TRAIN),
        ("most_users", GENERATE),
        ("largest_batch", SERVE),
        ("longest_sequence", SERVE),
    ],
)
def test_a_question_that_does_not_suit_the_workload_is_refused(question, workload):
    with pytest.raises(BadRequestError, match=question) as caught:
        ask(question, workload=workload)

    assert caught.value.field == "workload.kind"


def test_what_does_not_even_begin_says_why():
    answer = ask("longest_context", model=LLAMA_70B, pins={"weight_dtype": "bf16"})

    assert answer.limits == ()
    assert answer.smallest.constraint == "memory"
    assert answer.smallest.required > answer.smallest.limit


def test_the_estimate_at_the_limit_is_the_one_of_its_strategy():
    workload = {**SERVE, "tpot_slo_seconds": 0.03}
    (limit,) = ask("most_users", workload=workload).limits
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


def test_an_answer_is_json_both_ways():
    answer = ask("most_users", workload={**SERVE, "tpot_slo_seconds": 0.03})

    assert InverseAnswer.model_validate(json.loads(answer.model_dump_json())) == answer
