"""What scripts ask about a plan: exports and limits."""

import pytest

from tests.webapp.conftest import client_of
from webapp.plans.models import Plan
from webapp.plans.planning import current_answer
from webapp.wizard.drafts import serve_draft

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def served(team, alice, host) -> Plan:
    draft = serve_draft(host)
    draft["model"] = {"source": "demo", "catalog_id": "meta-llama/Llama-3.1-8B"}
    return Plan.objects.create(team=team, owner=alice, name="serve", draft=draft)


def get(user, plan, path: str):
    return client_of(user).get(f"/api/v1/plans/{plan.pk}/{path}")


def test_the_formats_of_a_plan_are_those_of_its_answer(alice, served):
    found = get(alice, served, "exports").json()

    assert found["plan"] == served.pk
    assert [one["key"] for one in found["formats"]] == list(
        current_answer(served).plans[0].exports
    )


def test_an_export_comes_with_its_notes_and_its_measure(alice, served):
    found = get(alice, served, "exports/llama_cpp").json()

    assert "llama-server" in found["text"]
    assert any("convert_hf_to_gguf.py" in note for note in found["notes"])
    assert "CLAIM" in found["measure"]


def test_a_format_that_cannot_say_the_plan_is_not_found_with_those_that_can(alice, served):
    answer = get(alice, served, "exports/deepspeed")

    assert answer.status_code == 404
    assert "choose among" in answer.json()["detail"]


def test_a_limit_is_a_number_with_what_lies_beyond(alice, served):
    found = get(alice, served, "limits/longest_context").json()

    assert found["limits"][0]["unit"] == "tokens"
    assert found["limits"][0]["beyond"]["value"] > found["limits"][0]["value"]


def test_a_question_that_does_not_suit_the_work_is_refused_in_words(alice, served):
    answer = get(alice, served, "limits/longest_sequence")

    assert answer.status_code == 422
    assert "is a question about train" in answer.json()["detail"]


def test_a_question_that_is_none_is_refused_by_name(alice, served):
    answer = get(alice, served, "limits/meaning_of_life")

    assert answer.status_code == 422
    assert "question" in answer.json()["detail"]


def test_a_draft_that_cannot_be_planned_says_why(alice, served):
    served.draft["hardware"] |= {"choice": "catalog", "device": "a-card-of-yesterday"}
    served.save()
    answer = get(alice, served, "exports")

    assert answer.status_code == 422
    assert "a-card-of-yesterday" in answer.json()["detail"]


@pytest.mark.parametrize("path", ["exports", "exports/vllm", "limits/most_users"])
def test_another_team_is_told_nothing(charlie, served, path):
    assert get(charlie, served, path).status_code == 404
