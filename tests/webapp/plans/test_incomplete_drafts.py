"""A plan whose draft lacks something is told so on every page, and can be completed."""

import pytest

from tests.webapp.conftest import client_of
from webapp.plans.errors import DraftProblem, completed, missing_step, refuse_incomplete
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute, plan_keep
from webapp.wizard.drafts import serve_draft
from webapp.wizard.steps import SLUGS

pytestmark = pytest.mark.django_db(databases="__all__")
WHOLE = serve_draft(None)
BROKEN = {
    "nothing": {},
    "only a goal": {"goal": WHOLE["goal"]},
    "an empty goal": {**WHOLE, "goal": {}},
    "a goal that is gone": {
        **WHOLE,
        "goal": {"goal": "paint", "objective": "cost", "slo": "none"},
    },
    "no workload of the goal": {**WHOLE, "workload": {"train": {}}},
    "a list for a step": {**WHOLE, "hardware": ["rtx-4090"]},
    "no pins": {name: value for name, value in WHOLE.items() if name != "pins"},
}
PAGES = ["", "alternatives/", "why/", "exports/", "history/", "offers/", "verdict/"]
PAGES += [f"edit/{slug}/" for slug in SLUGS]


@pytest.fixture
def broken_plans(team, alice) -> dict[str, Plan]:
    """A plan of each broken draft."""
    make = Plan.objects.create
    return {what: make(team=team, owner=alice, draft=draft) for what, draft in BROKEN.items()}


def test_every_page_of_it_answers_and_its_own_says_what_is_missing(alice, broken_plans):
    client, wrong = client_of(alice), []
    for what, plan in broken_plans.items():
        text = client.get(f"/plans/{plan.pk}/").content.decode()
        said = f"has no value for its {missing_step(plan.draft)} yet"
        if "Not planned yet" not in text or said not in text:
            wrong.append((what, said))
        for page in PAGES:
            status = client.get(f"/plans/{plan.pk}/{page}").status_code
            if status != 200:
                wrong.append((what, page, status))
    assert not wrong, wrong


def test_its_page_says_so_even_where_an_older_answer_is_stored(alice, serve_plan):
    plan_compute(serve_plan)
    Plan.objects.filter(pk=serve_plan.pk).update(draft={})
    page = client_of(alice).get(f"/plans/{serve_plan.pk}/").content.decode()
    assert "has no value for its goal yet" in page


def test_going_through_the_wizard_completes_it(alice, broken_plans):
    client = client_of(alice)
    goal = {"goal": "serve", "objective": "cost", "slo": "none", "go": "next"}
    for what, plan in broken_plans.items():
        answer = client.post(f"/plans/{plan.pk}/edit/goal/", goal)
        plan.refresh_from_db()
        assert answer.status_code == 302, what
        assert missing_step(plan.draft) == "", what
        assert plan.answer["plans"], what


@pytest.mark.parametrize("action", ["launch", "compute", "suggestion", "delete"])
def test_no_button_fails_on_it(alice, broken_plans, action):
    client = client_of(alice)
    for what, plan in broken_plans.items():
        answer = client.post(f"/plans/{plan.pk}/{action}/", {"suggestion": "0"})
        assert answer.status_code == 302, what


def test_the_api_refuses_it_by_the_step_that_is_missing_and_keeping_it_names_it(
    alice, broken_plans
):
    client, wrong = client_of(alice), []
    for what, plan in broken_plans.items():
        for path in ("exports", "exports/vllm", "limits/most_users"):
            answer = client.get(f"/api/v1/plans/{plan.pk}/{path}")
            if (
                answer.status_code != 422
                or missing_step(plan.draft) not in answer.json()["detail"]
            ):
                wrong.append((what, path, answer.content))
        if (name := plan_keep(plan).name) != "Unfinished plan":
            wrong.append((what, name))
    assert not wrong, wrong


def test_a_refusal_names_the_step_that_a_draft_lacks():
    assert missing_step(WHOLE) == ""
    refuse_incomplete(WHOLE)

    with pytest.raises(DraftProblem) as caught:
        refuse_incomplete({**WHOLE, "hardware": None})
    assert caught.value.field == "hardware"

    def around():
        yield

    with pytest.raises(DraftProblem), around():
        refuse_incomplete({})


def test_what_a_draft_has_stays_when_it_is_completed():
    own = {"goal": {"goal": "generate"}, "workload": {"generate": {"batch_size": 7}}}

    found = completed(own, WHOLE)

    shown = {"objective": "balanced", "slo": "chat", "percentile": "p95"}
    assert found["goal"] == {"goal": "generate", **shown}
    assert found["workload"]["generate"]["batch_size"] == 7
    assert found["workload"]["generate"]["input_tokens"] == 1024
