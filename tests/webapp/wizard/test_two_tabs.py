"""One draft in two tabs, or with two people: no write is lost unseen."""

import pytest

from planner import api
from tests.webapp.conftest import client_of
from webapp.plans.models import Plan
from webapp.wizard.drafts import serve_document, stored_draft


@pytest.fixture
def plan(team, alice, host) -> Plan:
    draft = stored_draft(serve_document(host))
    draft["model"] = {"source": "demo", "catalog_id": "meta-llama/Llama-3.1-8B"}
    draft["workload"] |= {"input_tokens": 128, "output_tokens": 64}
    return Plan.objects.create(team=team, owner=alice, draft=draft)


def opened(client, plan: Plan, step: str = "workload") -> dict:
    page = client.get(f"/plans/{plan.pk}/edit/{step}/").context
    known = {field.html_name: field.value() for field in page["form"]}
    known = {
        name: value for name, value in known.items() if value is not None and value is not False
    }
    return known | {"seen": page["seen"], "page": page["page"]}


def autosave(client, plan: Plan, form: dict, step: str = "workload") -> str:
    address = f"/plans/{plan.pk}/verdict/?step={step}"
    answer = client.post(address, form, headers={"HX-Request": "true"})
    assert answer.status_code == 200
    return answer.content.decode()


def people(plan: Plan) -> int:
    plan.refresh_from_db()
    return plan.draft["workload"]["concurrency"]


def test_a_tab_may_write_again_over_what_it_wrote_and_the_other_window_may_not(alice, plan):
    client = client_of(alice)
    form = opened(client, plan)
    for number in ("2", "3", "4"):
        assert "Not saved" not in autosave(client, plan, form | {"concurrency": number})
    assert people(plan) == 4

    old, new = opened(client, plan), opened(client, plan)
    autosave(client, plan, new | {"concurrency": "7"})
    assert "you, in another window" in autosave(client, plan, old | {"concurrency": "3"})


def test_a_request_that_a_later_one_of_its_page_overtook_writes_nothing(alice, plan):
    client = client_of(alice)
    form = opened(client, plan)
    autosave(client, plan, form | {"concurrency": "7", "turn": "4"})

    text = autosave(client, plan, form | {"concurrency": "3", "turn": "2"})

    assert people(plan) == 7
    assert "Not saved" not in text
    assert "7 requests" in text


def test_an_autosave_that_arrives_after_its_pages_button_leaves_the_revision(alice, plan):
    client = client_of(alice)
    form = opened(client, plan) | {"concurrency": "7", "turn": "2"}
    client.post(f"/plans/{plan.pk}/edit/workload/", form | {"go": "next"})
    plan.refresh_from_db()
    before = plan.revision

    autosave(client, plan, form)

    assert people(plan) == 7
    assert plan.revision == before


def test_a_turn_that_is_no_number_counts_as_none(alice, plan):
    for turn in ["", "-1", "x", "\N{SUPERSCRIPT TWO}", "9" * 40, "1e9"]:
        client = client_of(alice)
        form = opened(client, plan)
        autosave(client, plan, form | {"concurrency": "7", "turn": turn})
        autosave(client, plan, form | {"concurrency": "3", "turn": "0"})
        assert people(plan) == 3, turn


def test_an_older_tab_is_told_who_changed_the_step(alice, bob, plan):
    mine, theirs = client_of(alice), client_of(bob)
    old, new = opened(mine, plan), opened(theirs, plan)
    autosave(theirs, plan, new | {"concurrency": "7"})

    text = autosave(mine, plan, old | {"concurrency": "3"})

    assert "The workload of this draft was changed by bob" in text
    assert "since you opened this page" in text
    assert people(plan) == 7


def test_the_pages_button_is_refused_too_and_keeps_what_was_typed(alice, bob, plan):
    client = client_of(alice)
    old = opened(client, plan)
    autosave(client_of(bob), plan, opened(client, plan) | {"concurrency": "7"})

    answer = client.post(f"/plans/{plan.pk}/edit/workload/", old | {"concurrency": "3"})

    assert answer.status_code == 409
    assert 'name="concurrency" value="3"' in answer.content.decode()
    assert people(plan) == 7


def test_a_person_may_save_theirs_over_it(alice, bob, plan):
    client = client_of(alice)
    old = opened(client, plan)
    autosave(client_of(bob), plan, opened(client, plan) | {"concurrency": "7"})

    answer = client.post(
        f"/plans/{plan.pk}/edit/workload/", old | {"concurrency": "3", "over": "1"}
    )

    assert answer.status_code == 302
    assert people(plan) == 3


def test_two_people_on_two_steps_lose_nothing(alice, bob, plan):
    mine, theirs = client_of(alice), client_of(bob)
    workload, goal = opened(mine, plan), opened(theirs, plan, "goal")

    autosave(mine, plan, workload | {"concurrency": "3"})
    autosave(theirs, plan, goal | {"objective": "cost"}, "goal")

    assert people(plan) == 3
    assert plan.draft["objective"] == "cost"


def test_a_write_between_reading_and_storing_is_kept_as_well(alice, bob, plan, monkeypatch):
    """The planner takes its time; bob's step arrives while alice's is planned."""
    mine, theirs = client_of(alice), client_of(bob)
    workload, goal = opened(mine, plan), opened(theirs, plan, "goal")
    search, between = api.best_plan, []

    def slow(request):
        if not between:
            between.append(True)
            autosave(theirs, plan, goal | {"objective": "cost"}, "goal")
        return search(request)

    monkeypatch.setattr(api, "best_plan", slow)
    autosave(mine, plan, workload | {"concurrency": "3"})

    assert people(plan) == 3
    assert plan.draft["objective"] == "cost"


def test_a_form_of_another_goal_is_not_taken(alice, plan):
    """One tab chose another goal since: this one's fields belong to no step any more."""
    client = client_of(alice)
    old = opened(client, plan)
    autosave(client, plan, opened(client, plan, "goal") | {"goal": "compress"}, "goal")
    assert "Not saved" in autosave(client, plan, old | {"concurrency": "3"})


def test_a_chip_of_an_older_verdict_is_not_taken(alice, plan):
    client = client_of(alice)
    old = plan.revision
    autosave(client, plan, opened(client, plan) | {"concurrency": "3"})
    before = Plan.objects.get(pk=plan.pk).draft

    client.post(f"/plans/{plan.pk}/suggestion/", {"suggestion": "0", "revision": str(old)})

    assert Plan.objects.get(pk=plan.pk).draft == before
