"""Answers about limits in words: values, what ends the way, what was found to be too little."""

import pytest

from planner.api import inverse
from planner.specs.estimate import FirstFailure, InverseAnswer, InverseRequest
from tests.planner.asking import LLAMA_70B, SERVE, document
from webapp.core.units import NBSP, THIN, TIMES
from webapp.limits.questions import _failure_sentence, _reason, shown, value_words
from webapp.wizard.drafts import serve_draft


def answered(question, **fields):
    base = {"engine": "vllm", "device": "rtx-4090", **fields}
    return inverse(InverseRequest.model_validate({**document(**base), "question": question}))


def beyond(**fields):
    return FirstFailure(value=2, reason="too much", constraint="memory", **fields)


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (15408, "tokens", f"15{THIN}408{NBSP}tokens"),
        (1, "users", f"1{NBSP}person"),
        (214, "users", f"214{NBSP}people"),
        (1, "devices", f"1{NBSP}device"),
        (8, "sequences", f"8{NBSP}sequences"),
        (36.15e9, "parameters", f"36.1{NBSP}B parameters"),
        (0.05, "USD per hour", f"0.050{NBSP}$ an hour"),
        ("gpt2 int4", "parameters", "gpt2 int4"),
    ],
)
def test_a_value_is_said_as_people_say_it(value, unit, words):
    assert value_words(value, unit) == words


def test_a_promise_that_ends_the_way_is_said_with_both_numbers():
    reason = FirstFailure(
        value=181, reason="x", constraint="tpot_seconds", required=0.05012, limit=0.05
    )

    assert _reason(reason) == (f"each further token takes 50.12{NBSP}ms, the target is 50{NBSP}ms")


def test_users_that_memory_does_not_hold_are_said_as_such():
    reason = FirstFailure(
        value=16, reason="x", constraint="max_concurrency", required=15, limit=16
    )

    assert _reason(reason) == "memory holds 15 at once, not 16"


def test_any_other_reason_is_the_planners_own():
    assert _reason(beyond()) == "too much"


@pytest.mark.parametrize(("enough", "word"), [(True, "is not enough"), (False, "is too much")])
def test_what_ends_the_way_is_one_sentence(enough, word):
    assert (
        _failure_sentence(beyond(), "devices", enough=enough)
        == f"2{NBSP}devices {word}: too much."
    )


def test_where_nothing_lies_beyond_it_says_so():
    assert _failure_sentence(None, "parameters", enough=False) == "Nothing larger is known."
    assert _failure_sentence(None, "devices", enough=True) == "Nothing was found to be too little."


def test_the_limit_is_the_first_of_four_figures_with_its_interval():
    found = shown(answered("most_users"), serve_draft(None))

    first = found.figures[0]
    assert len(found.figures) == 4
    assert (first.label, first.unit) == ("The limit", "people")
    assert first.low < first.value < first.high


def test_several_devices_are_counted_in_the_answer():
    found = shown(answered("longest_context", devices=2), serve_draft(None))

    assert found.verdict.sentence.endswith(f"on 2 {TIMES} RTX 4090")


def test_nothing_that_works_is_a_bad_verdict_with_the_reason():
    pins = {"weight_dtype": "bf16"}
    found = shown(answered("longest_context", model=LLAMA_70B, pins=pins), serve_draft(None))

    assert found.verdict.tone == "bad"
    assert f"not even 16{NBSP}tokens" in found.verdict.sentence
    assert found.figures == ()


def test_an_answer_without_any_reason_still_says_something():
    bare = InverseAnswer(
        question="most_users", limits=(), searches=0, seconds=0.0, calibration="none"
    )

    assert shown(bare, serve_draft(None)).verdict.sentence == "Nothing works here"


def test_one_search_is_counted_as_one():
    found = shown(answered("cheapest_instance", workload=SERVE), serve_draft(None))

    assert "search" in found.searched
