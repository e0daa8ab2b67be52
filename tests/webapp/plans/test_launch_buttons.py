"""The buttons of a plan: who may press them, by which method, and that twice is once."""

import pytest

from tests.webapp.conftest import client_of
from webapp.jobs.models import Job
from webapp.plans.launching import plan_launch
from webapp.plans.models import Plan

pytestmark = pytest.mark.django_db(databases="__all__")


def test_no_button_works_by_a_link_or_for_a_viewer_a_stranger_or_another_team(
    demo_plan, alice, charlie, vera, client
):
    owner, foreign, viewer = (client_of(one) for one in (alice, charlie, vera))
    for button in ("launch/", "compute/", "delete/"):
        url = f"/plans/{demo_plan.pk}/{button}"
        assert owner.get(url).status_code in {404, 405}, button
        assert foreign.post(url).status_code == 404, button
        assert viewer.post(url).status_code == 403, button
        assert not Job.objects.exists(), button
    for button in ("launch/", "compute/", "delete/", "", "why/"):
        status = client.post(f"/plans/{demo_plan.pk}/{button}").status_code
        assert status in {302, 404, 405}, button
        assert Plan.objects.exists(), button


def test_any_key_of_a_launch_is_taken(demo_plan, alice):
    client = client_of(alice)
    for number, key in enumerate(("", "x", "k" * 500, "'; --"), 1):
        client.post(f"/plans/{demo_plan.pk}/launch/", {"go": "launch", "key": key})
        assert Job.objects.count() == number, key


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
