"""Stop, clone, delete: who may, and what comes of it."""

import html

import pytest

from runners.plans.launch import Launch
from tests.webapp.conftest import client_of
from webapp.accounts.secrets import secret_store
from webapp.hosts.models import Host
from webapp.jobs.launching import plan_launch
from webapp.jobs.models import Attempt, Job, JobState
from webapp.plans.models import Plan
from webapp.plans.planning import plan_keep
from webapp.wizard.drafts import demo_document, stored_draft

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
    assert "is succeeded, so it cannot be stopped" in page


def test_a_job_that_runs_again_is_queued_as_the_persons_own(bob, finished):
    where = press(bob, finished, "run-again")["Location"]
    copy = Job.objects.exclude(pk=finished.pk).get()
    assert where == f"/jobs/{copy.pk}/"
    assert (copy.owner, copy.spec, copy.state) == (bob, finished.spec, JobState.PREFLIGHT)


def test_a_stopped_job_is_resumed_on_its_host_as_the_persons_own(bob, running, host):
    Job.objects.filter(pk=running.pk).update(state="stopped", requested_host=None)
    assert "Resume</button>" in client_of(bob).get(f"/jobs/{running.pk}/").content.decode()
    where = press(bob, running, "resume")["Location"]
    resumed = Job.objects.exclude(pk=running.pk).get()
    assert where == f"/jobs/{resumed.pk}/"
    assert (resumed.owner, resumed.requested_host) == (bob, host)
    assert resumed.spec == {**running.spec, "resume_from": running.pk}
    assert resumed.name == f"{running.name} (resumed)"
    page = client_of(bob).get(where).content.decode()
    assert f'resumes <a href="/jobs/{running.pk}/">' in page
    Job.objects.filter(pk=resumed.pk).update(state="failed")
    press(bob, resumed, "run-again")
    again = Job.objects.order_by("created_at").last()
    assert again.spec == {**running.spec, "resume_from": ""}


def test_what_cannot_be_resumed_is_said_and_offered_nowhere(alice, running, host):
    client = client_of(alice)
    for changes, words in (
        (
            {"state": "running"},
            "is running, and a job is resumed when it has ended. Stop it first",
        ),
        ({"state": "succeeded"}, "has done all that it was to do. Run it again from the start."),
        ({"kind": "benchmark"}, "is of the kind benchmark, which leaves nothing to go on from"),
        ({"started": None}, "never started"),
        ({"host": "retired"}, f"ran on {host.name}, which is retired"),
    ):
        Job.objects.filter(pk=running.pk).update(
            **{"state": "stopped", "kind": "train", "num_hosts": 1}
            | {name: value for name, value in changes.items() if name not in {"started", "host"}}
        )
        Attempt.objects.filter(job=running).update(
            started_at=None if "started" in changes else running.created_at
        )
        Host.objects.filter(pk=host.pk).update(state=changes.get("host", "ready"))
        page = client.post(f"/jobs/{running.pk}/resume/", follow=True).content.decode()
        assert words in html.unescape(page), changes
        assert "Resume</button>" not in page, changes
    assert Job.objects.count() == 1


def test_a_training_on_two_hosts_goes_on_on_both_or_on_the_one_that_is_left(
    alice, running, host, other_host
):
    client, first = client_of(alice), Attempt.objects.get(job=running)
    Host.objects.filter(pk=other_host.pk).update(pool=host.pool, name="Other")
    layout = {"data_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 1}
    Job.objects.filter(pk=running.pk).update(
        state="stopped", num_hosts=2, requested_host=None, spec={**running.spec, "layout": layout}
    )
    Attempt.objects.create(
        job=running, host=other_host, number=first.number, node_rank=1, fence="f", leader=first,
        started_at=running.created_at,
    )  # fmt: skip

    def resumed(posted, kept):
        for rank, size in enumerate(kept):
            Attempt.objects.filter(job=running, node_rank=rank).update(
                checkpoint_bytes=size, started_at=running.created_at
            )
        page = client.post(f"/jobs/{running.pk}/resume/", posted, follow=True).content.decode()
        new = Job.objects.exclude(pk=running.pk).first()
        Job.objects.exclude(pk=running.pk).delete()
        return html.unescape(page), new

    assert 'name="num_hosts"' in client.get(f"/jobs/{running.pk}/").content.decode()
    for posted, kept, expected in (
        ({}, (5, 5), (2, None, layout)),
        ({"num_hosts": "2"}, (0, 5), (2, None, layout)),
        ({"num_hosts": "1"}, (5, 5), (1, host.pk, {**layout, "data_parallel_size": 1})),
        ({"num_hosts": "1"}, (0, 5), (1, other_host.pk, {**layout, "data_parallel_size": 1})),
    ):
        _, new = resumed(posted, kept)
        found = {name: new.spec["layout"][name] for name in layout}
        assert (new.num_hosts, new.requested_host_id, found) == expected, posted
        assert (new.spec["resume_from"], bool(new.prediction)) == (
            running.pk, new.num_hosts == 2 and bool(running.prediction)
        ), posted  # fmt: skip
    for posted, kept, words in (
        ({}, (0, 0), f"keeps no checkpoint on {host.name} and Other"),
        ({"num_hosts": "3"}, (5, 5), "num_hosts is 3: pool"),
        ({"num_hosts": "x"}, (5, 5), "num_hosts is 'x': choose a whole number"),
    ):
        page, new = resumed(posted, kept)
        assert (words in page, new) == (True, None), posted
    copies = {"data_parallel_size": 2, "zero_stage": 1}
    Job.objects.filter(pk=running.pk).update(spec={**running.spec, "layout": copies})
    assert resumed({"num_hosts": "1"}, (5, 5))[1].spec["layout"] is None  # of a single process
    layout["tensor_parallel_size"], layout["data_parallel_size"] = 4, 1
    Job.objects.filter(pk=running.pk).update(spec={**running.spec, "layout": layout})
    page, new = resumed({"num_hosts": "1"}, (5, 5))
    assert ("a copy of the model takes 4 ranks in its layout" in page, new) == (True, None)


def test_a_deleted_job_is_as_if_it_did_not_exist(alice, finished):
    assert press(alice, finished, "delete")["Location"] == "/jobs/"
    assert client_of(alice).get(f"/jobs/{finished.pk}/").status_code == 404


def test_a_running_job_cannot_be_deleted(alice, running):
    page = client_of(alice).post(f"/jobs/{running.pk}/delete/", follow=True).content.decode()
    assert "stop it first" in page
    assert Job.objects.get(pk=running.pk).deleted_at is None


def test_a_colleague_cannot_end_or_delete_someone_elses_job(bob, running):
    for action in ["stop", "delete"]:
        assert press(bob, running, action).status_code == 403, action


def test_a_viewer_only_looks(vera, running):
    for action in ACTIONS:
        assert press(vera, running, action).status_code == 403, action


def test_for_another_team_the_job_does_not_exist(charlie, running):
    for action in ACTIONS:
        assert press(charlie, running, action).status_code == 404, action
    for tab in ["", "metrics/", "logs/", "events/", "config/", "artefacts/"]:
        assert client_of(charlie).get(f"/jobs/{running.pk}/{tab}").status_code == 404, tab


def test_actions_are_never_done_by_following_a_link(alice, running):
    for action in ACTIONS:
        assert client_of(alice).get(f"/jobs/{running.pk}/{action}/").status_code == 405, action


def test_the_team_sees_the_job_with_the_buttons_that_each_may_press(
    alice, bob, vera, client, running
):
    path = f"/jobs/{running.pk}/"
    for user in (bob, vera):
        assert client_of(user).get(path).status_code == 200
    assert f"{path}stop/" in client_of(alice).get(path).content.decode()
    assert f"{path}stop/" not in client_of(vera).get(path).content.decode()
    assert client.get(path)["Location"].startswith("/login/")


# Clone opens the wizard with everything filled in; only a second press launches.


@pytest.fixture
def plan(team, alice, host) -> Plan:
    return Plan.objects.create(team=team, owner=alice, draft=stored_draft(demo_document(host)))


@pytest.fixture
def launched(plan, alice, team, olga) -> Job:
    secret_store(team=team, name="HF_TOKEN", value="hf_0123456789", by=olga)
    launch = Launch(
        max_duration_seconds=5400.0, max_retries=2, priority="low", secrets=["HF_TOKEN"]
    )
    return plan_launch(plan=plan, by=alice, name="First", launch=launch)


def cloned(client, job: Job) -> tuple[str, Plan]:
    before = set(Plan.objects.values_list("pk", flat=True))
    location = client.post(f"/jobs/{job.pk}/clone/")["Location"]
    made = Plan.objects.exclude(pk__in=before).first()
    return location, made


def test_a_clone_launches_nothing_and_is_one_draft_with_everything_filled_in(bob, launched):
    client = client_of(bob)
    location, draft = cloned(client, launched)
    assert location == f"/plans/{draft.pk}/edit/review/"
    assert Job.objects.count() == 1
    assert (draft.base, draft.owner) == (launched.plan, bob)
    text = " ".join(client.get(location).content.decode().split())
    assert 'value="low" selected' in text
    assert 'value="2" selected' in text
    assert 'name="max_duration_seconds" value="1.5"' in text
    assert 'name="secrets" value="HF_TOKEN"' in text
    assert f'<a href="/jobs/{launched.pk}/">First</a>' in text
    assert cloned(client, launched) == (location, None)


def test_launching_an_unchanged_clone_runs_the_same_version(bob, launched):
    client = client_of(bob)
    location, draft = cloned(client, launched)
    title = client.get(location).context["title"]
    client.post(f"/plans/{draft.pk}/launch/", {"run": "job", "name": title, "proposed": title})
    again = Job.objects.exclude(pk=launched.pk).get()
    assert (again.plan, again.owner) == (launched.plan, bob)
    assert again.spec["kind"] == launched.spec["kind"]


def test_a_changed_clone_is_the_next_version(alice, launched):
    client = client_of(alice)
    _, draft = cloned(client, launched)
    draft.draft["workload"]["sequence_length"] = 64
    draft.save()
    client.post(f"/plans/{draft.pk}/launch/", {"run": "job"})
    again = Job.objects.exclude(pk=launched.pk).get()
    assert (again.plan.version, again.plan.base) == (2, launched.plan)
    assert "launch" not in again.plan.draft


def test_a_clone_is_of_the_version_that_ran_and_not_of_the_latest(alice, launched):
    newer = Plan.objects.get(pk=launched.plan_id)
    client = client_of(alice)
    client.get(f"/plans/{newer.pk}/edit/goal/")
    draft = Plan.objects.get(base=newer)
    draft.draft["workload"]["sequence_length"] = 64
    draft.save()
    plan_keep(draft)

    _, copy = cloned(client, launched)

    assert copy.base == newer
    assert copy.draft["workload"] == newer.draft["workload"]


def test_a_viewer_may_not(vera, launched):
    assert client_of(vera).post(f"/jobs/{launched.pk}/clone/").status_code == 403
    assert client_of(vera).post(f"/jobs/{launched.pk}/run-again/").status_code == 403


def test_a_job_without_a_plan_is_shown_before_it_runs_again(bob, job):
    client = client_of(bob)
    page = client.post(f"/jobs/{job.pk}/clone/", follow=True)
    assert page.redirect_chain[-1][0] == f"/jobs/{job.pk}/run-again/"
    assert "Nothing is launched until you confirm" in page.content.decode()
    assert Job.objects.count() == 1
    client.post(f"/jobs/{job.pk}/run-again/")
    assert Job.objects.exclude(pk=job.pk).get().spec == job.spec
