"""Launches by agents: within a token's budget, or approved by a person."""

import json

import pytest
from django.test import Client

from tests.webapp.conftest import client_of
from webapp.accounts.tokens import token_make
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import Problem
from webapp.jobs.models import Job, LaunchRequest
from webapp.plans.models import Plan
from webapp.wizard.drafts import demo_document, stored_draft

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def plan(team, alice, host) -> Plan:
    return Plan.objects.create(
        team=team, owner=alice, name="demo run", draft=stored_draft(demo_document(host))
    )


def agent(alice, team, scope: str, budget: float | None = None) -> Client:
    text = token_make(team=team, by=alice, name="agent", scope=scope, budget_gpu_hours=budget)[1]
    return Client(headers={"Authorization": f"Bearer {text}"})


def post(client, path: str, body: dict):
    return client.post(f"/api/v1{path}", json.dumps(body), "application/json")


def test_a_launch_beyond_the_rest_of_the_budget_is_refused_until_an_earlier_one_ended(
    alice, team, plan
):
    client = agent(alice, team, "launch", budget=3)
    first = post(client, f"/plans/{plan.pk}/launch", {"max_duration_seconds": 7200})
    assert first.status_code == 201, first.content
    over = post(client, f"/plans/{plan.pk}/launch", {"max_duration_seconds": 5400})
    assert (over.status_code, over.json()["code"]) == (409, "over_budget")
    assert "may take 1.5 GPU-hours" in over.json()["detail"]
    assert Job.objects.count() == 1
    Job.objects.update(state="stopped", ended_at=now())
    assert (
        post(client, f"/plans/{plan.pk}/launch", {"max_duration_seconds": 5400}).status_code == 201
    )


def test_a_job_without_a_limit_has_no_price(alice, team, plan):
    plan.draft["workload"] |= {"time_budget_seconds": None, "tokens": 1_000_000}
    plan.save()
    answer = post(agent(alice, team, "launch", budget=99), f"/plans/{plan.pk}/launch", {})
    assert (answer.status_code, answer.json()["code"]) == (422, "max_duration_seconds")
    for budget, scope in ((-1, "launch"), (1, "read"), (float("nan"), "launch")):
        with pytest.raises(Problem, match="GPU-hours"):
            token_make(team=team, by=alice, name="x", scope=scope, budget_gpu_hours=budget)


def test_a_request_becomes_a_job_of_the_one_who_asked_once(alice, bob, vera, charlie, team, plan):
    client = agent(alice, team, "plan")
    assert post(client, f"/plans/{plan.pk}/launch", {}).status_code == 403
    asked = {
        "launch": {"name": "asked", "max_duration_seconds": 3600},
        "reason": "to compare optimisers",
    }
    first = post(client, f"/plans/{plan.pk}/launch-requests", asked).json()
    again = post(client, f"/plans/{plan.pk}/launch-requests", asked).json()
    assert (first["state"], first["token"], again["id"]) == ("waiting", "agent", first["id"])
    page = client_of(bob).get("/approvals/").content.decode()
    assert "It may take 1 GPU-hours: 1 device for at most 1 h, in 1 attempt." in page
    assert "Options: “Name” asked, “Time limit, in hours” 1." in page
    assert "to compare optimisers" in page
    assert "Approve and launch" in page
    assert "Approve and launch" not in client_of(vera).get("/approvals/").content.decode()
    assert "to compare" not in client_of(charlie).get("/approvals/").content.decode()
    path = f"/approvals/{first['id']}"
    assert client_of(vera).post(f"{path}/approve/").status_code == 403
    assert client_of(charlie).post(f"{path}/approve/").status_code == 404
    assert client.post(f"{path}/approve/").status_code == 302  # a token opens no page
    assert not Job.objects.exists()
    done = client_of(bob).post(f"{path}/approve/")
    job = Job.objects.get()
    assert done["Location"] == f"/jobs/{job.pk}/"
    assert (job.name, job.owner, job.max_duration_seconds) == ("asked", alice, 3600.0)
    found = client.get(f"/api/v1/launch-requests/{first['id']}").json()
    assert (found["state"], found["decided_by"], found["job"]) == ("approved", "bob", job.pk)
    client_of(bob).post(f"{path}/approve/")
    client_of(bob).post(f"{path}/deny/")
    assert (Job.objects.count(), LaunchRequest.objects.get().state) == (1, "approved")
    kinds = Event.objects.filter(kind__startswith="launch.").values_list("kind", flat=True)
    assert list(kinds.order_by("id")) == ["launch.requested", "launch.approved"]


def test_what_was_asked_for_starts_whatever_becomes_of_the_draft(alice, bob, team, plan):
    client = agent(alice, team, "plan")
    asked = post(client, f"/plans/{plan.pk}/launch-requests", {}).json()
    change = json.dumps({"workload": {"time_budget_seconds": 12_000}})
    changed = client.patch(f"/api/v1/plans/{plan.pk}", change, "application/json").json()
    assert changed["document"]["workload"]["time_budget_seconds"] == 12_000
    client_of(bob).post(f"/approvals/{asked['id']}/approve/")
    job = Job.objects.get()
    assert job.spec["time_budget_seconds"] == 120
    assert (job.plan_id, changed["id"] != asked["plan"]) == (asked["plan"], True)


def test_a_denial_tells_the_agent_why(alice, bob, team, plan):
    client = agent(alice, team, "plan")
    asked = post(client, f"/plans/{plan.pk}/launch-requests", {}).json()
    client_of(bob).post(f"/approvals/{asked['id']}/deny/", {"answer": "Not tonight."})
    found = client.get(f"/api/v1/launch-requests/{asked['id']}").json()
    assert (found["state"], found["answer"], found["job"]) == ("denied", "Not tonight.", None)
    assert client.get("/api/v1/launch-requests").json()["items"] == []
    assert not Job.objects.exists()


def test_who_asked_withdraws_a_request_once_and_nobody_else_does(alice, bob, olga, team, plan):
    client = agent(alice, team, "plan")
    asked = post(client, f"/plans/{plan.pk}/launch-requests", {}).json()
    path = f"/launch-requests/{asked['id']}/withdraw"
    refused = post(agent(olga, team, "plan"), path, {})
    assert (refused.status_code, refused.json()["code"]) == (403, "not_yours")
    assert client_of(bob).post(f"/approvals/{asked['id']}/withdraw/").status_code == 403
    assert "Withdraw" not in client_of(bob).get("/approvals/").content.decode()
    assert "Withdraw" in client_of(alice).get("/approvals/").content.decode()
    done = post(client, path, {"reason": "a typing error"}).json()
    assert (done["state"], done["withdrawn"], done["answer"]) == ("denied", True, "a typing error")
    assert post(client, path, {}).json()["code"] == "decided"
    client_of(bob).post(f"/approvals/{asked['id']}/approve/")
    assert (Job.objects.count(), LaunchRequest.objects.get().state) == (0, "withdrawn")
    page = client_of(bob).get("/approvals/").content.decode()
    assert "Withdrawn: a typing error" in page
    assert Event.objects.filter(kind="launch.withdrawn", actor="alice").count() == 1
    again = post(client, f"/plans/{plan.pk}/launch-requests", {}).json()
    assert again["id"] != asked["id"]
    client_of(alice).post(f"/approvals/{again['id']}/withdraw/")
    assert client.get("/api/v1/launch-requests").json()["items"] == []
