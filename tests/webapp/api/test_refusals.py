"""What an operation would not read is refused by name, and nothing is done."""

import json

import pytest
from django.test import Client

from tests.webapp.conftest import client_of, make_job
from webapp.accounts.tokens import token_make
from webapp.jobs.models import Job, LaunchRequest
from webapp.plans.models import Plan
from webapp.wizard.drafts import demo_draft, serve_draft

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def client(alice, team) -> Client:
    text = token_make(team=team, by=alice, name="script", scope="launch")[1]
    return Client(headers={"Authorization": f"Bearer {text}"})


def refused(answer) -> tuple[int, str]:
    assert answer.status_code == 422, answer.content
    return answer.json()["code"], answer.json()["detail"]


def post(client, path: str, body: object, **headers: str):
    return client.post(f"/api/v1{path}", json.dumps(body), "application/json", headers=headers)


def test_a_query_that_is_not_read_is_refused_for_tokens_and_sessions(
    client, alice, team, host, job
):
    for query, code, words in [
        ("page=2", "page", "There are: cursor, host, kind, limit, owner, plan, q, state"),
        ("stat=running", "stat", "Did you mean state?"),
        ("state=running&state=queued", "state", "stands 2 times"),
        ("state=runing", "state", "no state 'runing'"),
        ("kind=bogus", "kind", "no kind 'bogus'"),
        ("host=nope", "host", "no host 'nope'"),
        ("owner=nobody", "owner", "no owner 'nobody'"),
        ("plan=none", "plan", "no plan 'none'"),
    ]:
        for caller in (client, client_of(alice)):
            found = refused(caller.get(f"/api/v1/jobs?{query}"))
            assert (found[0], words in found[1]) == (code, True), (query, found)
    assert client.get(f"/api/v1/jobs?host={job.host.slug}&owner=alice&kind=train").json()["items"]
    other = make_job(team, alice, host)
    assert client.get(f"/api/v1/compare?job={job.pk}&job={other.pk}").status_code == 200
    # nobody learns what an operation reads
    assert Client().get("/api/v1/jobs?page=2").status_code == 401


def test_a_cursor_is_of_its_list_and_its_filters(client, team, alice, host):
    for at in range(3):
        make_job(team, alice, host, name=f"job {at}")
        Plan.objects.create(team=team, owner=alice, name=f"plan {at}", draft=demo_draft(host))
    jobs = client.get("/api/v1/jobs?limit=1").json()["next_cursor"]
    plans = client.get("/api/v1/plans?limit=1").json()["next_cursor"]
    assert client.get(f"/api/v1/jobs?limit=2&cursor={jobs}").status_code == 200
    for path in (f"jobs?cursor={plans}", f"plans?cursor={jobs}", f"jobs?q=job&cursor={jobs}"):
        assert refused(client.get(f"/api/v1/{path}"))[0] == "cursor"


def test_a_body_where_none_is_read_and_an_empty_key_start_nothing(client, job):
    path = f"/jobs/{job.pk}/run-again"
    assert refused(post(client, path, {"name": "again"}))[0] == "body"
    assert refused(post(client, path, {}, **{"Idempotency-Key": ""}))[0] == "idempotency_key"
    assert Job.objects.count() == 1
    assert post(client, path, {}).status_code == 201


def test_options_of_another_launch_are_refused(client, team, alice, host):
    training = Plan.objects.create(team=team, owner=alice, name="a", draft=demo_draft(host))
    serving = Plan.objects.create(team=team, owner=alice, name="b", draft=serve_draft(host))
    for plan, body, code, words in [
        (training, {"engine": "vllm"}, "engine", "this launch is a pre-training"),
        (training, {"run": "load"}, "run", "load test of a plan to serve"),
        (training, {"adapter": "x"}, "adapter", "batch generation"),
        (training, {"draft": "lookup"}, "draft", "endpoint"),
        (serving, {"arrivals": "open"}, "arrivals", "this launch is the benchmark"),
        (serving, {"run": "load", "engine": "vllm"}, "engine", "this launch is the load test"),
    ]:
        for path, sent in [("launch", body), ("launch-requests", {"launch": body})]:
            found = refused(post(client, f"/plans/{plan.pk}/{path}", sent))
            assert (found[0], words in found[1]) == (code, True), (body, found)
    assert not Job.objects.exists()
    assert not LaunchRequest.objects.exists()
    # a default that is written out changes nothing
    assert post(client, f"/plans/{training.pk}/launch", {"engine": "slipway"}).status_code == 201


def test_a_plan_does_not_take_how_it_is_launched(client, host):
    document = {"goal": "pretrain", "model": "demo"}
    made = post(client, "/plans", document).json()
    body = json.dumps({"launch": {"hours": 1}})
    changed = client.patch(f"/api/v1/plans/{made['id']}", body, "application/json")
    for answer in (post(client, "/plans", document | {"launch": {"hours": 1}}), changed):
        code, detail = refused(answer)
        assert (code, "/launch" in detail) == ("launch", True)
    assert Plan.objects.count() == 1
