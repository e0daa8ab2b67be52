"""Clone opens the wizard with everything filled in; only a second press launches."""

import pytest

from tests.webapp.conftest import client_of
from webapp.accounts.secrets import secret_store
from webapp.jobs.models import Job, Priority
from webapp.plans.launching import LaunchOptions, plan_launch
from webapp.plans.models import Plan
from webapp.plans.planning import plan_keep
from webapp.wizard.drafts import demo_draft


@pytest.fixture
def plan(team, alice, host) -> Plan:
    return Plan.objects.create(team=team, owner=alice, draft=demo_draft(host))


@pytest.fixture
def launched(plan, alice, team, olga) -> Job:
    secret_store(team=team, name="HF_TOKEN", value="hf_0123456789", by=olga)
    wish = LaunchOptions(max_duration_seconds=5400.0, max_retries=2, priority=Priority.LOW)
    return plan_launch(plan=plan, by=alice, name="First", secrets=["HF_TOKEN"], wish=wish)


def cloned(client, job: Job) -> tuple[str, Plan]:
    before = set(Plan.objects.values_list("pk", flat=True))
    location = client.post(f"/jobs/{job.pk}/clone/")["Location"]
    made = Plan.objects.exclude(pk__in=before).first()
    return location, made


def test_a_clone_launches_nothing(bob, launched):
    location, draft = cloned(client_of(bob), launched)

    assert location == f"/plans/{draft.pk}/edit/review/"
    assert Job.objects.count() == 1
    assert (draft.base, draft.owner) == (launched.plan, bob)


def test_everything_is_filled_in(bob, launched):
    client = client_of(bob)
    location, _ = cloned(client, launched)
    text = " ".join(client.get(location).content.decode().split())

    assert 'value="-1" selected' in text
    assert 'value="2" selected' in text
    assert 'name="hours" inputmode="decimal" autocomplete="off" value="1.5"' in text
    assert 'name="secret" value="HF_TOKEN" checked' in text
    assert f'<a href="/jobs/{launched.pk}/">First</a>' in text


def test_launching_an_unchanged_clone_runs_the_same_version(bob, launched):
    client = client_of(bob)
    location, draft = cloned(client, launched)
    title = client.get(location).context["title"]

    client.post(f"/plans/{draft.pk}/launch/", {"go": "launch", "name": title, "proposed": title})

    again = Job.objects.exclude(pk=launched.pk).get()
    assert (again.plan, again.owner) == (launched.plan, bob)
    assert again.spec["kind"] == launched.spec["kind"]


def test_a_changed_clone_is_the_next_version(alice, launched):
    client = client_of(alice)
    _, draft = cloned(client, launched)
    draft.draft["workload"]["pretrain"]["sequence_length"] = 64
    draft.save()

    client.post(f"/plans/{draft.pk}/launch/", {"go": "launch"})

    again = Job.objects.exclude(pk=launched.pk).get()
    assert (again.plan.version, again.plan.base) == (2, launched.plan)
    assert "launch" not in again.plan.draft


def test_a_clone_is_of_the_version_that_ran_and_not_of_the_latest(alice, launched):
    newer = Plan.objects.get(pk=launched.plan_id)
    client = client_of(alice)
    client.get(f"/plans/{newer.pk}/edit/goal/")
    draft = Plan.objects.get(base=newer)
    draft.draft["workload"]["pretrain"]["sequence_length"] = 64
    draft.save()
    plan_keep(draft)

    _, copy = cloned(client, launched)

    assert copy.base == newer
    assert copy.draft["workload"] == newer.draft["workload"]


def test_pressing_twice_makes_one_draft(alice, launched):
    client = client_of(alice)
    first, _ = cloned(client, launched)
    second, made = cloned(client, launched)

    assert (first, made) == (second, None)


def test_a_viewer_may_not(vera, launched):
    assert client_of(vera).post(f"/jobs/{launched.pk}/clone/").status_code == 403
    assert client_of(vera).post(f"/jobs/{launched.pk}/run-again/").status_code == 403


def test_a_job_without_a_plan_is_shown_before_it_runs_again(bob, job):
    client = client_of(bob)

    page = client.post(f"/jobs/{job.pk}/clone/", follow=True)

    assert page.redirect_chain[-1][0] == f"/jobs/{job.pk}/run-again/"
    assert "Nothing is launched before you say so" in page.content.decode()
    assert Job.objects.count() == 1
    client.post(f"/jobs/{job.pk}/run-again/")
    assert Job.objects.exclude(pk=job.pk).get().spec == job.spec
