"""The page of limits: what it asks, what it answers, and what it says to bad input."""

import re

import pytest

from tests.webapp.conftest import client_of
from webapp.hosts.models import Host
from webapp.limits.questions import QUESTIONS
from webapp.plans.models import Plan

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


@pytest.mark.parametrize("goal", ["serve", "generate", "finetune", "pretrain"])
def test_every_question_shows_a_form_for_every_work_without_answering(alice, goal):
    client = client_of(alice)

    for question in QUESTIONS:
        sent = {"question": question.key, "goal": goal}
        page = client.get("/limits/", sent).content.decode()

        assert "No result yet" in page, question.key
        assert 'class="error"' not in page, question.key


@pytest.mark.parametrize("question", [each.key for each in QUESTIONS])
def test_every_question_is_answered_with_its_proposals(alice, question):
    page = ask(alice, question)

    assert 'aria-label="Answer"' in page
    assert "calibration" in page


def test_an_answer_has_figures_with_interval_provenance_and_evidence(alice):
    page = ask(alice)

    assert "people at once on RTX 4090" in page
    assert "The limit" in page
    assert page.count('class="whisker"') >= 3
    assert 'href="/docs/accuracy"' in page
    assert "What limits it" in page


def test_memory_at_the_limit_is_drawn(alice):
    page = ask(alice, "longest_context", slo="none")

    assert "Memory at the limit" in page
    assert "KV cache" in page


def test_the_largest_model_is_listed_for_each_format(alice):
    page = ask(alice, "largest_model")

    assert "In each format of the weights" in page
    assert {"INT4", "FP8", "INT8", "BF16"} <= set(re.findall(r"· ([\w-]+)</td>", page))


def test_what_does_not_begin_says_why(alice):
    page = ask(alice, "longest_context", model="meta-llama/Llama-3.1-405B", hardware="t4")

    assert "Nothing works, not even" in page
    assert "GiB" in page


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("model", "llama-99", "nearest: "),
        ("model", "", "Model is missing. Name one, such as"),
        ("hardware", "abacus", "abacus"),
        ("output_tokens", "0", "Answer length is 0. It must be a whole number from 1 to"),
        ("output_tokens", "many", "It must be a whole number from 1 to 1,000,000"),
        ("devices_per_node", "99999", "Devices in one machine is 99999. It must be"),
        ("nodes", "", "Machines is missing"),
        ("slo", "instant", "instant"),
        ("weight_dtype", "fp1", "fp1"),
    ],
)
def test_a_bad_value_is_refused_beside_its_field(alice, field, value, said):
    page = ask(alice, status=422, **{field: value})

    assert said in error_of(page, field)
    assert 'aria-label="Answer"' not in page


@pytest.mark.parametrize("field", ["model", "hardware", "output_tokens", "goal", "question"])
def test_no_hostile_value_fails_or_is_repeated_unescaped(alice, field):
    client = client_of(alice)

    for value in ("🚢", "<script>", "9" * 400, "-1", "1e9", "nan"):
        answer = client.get("/limits/", {"ask": "1", field: value})

        assert answer.status_code in {200, 422}, value
        assert b"<script>" not in answer.content, value


def test_htmx_gets_the_region_alone(alice):
    page = ask(alice, headers=HTMX)

    assert page.lstrip().startswith('<div id="limits"')
    assert "<html" not in page


def test_htmx_gets_errors_with_a_status_that_it_shows(alice):
    page = ask(alice, headers=HTMX, output_tokens="0")

    assert "Answer length is 0" in error_of(page, "output_tokens")


def test_a_link_to_another_question_takes_the_hardware_along(alice):
    page = ask(alice)

    assert "question=longest_context&amp;hardware=rtx-4090" in page


def test_what_is_looked_for_is_not_asked(alice):
    page = client_of(alice).get("/limits/", {"question": "most_users"}).content.decode()

    assert 'name="concurrency"' not in page
    assert 'name="input_tokens"' in page


def test_another_work_asks_its_own_fields(alice):
    sent = {"question": "largest_batch", "goal": "finetune"}
    page = client_of(alice).get("/limits/", sent).content.decode()

    assert 'name="lora_rank"' in page
    assert 'name="global_batch_size"' not in page


def test_a_host_of_the_team_can_be_asked_about(alice, host):
    page = ask(alice, "largest_batch", goal="pretrain", hardware=f"host:{host.pk}", model="gpt2")

    assert f'value="host:{host.pk}" selected' in page
    assert 'aria-label="Answer"' in page


def test_a_host_of_another_team_is_no_choice(charlie, host):
    page = ask(charlie, hardware=f"host:{host.pk}", status=422)

    assert f">{host.name}<" not in page
    assert "not one of the available choices" in error_of(page, "hardware")


def test_asking_stores_nothing(alice, host):
    before = Host.objects.get(pk=host.pk).facts
    ask(alice)

    assert not Plan.objects.exists()
    assert Host.objects.get(pk=host.pk).facts == before


def test_a_viewer_may_ask_and_someone_without_a_team_too(vera, django_user_model):
    stranger = django_user_model.objects.create_user("dora")

    assert 'aria-label="Answer"' in ask(vera)
    assert 'aria-label="Answer"' in ask(stranger)


def test_limits_are_changed_by_no_post(alice):
    assert client_of(alice).post("/limits/").status_code == 405
