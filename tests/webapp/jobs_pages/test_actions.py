"""Stop, clone, delete: who may, and what comes of it."""

import pytest

from tests.webapp.conftest import client_of
from webapp.jobs.models import Job, JobState

pytestmark = pytest.mark.django_db(databases=["default", "metrics"])
ACTIONS = ["stop", "clone", "delete"]


def press(user, job, action):
    return client_of(user).post(f"/jobs/{job.pk}/{action}/")


def test_the_owner_stops_a_running_job(alice, running):
    assert press(alice, running, "stop").status_code == 302
    running.refresh_from_db()
    assert (running.state, running.reason) == (JobState.STOPPING, "stopped_by_user")


def test_an_operator_stops_anyones_job_and_it_is_noted(olga, running):
    press(olga, running, "stop")
    running.refresh_from_db()
    assert (running.state, running.reason) == (JobState.STOPPING, "stopped_by_operator")


def test_stopping_what_has_ended_is_said_and_changes_nothing(alice, finished):
    client = client_of(alice)
    page = client.post(f"/jobs/{finished.pk}/stop/", follow=True).content.decode()
    assert "is succeeded; nothing runs" in page


def test_a_job_that_runs_again_is_queued_as_the_persons_own(bob, finished):
    where = press(bob, finished, "run-again")["Location"]
    copy = Job.objects.exclude(pk=finished.pk).get()
    assert where == f"/jobs/{copy.pk}/"
    assert (copy.owner, copy.spec, copy.state) == (bob, finished.spec, JobState.PREFLIGHT)


def test_a_deleted_job_is_as_if_it_did_not_exist(alice, finished):
    assert press(alice, finished, "delete")["Location"] == "/jobs/"
    assert client_of(alice).get(f"/jobs/{finished.pk}/").status_code == 404


def test_a_running_job_cannot_be_deleted(alice, running):
    page = client_of(alice).post(f"/jobs/{running.pk}/delete/", follow=True).content.decode()
    assert "stop it first" in page
    assert Job.objects.get(pk=running.pk).deleted_at is None


@pytest.mark.parametrize("action", ["stop", "delete"])
def test_a_colleague_cannot_end_or_delete_someone_elses_job(bob, running, action):
    assert press(bob, running, action).status_code == 403


@pytest.mark.parametrize("action", ACTIONS)
def test_a_viewer_only_looks(vera, running, action):
    assert press(vera, running, action).status_code == 403


@pytest.mark.parametrize("action", ACTIONS)
def test_for_another_team_the_job_does_not_exist(charlie, running, action):
    assert press(charlie, running, action).status_code == 404


@pytest.mark.parametrize("action", ACTIONS)
def test_actions_are_never_done_by_following_a_link(alice, running, action):
    assert client_of(alice).get(f"/jobs/{running.pk}/{action}/").status_code == 405


@pytest.mark.parametrize("tab", ["", "metrics/", "logs/", "events/", "config/", "artefacts/"])
def test_another_team_sees_no_page_of_the_job(charlie, running, tab):
    assert client_of(charlie).get(f"/jobs/{running.pk}/{tab}").status_code == 404


def test_a_colleague_and_a_viewer_see_the_job(bob, vera, running):
    for user in (bob, vera):
        assert client_of(user).get(f"/jobs/{running.pk}/").status_code == 200


def test_who_is_not_signed_in_is_sent_to_the_log_in_page(client, running):
    response = client.get(f"/jobs/{running.pk}/")
    assert response["Location"].startswith("/login/")


def test_buttons_are_only_shown_to_those_who_may_press_them(alice, vera, running):
    path = f"/jobs/{running.pk}/"
    assert f"{path}stop/" in client_of(alice).get(path).content.decode()
    assert f"{path}stop/" not in client_of(vera).get(path).content.decode()
