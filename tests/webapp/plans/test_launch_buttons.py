"""The buttons of a plan: who may press them, by which method, and that twice is once."""

import pytest

from tests.webapp.conftest import client_of
from webapp.jobs.models import Job
from webapp.plans.launching import plan_launch
from webapp.plans.models import Plan

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.mark.parametrize("button", ["launch", "compute", "delete"])
def test_no_button_is_pressed_by_following_a_link(demo_plan, alice, button):
    assert client_of(alice).get(f"/plans/{demo_plan.pk}/{button}/").status_code in {404, 405}


@pytest.mark.parametrize("button", ["launch", "compute", "delete"])
def test_no_button_works_on_another_teams_plan(demo_plan, charlie, button):
    assert client_of(charlie).post(f"/plans/{demo_plan.pk}/{button}/").status_code == 404


@pytest.mark.parametrize("button", ["launch", "compute", "delete"])
def test_a_viewer_presses_no_button(demo_plan, vera, button):
    assert client_of(vera).post(f"/plans/{demo_plan.pk}/{button}/").status_code == 403


@pytest.mark.parametrize("button", ["launch/", "compute/", "delete/", "", "why/"])
def test_who_is_not_signed_in_is_sent_to_sign_in(demo_plan, client, button):
    assert client.post(f"/plans/{demo_plan.pk}/{button}").status_code in {302, 404, 405}
    assert Plan.objects.exists()


@pytest.mark.parametrize("key", ["", "x", "k" * 500, "'; --"])
def test_any_key_of_a_launch_is_taken(demo_plan, alice, key):
    client_of(alice).post(f"/plans/{demo_plan.pk}/launch/", {"go": "launch", "key": key})

    assert Job.objects.count() == 1


def test_a_key_that_another_team_used_is_refused_in_words(demo_plan, alice, draft, other_team):
    Job.objects.filter(pk=draft.pk).update(idempotency_key="same", team=other_team)
    data = {"go": "launch", "key": "same"}

    page = client_of(alice).post(f"/plans/{demo_plan.pk}/launch/", data, follow=True)

    assert "used before" in page.content.decode()
    assert Job.objects.count() == 1


def test_two_presses_at_the_same_instant_launch_once(demo_plan, alice, monkeypatch):
    """The second press looked for the key before the first one had stored its job."""
    job = plan_launch(plan=demo_plan, by=alice, idempotency_key="same")
    real, calls = Job.objects.filter, []

    def late(**fields):
        calls.append(fields)
        return Job.objects.none() if len(calls) == 1 else real(**fields)

    monkeypatch.setattr(Job.objects, "filter", late)

    assert plan_launch(plan=demo_plan, by=alice, idempotency_key="same").pk == job.pk
