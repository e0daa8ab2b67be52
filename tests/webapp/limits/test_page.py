"""Limits: what the page and a plan's tab ask, what they answer, and in which words."""

import re

import pytest

from planner.api import inverse
from planner.specs.estimate import FirstFailure, InverseAnswer, InverseRequest
from runners.plans.document import GOALS, HardwareChoice
from tests.planner.asking import LLAMA_70B, SERVE, document
from tests.plugins.extent import sample
from tests.webapp.conftest import client_of
from webapp.core.display import NBSP, THIN, TIMES
from webapp.hosts.models import Host
from webapp.pages.limits import (
    QUESTIONS,
    LimitForm,
    _failure_sentence,
    _reason,
    questions_for_goal,
    shown,
    value_words,
)
from webapp.plans.models import Plan
from webapp.wizard.drafts import goal_change, serve_document, stored_draft

pytestmark = pytest.mark.django_db
HTMX = {"HTTP_HX_REQUEST": "true"}


def ask(user, question="most_users", *, status=200, headers=None, **fields):
    sent = {"question": question, "ask": "1", "hardware": "rtx-4090", **fields}
    answer = client_of(user).get("/limits/", sent, **(headers or {}))
    assert answer.status_code == status
    return answer.content.decode()


def error_of(page: str, name: str) -> str:
    found = re.search(rf'id="id_{name}_error">([^<]*)<', page)
    assert found, f"nothing is said beside {name}"
    return found[1]


def test_every_question_shows_a_form_for_every_work_without_answering(alice):
    for goal in ["serve", "generate", "finetune", "pretrain"]:
        client = client_of(alice)

        for question in QUESTIONS:
            sent = {"question": question.key, "goal": goal}
            page = client.get("/limits/", sent).content.decode()

            assert "No result yet" in page, question.key
            assert 'class="error"' not in page, question.key


def test_the_proposals_of_every_question_and_work_are_valid_and_a_document():
    for question in QUESTIONS:
        for goal in question.goals:
            form = LimitForm({"goal": goal}, question)
            assert form.is_valid(), (question.key, goal, form.errors)
            assert form.document.goal == goal, question.key


def test_every_question_is_answered_with_its_proposals(alice):
    chosen = {each.key for each in sample(QUESTIONS)} | {"largest_model"}
    pages = {question: ask(alice, question) for question in sorted(chosen)}
    for question, page in pages.items():
        assert 'aria-label="Answer"' in page, question
        assert 'title="Calibration factors-' in page, question
    page = pages["largest_model"]
    assert "By weight dtype" in page
    assert {"INT4", "FP8", "INT8", "BF16"} <= set(re.findall(r"· ([\w-]+)</td>", page))


def test_an_answer_has_figures_with_interval_provenance_and_evidence(alice):
    page = ask(alice)
    assert "requests at once on RTX 4090" in page
    assert "The limit" in page
    assert page.count('class="whisker"') >= 3
    assert 'href="/docs/accuracy"' in page
    assert "Limiting factor" in page
    assert "question=longest_context&amp;hardware=rtx-4090" in page


def test_memory_at_the_limit_is_drawn_and_what_does_not_begin_says_why(alice):
    page = ask(alice, "longest_context", latency_target="none")
    assert "Memory at the limit" in page
    assert "KV cache" in page

    page = ask(alice, "longest_context", model="meta-llama/Llama-3.1-405B", hardware="t4")
    assert "No value works, not even" in page
    assert "GiB" in page


def test_a_missed_target_names_what_fits_and_the_limit_without_the_target(alice):
    machine = {"hardware": "cpu-epyc-7742-2s", "concurrency": "64"}
    page = ask(alice, "longest_context", **machine, latency_target="chat")
    assert "GGUF Q8_0 weights fit; the mean TPOT is " in page
    assert re.search(r'latency_target=none[^"]*">Up to [\d,\s]+tokens of context', page)


def test_a_bad_value_is_refused_beside_its_field(alice):
    for field, value, said in [
        ("model", "llama-99", "nearest: "),
        ("model", "", "Model is missing. Name one, such as"),
        ("hardware", "abacus", "abacus"),
        ("output_tokens", "0", "Answer length is 0. It must be a whole number from 1 to"),
        ("output_tokens", "many", "It must be a whole number from 1 to 1,000,000"),
        ("devices_per_node", "99999", "Devices in one machine is 99999. It must be"),
        ("nodes", "", "Machines is missing"),
        ("latency_target", "instant", "instant"),
        ("weight_dtype", "fp1", "fp1"),
    ]:
        page = ask(alice, status=422, **{field: value})
        assert said in error_of(page, field), (field, value)
        assert 'aria-label="Answer"' not in page, (field, value)


def test_no_hostile_value_fails_or_is_repeated_unescaped(alice):
    for field in ["model", "hardware", "output_tokens", "goal", "question"]:
        client = client_of(alice)
        for value in ("🚢", "<script>", "9" * 400, "-1", "1e9", "nan"):
            answer = client.get("/limits/", {"ask": "1", field: value})
            assert answer.status_code in {200, 400, 422}, value
            assert b"<script>" not in answer.content, value


def test_htmx_gets_the_region_alone_and_errors_with_a_status_that_it_shows(alice):
    page = ask(alice, headers=HTMX)
    assert page.lstrip().startswith('<div id="limits"')
    assert "<html" not in page
    page = ask(alice, headers=HTMX, output_tokens="0")
    assert "Answer length is 0" in error_of(page, "output_tokens")


def test_the_answer_follows_the_form_in_one_region_and_is_sought_as_the_page_opens(alice):
    unanswered = client_of(alice).get("/limits/").content.decode()
    answered = ask(alice, headers=HTMX)
    for page in (unanswered, answered):
        assert page.index('aria-label="What you have"') < page.index('id="limit-answer"')
        assert 'hx-trigger="submit, change delay:50ms, input delay:600ms' in page
        assert '<input type="hidden" name="ask" value="1">' in page  # of each change
    assert "600ms, load" in unanswered
    assert "600ms, load" not in answered  # else it would be sought for ever
    assert "600ms, load" not in ask(alice, headers=HTMX, output_tokens="0")


def test_each_question_and_work_asks_its_own_fields(alice):
    page = client_of(alice).get("/limits/", {"question": "most_users"}).content.decode()
    assert 'name="concurrency"' not in page
    assert 'name="input_tokens"' in page

    sent = {"question": "largest_batch", "goal": "finetune"}
    page = client_of(alice).get("/limits/", sent).content.decode()
    assert 'name="lora_rank"' in page
    assert 'name="global_batch_size"' not in page


def test_a_host_of_the_team_can_be_asked_about_and_anothers_is_no_choice(alice, host, charlie):
    page = ask(alice, "largest_batch", goal="pretrain", hardware=f"host:{host.pk}", model="gpt2")
    assert f'value="host:{host.pk}" selected' in page
    assert 'aria-label="Answer"' in page

    page = ask(charlie, hardware=f"host:{host.pk}", status=422)
    assert f">{host.name}<" not in page
    assert "not one of the available choices" in error_of(page, "hardware")


def test_asking_stores_nothing_and_any_viewer_may_but_not_by_post(
    alice, host, vera, django_user_model
):
    before = Host.objects.get(pk=host.pk).facts
    ask(alice)
    assert not Plan.objects.exists()
    assert Host.objects.get(pk=host.pk).facts == before

    stranger = django_user_model.objects.create_user("dora")
    assert 'aria-label="Answer"' in ask(vera)
    assert 'aria-label="Answer"' in ask(stranger)
    assert client_of(alice).post("/limits/").status_code == 405


# A plan's tab of limits: the questions that suit it, answered for its own draft


@pytest.fixture
def plan(team, alice) -> Plan:
    return Plan.objects.create(
        team=team, owner=alice, name="serve", draft=stored_draft(serve_document(None))
    )


def tab(user, plan, question="", **headers) -> str:
    answer = client_of(user).get(f"/plans/{plan.pk}/limits/", {"question": question}, **headers)
    assert answer.status_code == 200
    return answer.content.decode()


def test_it_offers_the_questions_of_its_work_unanswered_and_nothing_to_another_team(
    alice, plan, charlie
):
    page = tab(alice, plan)
    assert "How many concurrent requests?" in page
    assert "What is the longest training sequence?" not in page
    assert 'aria-label="Answer"' not in page
    assert client_of(charlie).get(f"/plans/{plan.pk}/limits/").status_code == 404

    for goal in GOALS:
        assert questions_for_goal(goal) == tuple(
            each for each in QUESTIONS if goal in each.goals
        ), goal


def test_it_answers_a_question_for_its_own_draft_if_it_suits_it(alice, plan):
    for question in [each.key for each in questions_for_goal("serve")]:
        page = tab(alice, plan, question)
        assert 'aria-label="Answer"' in page, question
        assert 'aria-current="true"' in page, question

    for question in ["longest_sequence", "largest_batch", "price", "<b>"]:
        assert 'aria-label="Answer"' not in tab(alice, plan, question), question


def test_its_address_works_without_javascript_and_htmx_gets_the_tab_alone(alice, plan):
    page = tab(alice, plan, "most_users", HTTP_HX_REQUEST="true")
    assert page.lstrip().startswith('<div id="limits"')
    assert f'href="/plans/{plan.pk}/limits/?question=most_users"' in tab(alice, plan)


def test_a_draft_that_cannot_be_asked_or_has_no_limit_says_why(alice, plan):
    document = plan.document
    document.hardware = HardwareChoice(device="abacus")
    plan.document = document
    plan.save()
    assert "abacus" in tab(alice, plan, "most_users")

    document.hardware = HardwareChoice()
    plan.document = document
    goal_change(plan, "compress")
    plan.save()
    assert "A compression has no limit to search for" in tab(alice, plan)


# Answers about limits in words: values, what ends the way, what was found to be too little


def answered(question, **fields):
    base = {"engine": "vllm", "device": "rtx-4090", **fields}
    return inverse(InverseRequest.model_validate({**document(**base), "question": question}))


def beyond(**fields):
    return FirstFailure(value=2, reason="too much", constraint="memory", **fields)


def test_a_value_is_said_as_people_say_it():
    for value, unit, words in [
        (15408, "tokens", f"15{THIN}408{NBSP}tokens"),
        (1, "users", f"1{NBSP}request"),
        (214, "users", f"214{NBSP}requests"),
        (1, "devices", f"1{NBSP}device"),
        (8, "sequences", f"8{NBSP}sequences"),
        (36.15e9, "parameters", f"36.1{NBSP}B parameters"),
        (0.05, "USD per hour", "$0.050/h"),
        ("gpt2 int4", "parameters", "gpt2 int4"),
    ]:
        assert value_words(value, unit) == words, (value, unit)


def test_what_ends_the_way_is_said_with_both_numbers_or_as_the_planner_says_it():
    reason = FirstFailure(
        value=181, reason="x", constraint="tpot_seconds", required=0.05012, limit=0.05
    )
    assert _reason(reason) == (f"each further token takes 50.12{NBSP}ms, the target is 50{NBSP}ms")

    reason = FirstFailure(
        value=16, reason="x", constraint="max_concurrency", required=15, limit=16
    )
    assert _reason(reason) == "memory holds 15 at once, not 16"
    of_bf16 = reason.model_copy(update={"family": "bf16 weights, vllm"})
    named = "vLLM · BF16 weights"
    assert _reason(of_bf16) == f"the closest strategy, {named}, holds 15 at once, not 16"
    assert _reason(beyond()) == "too much"


def test_what_ends_the_way_is_one_sentence_even_where_nothing_does():
    for enough, word in [(True, "is not enough"), (False, "is too much")]:
        assert (
            _failure_sentence(beyond(), "devices", enough=enough)
            == f"2{NBSP}devices {word}: too much."
        ), (enough, word)

    assert (
        _failure_sentence(None, "parameters", enough=False) == "The search knows no larger value."
    )
    assert (
        _failure_sentence(None, "devices", enough=True)
        == "The search found no insufficient value."
    )


def test_the_limit_is_the_first_of_four_figures_with_devices_and_searches_counted():
    found = shown(answered("most_users"), serve_document(None))
    first = found.figures[0]
    assert len(found.figures) == 4
    assert (first.label, first.unit) == ("The limit", "requests")
    assert first.low < first.value < first.high

    found = shown(answered("longest_context", devices=2), serve_document(None))
    assert found.verdict.sentence.endswith(f"on 2 {TIMES} RTX 4090")
    found = shown(answered("cheapest_instance", workload=SERVE), serve_document(None))
    assert "search" in found.searched


def test_nothing_that_works_is_a_bad_verdict_with_the_reason_if_there_is_one():
    pins = {"weight_dtype": "bf16"}
    found = shown(answered("longest_context", model=LLAMA_70B, pins=pins), serve_document(None))
    assert found.verdict.tone == "bad"
    assert f"not even 16{NBSP}tokens" in found.verdict.sentence
    assert found.figures == ()

    bare = InverseAnswer(
        question="most_users", limits=(), searches=0, seconds=0.0, calibration="none"
    )
    assert shown(bare, serve_document(None)).verdict.sentence == "No result"
