"""What a search says about a plan in words: reasons, misses of a probe, tiers and families."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import BadRequestError
from planner.search.inverse import Probe, closest_miss, largest_step
from planner.search.offer import reasons
from planner.search.question import distance
from planner.search.suggest import suggestions
from planner.specs.estimate import PlanRequest, Rejection
from tests.planner.asking import GENERATE, LLAMA_70B, SERVE, TRAIN, ask, document, search

GIB = 1024**3


def missed(family, required, limit):
    return Rejection(
        family=family,
        constraint="memory",
        reason=f"{required} of {limit}",
        required=required,
        limit=limit,
        unit="B",
    )


def with_figures(estimate, peak, rate):
    performance = estimate.performance.model_copy(update={"tokens_per_second": rate})
    memory = estimate.memory.model_copy(update={"per_device_peak_bytes": peak})
    return estimate.model_copy(update={"performance": performance, "memory": memory})


@pytest.mark.parametrize(
    ("rate", "word"),
    [
        (150.0, "50 % faster than the first plan"),
        (75.0, "25 % slower than the first plan"),
        (100.4, "as fast as the first plan"),
    ],
)
def test_a_plan_is_compared_with_the_first_in_whole_per_cents(rate, word):
    first = with_figures(ask(engine="vllm"), 20 * GIB, 100.0)
    other = first.strategy.model_copy(update={"max_batch_tokens": 4096})
    second = with_figures(first, 20 * GIB, rate).model_copy(update={"strategy": other})

    assert word in reasons(second, first)


@pytest.mark.parametrize(
    ("peak", "word"),
    [(18 * GIB, "2.0 GiB less per device"), (21 * GIB, "1.0 GiB more per device")],
)
def test_memory_is_compared_with_the_first_plan(peak, word):
    first = with_figures(ask(engine="vllm"), 20 * GIB, 100.0)
    other = first.strategy.model_copy(update={"max_batch_tokens": 4096})
    second = with_figures(first, peak, 100.0).model_copy(update={"strategy": other})

    assert word in reasons(second, first)
    assert not [one for one in reasons(first, first) if "per device" in one and "fits" not in one]


def test_the_first_plan_is_compared_with_nothing():
    first = search(model=LLAMA_70B, devices=2, engine="vllm").plans[0]

    memory = first.memory.per_device_peak_bytes / GIB
    assert first.reasons[0] == f"fits: {memory:.1f} of 80.0 GiB per device"
    assert len(first.reasons) == 2


def test_plans_of_several_sizes_say_how_many_devices_they_take():
    plans = search(model=LLAMA_70B, devices=4, engine="vllm", objective="cost", top=20).plans

    sizes = {one.strategy.tensor_parallel_size for one in plans}
    assert len(sizes) > 1
    words = [reason for one in plans[1:] for reason in one.reasons]
    assert any("devices instead of" in word for word in words)


def test_the_closest_miss_is_relative_to_its_own_limit():
    far, near = missed("far", 30.0, 10.0), missed("near", 1100.0, 1000.0)

    found = closest_miss(7, [far, near])

    assert (found.value, found.required, found.limit) == (7, 1100.0, 1000.0)
    assert found.reason.startswith("near: ")
    assert distance(near) == pytest.approx(0.1)
    assert distance(far) == pytest.approx(2.0)


def test_without_numbers_every_reason_is_said():
    words = [
        Rejection(family="a", constraint="applicability", reason="it is dense"),
        Rejection(family="b", constraint="applicability", reason="one device"),
    ]

    found = closest_miss(1, words)

    assert (found.constraint, found.reason) == ("applicability", "it is dense; one device")
    assert closest_miss(1, []).reason == "no strategy applies"


def test_a_value_is_searched_once_however_often_it_is_asked():
    probe = Probe()
    request = PlanRequest.model_validate(document(engine="vllm"))

    answers = [probe.works(1, request) for _ in range(3)]

    assert answers == [True, True, True]
    assert probe.searches == 1
    assert probe.limit(1, "users", None).beyond is None


def test_a_probe_keeps_the_field_of_an_error_as_the_constraint():
    probe = Probe()
    request = PlanRequest.model_validate(
        document(devices=3, pins={"tensor_parallel_size": 3, "data_parallel_size": 1})
    )

    assert not probe.works("three", request)
    assert probe.no["three"].constraint == "strategy.tensor_parallel_size"
    assert "is 3" in probe.no["three"].reason


@given(limit=st.integers(0, 5000), top=st.integers(1, 5000))
def test_a_search_for_the_largest_asks_for_no_number_twice_and_none_beyond_the_top(limit, top):
    asked = []

    def works(number):
        asked.append(number)
        return number <= limit

    assert largest_step(works, top) == min(limit, top)
    assert len(set(asked)) == len(asked)
    assert all(1 <= number <= top for number in asked)


@pytest.mark.parametrize("workload", [SERVE, GENERATE, TRAIN], ids=lambda work: work["kind"])
def test_where_no_search_finds_anything_nothing_is_suggested(workload):
    request = PlanRequest.model_validate(document(workload=workload, engine="vllm"))

    assert suggestions(request, lambda _: None) == ()


def test_a_change_that_is_itself_refused_is_no_suggestion():
    request = PlanRequest.model_validate(document(workload=GENERATE))

    def refuses(_):
        raise BadRequestError("never", "model")

    assert suggestions(request, refuses) == ()


def test_where_everything_helps_the_smallest_changes_are_suggested():
    request = PlanRequest.model_validate(document(workload={**SERVE, "concurrency": 64}))
    good = ask(engine="vllm")

    titles = [one.title for one in suggestions(request, lambda _: good)]

    assert titles[:2] == ["concurrency 32", "input tokens 512"]
    assert "2 devices instead of 1" in titles


def test_only_the_step_that_is_suggested_is_searched_for_its_best_plan():
    request = PlanRequest.model_validate(document(workload={**SERVE, "concurrency": 64}))
    good, asked, searched = ask(engine="vllm"), [], []

    def works(changed):
        asked.append(changed.workload.concurrency)
        return changed.workload.concurrency <= 8

    def best(changed):
        searched.append(changed.workload.concurrency)
        return good if works(changed) else None

    found = suggestions(request, best, works)

    assert [one.title for one in found] == ["concurrency 8"]
    assert set(asked) >= {1, 8, 16}
    assert set(searched) == {8}


@pytest.mark.parametrize("least", [1, 3, 6])
def test_a_halving_is_found_wherever_it_starts_to_help(least):
    request = PlanRequest.model_validate(document(workload={**SERVE, "concurrency": 64}))
    good = ask(engine="vllm")

    found = suggestions(
        request, lambda asked: good if asked.workload.concurrency <= 64 >> least else None
    )

    assert [one.title for one in found] == [f"concurrency {64 >> least}"]
    assert found[0].changes["workload"]["concurrency"] == 64 >> least
