"""A plan's tab of limits: the questions that suit it, answered for its own draft."""

import pytest

from tests.webapp.conftest import client_of
from webapp.limits.questions import QUESTIONS, suited
from webapp.plans.models import Plan
from webapp.wizard.drafts import GOALS, serve_draft

pytestmark = pytest.mark.django_db


@pytest.fixture
def plan(team, alice) -> Plan:
    return Plan.objects.create(team=team, owner=alice, name="serve", draft=serve_draft(None))


def tab(user, plan, question="", **headers) -> str:
    answer = client_of(user).get(f"/plans/{plan.pk}/limits/", {"question": question}, **headers)
    assert answer.status_code == 200
    return answer.content.decode()


def test_it_offers_the_questions_of_its_work_and_answers_none_unasked(alice, plan):
    page = tab(alice, plan)

    assert "How many people at once?" in page
    assert "How long a training sequence fits?" not in page
    assert 'aria-label="Answer"' not in page


@pytest.mark.parametrize("question", [each.key for each in suited("serve")])
def test_it_answers_a_question_for_its_own_draft(alice, plan, question):
    page = tab(alice, plan, question)

    assert 'aria-label="Answer"' in page
    assert 'aria-current="true"' in page


@pytest.mark.parametrize("question", ["longest_sequence", "largest_batch", "price", "<b>"])
def test_a_question_that_does_not_suit_it_is_not_asked(alice, plan, question):
    assert 'aria-label="Answer"' not in tab(alice, plan, question)


def test_htmx_gets_the_tab_alone(alice, plan):
    page = tab(alice, plan, "most_users", HTTP_HX_REQUEST="true")

    assert page.lstrip().startswith('<div id="limits"')


def test_its_address_works_without_javascript(alice, plan):
    assert f'href="/plans/{plan.pk}/limits/?question=most_users"' in tab(alice, plan)


def test_a_question_that_cannot_be_asked_says_why(alice, plan):
    plan.draft["hardware"]["device"] = "abacus"
    Plan.objects.filter(pk=plan.pk).update(draft=plan.draft)

    assert "abacus" in tab(alice, plan, "most_users")


def test_a_compression_has_no_limit_to_look_for(alice, plan):
    plan.draft["goal"]["goal"] = "compress"
    Plan.objects.filter(pk=plan.pk).update(draft=plan.draft)

    assert "A compression has no limit to search for" in tab(alice, plan)


def test_another_team_finds_no_such_tab(charlie, plan):
    assert client_of(charlie).get(f"/plans/{plan.pk}/limits/").status_code == 404


@pytest.mark.parametrize("goal", GOALS)
def test_a_question_suits_the_works_that_it_names(goal):
    assert suited(goal) == tuple(each for each in QUESTIONS if goal in each.goals)
