"""A plan whose draft lacks something is told so on every page, and can be completed."""

import contextlib

import pytest

from tests.webapp.conftest import client_of
from webapp.plans.errors import DraftProblem, completed, missing_step, refuse_incomplete
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute, plan_keep
from webapp.wizard.drafts import serve_draft
from webapp.wizard.steps import SLUGS

pytestmark = pytest.mark.django_db
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


@pytest.fixture(params=BROKEN)
def broken(request, team, alice) -> Plan:
    return Plan.objects.create(team=team, owner=alice, draft=BROKEN[request.param])


def test_every_page_of_it_answers(alice, broken):
    client = client_of(alice)

    assert {page: client.get(f"/plans/{broken.pk}/{page}").status_code for page in PAGES} == (
        dict.fromkeys(PAGES, 200)
    )


def test_its_page_says_what_is_missing_and_the_way_out(alice, broken):
    page = client_of(alice).get(f"/plans/{broken.pk}/").content.decode()

    assert "Not planned yet" in page
    assert f"has no value for its {missing_step(broken.draft)} yet" in page


def test_its_page_says_so_even_where_an_older_answer_is_stored(alice, serve_plan):
    plan_compute(serve_plan)
    Plan.objects.filter(pk=serve_plan.pk).update(draft={})

    page = client_of(alice).get(f"/plans/{serve_plan.pk}/").content.decode()

    assert "has no value for its goal yet" in page


def test_going_through_the_wizard_completes_it(alice, broken):
    client = client_of(alice)
    goal = {"goal": "serve", "objective": "cost", "slo": "none", "go": "next"}

    answer = client.post(f"/plans/{broken.pk}/edit/goal/", goal)

    broken.refresh_from_db()
    assert answer.status_code == 302
    assert missing_step(broken.draft) == ""
    assert broken.answer["plans"]


@pytest.mark.parametrize("action", ["launch", "compute", "suggestion", "delete"])
def test_no_button_fails_on_it(alice, broken, action):
    answer = client_of(alice).post(f"/plans/{broken.pk}/{action}/", {"suggestion": "0"})

    assert answer.status_code == 302


@pytest.mark.parametrize("path", ["exports", "exports/vllm", "limits/most_users"])
def test_the_api_refuses_it_by_the_step_that_is_missing(alice, broken, path):
    answer = client_of(alice).get(f"/api/v1/plans/{broken.pk}/{path}")

    assert answer.status_code == 422
    assert missing_step(broken.draft) in answer.json()["detail"]


def test_keeping_it_gives_it_a_name(broken):
    assert plan_keep(broken).name == "Unfinished plan"


def test_a_whole_draft_lacks_nothing():
    assert missing_step(WHOLE) == ""
    refuse_incomplete(WHOLE)


def test_a_refusal_names_the_step_as_its_field():
    with pytest.raises(DraftProblem) as caught:
        refuse_incomplete({**WHOLE, "hardware": None})

    assert caught.value.field == "hardware"


def test_a_refusal_passes_through_a_context_manager():
    @contextlib.contextmanager
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
