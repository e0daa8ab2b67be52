"""How sure a limit is: the interval of what ends it, carried over to the value."""

import pytest

from planner.api import estimate, inverse
from planner.search.inverse import limit_interval
from planner.specs.estimate import EstimateRequest, InverseRequest
from tests.planner.asking import GENERATE, SERVE, TINY, TRAIN, ask, document


def limit(question, **fields):
    base = {"engine": "vllm", "device": "rtx-4090", **fields}
    request = InverseRequest.model_validate({**document(**base), "question": question})
    return inverse(request).limits[0]


PROMISED = {"workload": {**SERVE, "tpot_slo_seconds": 0.03}}
LORA = {"workload": {**TRAIN, "method": "lora"}, "engine": None, "device": "h100-sxm-80gb"}


@pytest.mark.parametrize(
    ("question", "fields"),
    [
        ("most_users", {}),
        ("most_users", PROMISED),
        ("longest_context", {}),
        ("largest_batch", {"workload": GENERATE}),
        ("largest_batch", LORA),
    ],
)
def test_a_limit_that_memory_or_a_time_ends_lies_inside_its_interval(question, fields):
    found = limit(question, **fields)

    low, high = found.interval
    assert 0 <= low < found.value < high


def test_an_interval_goes_no_further_than_the_question(monkeypatch):
    found = limit("most_users")
    monkeypatch.setattr("planner.search.inverse.MAX_USERS", found.value + 1)

    assert limit("most_users").interval == (found.interval[0], found.value + 1)


def test_a_limit_of_the_models_own_length_has_no_interval():
    assert limit("longest_context", model=TINY, workload=GENERATE).interval is None


@pytest.mark.parametrize("question", ["largest_model", "fewest_devices", "cheapest_instance"])
def test_what_is_no_growing_number_has_no_interval(question):
    assert limit(question).interval is None


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


def test_a_time_that_does_not_grow_gives_no_interval():
    found = ask(engine="vllm")

    assert limit_interval(100, "tpot_seconds", found, lambda: found) is None


def test_an_estimate_without_an_interval_gives_none():
    bare = ask(engine="vllm").model_copy(update={"interval": {}})

    assert limit_interval(100, "memory", bare, lambda: bare) is None
    assert limit_interval(100, "tpot_seconds", bare, lambda: bare) is None


def test_a_value_of_one_has_no_half():
    found = ask(engine="vllm")

    assert limit_interval(1, "tpot_seconds", found, lambda: found) is None
