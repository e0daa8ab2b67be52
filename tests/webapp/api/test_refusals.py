"""What an operation would not read is refused by name, and nothing is done."""

import json
from urllib.parse import quote

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from tests.webapp.conftest import client_of, make_job
from webapp.accounts.models import Membership, Role, StoredReply
from webapp.accounts.tokens import token_make
from webapp.api import team as team_api
from webapp.core import vault
from webapp.core.pace import PERSON
from webapp.jobs.models import Job, LaunchRequest
from webapp.modelhub.models import demo_config
from webapp.plans.models import Plan
from webapp.wizard.drafts import demo_document, serve_document, stored_draft

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
        (
            "page=2",
            "page",
            "There are: created_after, created_before, cursor, host, kind",
        ),
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
        Plan.objects.create(
            team=team, owner=alice, name=f"plan {at}", draft=stored_draft(demo_document(host))
        )
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


def test_names_that_do_not_show_are_refused_by_field_and_others_are_trimmed(
    alice, team, host, things
):
    Membership.objects.filter(user=alice).update(role=Role.ADMIN)
    admin = client_of(alice)
    plan, config = things["<plan_id>"], demo_config()
    device = {"device": "h100-sxm"}
    cases = [
        ("/plans", {"goal": "pretrain", "model": "demo"}, "name"),
        ("/plans/from-request", {"request": {}}, "name"),
        (f"/plans/{plan}/save", {}, "name"),
        (f"/plans/{plan}/launch", {}, "name"),
        (f"/plans/{plan}/launch-requests", {}, "launch.name"),
        ("/models", {"config": config}, "name"),
        ("/hosts/enrolments", {}, "name"),
        ("/hosts/virtual", device, "name"),
        ("/tokens", {"scope": "read"}, "name"),
    ]
    for path, body, field in cases:
        for name in ("   ", "a\u0007b", "a\u202eb", "\u2067x"):
            sent = {**body, "launch": {"name": name}} if "." in field else {**body, "name": name}
            answer = post(admin, path, sent)
            assert refused(answer)[0] == "invalid", (path, name)
            (fault,) = answer.json()["errors"]
            assert (fault["field"], "name" in fault["message"]) == (field, True), path
    for name in ("a\u202eb", "  ", "HF-TOKEN"):
        put = admin.put(f"/api/v1/secrets/{quote(name)}", '{"value": "x"}', "application/json")
        assert put.status_code == 422, name
    made = post(admin, "/models", {"name": "  Sämann 👩‍🔬  ", "config": config})
    assert (made.status_code, made.json()["name"]) == (201, "Sämann 👩‍🔬")
    assert made["Location"] == f"/api/v1/models/{made.json()['id']}"


def test_parts_of_an_upload_and_last_events_that_are_not_read_are_refused(client, job):
    file = {"file": SimpleUploadedFile("a.txt", b"words")}
    assert refused(client.post("/api/v1/data", {**file, "name": "x"}))[0] == "name"
    other = {"files": SimpleUploadedFile("b.txt", b"words")}
    assert refused(client.post("/api/v1/data", {**file, **other}))[0] == "files"
    path = f"/api/v1/jobs/{job.pk}/stream"
    for last in ("abc", "-1", "1.5", "9" * 18):
        answer = client.get(path, headers={"Last-Event-ID": last})
        assert (refused(answer)[0], last in answer.json()["detail"]) == ("last_event_id", True)


def test_a_refusal_says_whether_role_scope_or_csrf_token_is_missing(client, alice, team, vera):
    text = token_make(team=team, by=alice, name="reader", scope="read")[1]
    reader = Client(headers={"Authorization": f"Bearer {text}"})
    of_site = Client(enforce_csrf_checks=True)
    of_site.force_login(alice)
    for answer, code, title, words in [
        (post(reader, "/plans", {}), "scope_too_low", "The token's scope", "scope plan"),
        (post(client_of(vera), "/plans", {"goal": "serve"}), "role_too_low", "The role", "Viewer"),
        (client.get("/api/v1/audit"), "role_too_low", "The role", "Admin"),
        (post(of_site, "/plans", {}), "csrf_failed", "The request lacks", "X-CSRFToken"),
    ]:
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (403, code)
        assert (title in problem["title"], words in problem["detail"]) == (True, True), problem


def test_a_made_object_has_an_address_and_a_repetition_has_the_same(client, host):
    document = {"goal": "pretrain", "model": "demo", "hardware": {"host": host.slug}}
    made = post(client, "/plans", document, **{"Idempotency-Key": "k"})
    again = post(client, "/plans", document, **{"Idempotency-Key": "k"})
    assert again["Idempotency-Replayed"] == "true"
    assert made["Location"] == again["Location"] == f"/api/v1/plans/{made.json()['id']}"
    row = StoredReply.objects.get()
    older = json.dumps(["application/json", made.content.decode()])  # as stored before an upgrade
    row.sealed = vault.seal(older, owner=f"reply {row.caller} {row.key}")
    row.save()
    third = post(client, "/plans", document, **{"Idempotency-Key": "k"})
    assert (third.content, "Location" in third) == (made.content, False)
    launched = post(client, f"/plans/{made.json()['id']}/launch", {})
    assert client.get(launched["Location"]).json()["id"] == launched.json()["job"]["id"]


def test_every_reply_to_a_person_says_what_is_left_of_the_rate_limit(client, monkeypatch):
    monkeypatch.setattr("webapp.api.requests.calls._clock", lambda: 1e6)  # nothing is given back
    first, second = (client.get("/api/v1/jobs") for _ in range(2))
    assert int(first["RateLimit-Limit"]) == PERSON.burst
    left = [int(one["RateLimit-Remaining"]) for one in (first, second)]
    assert (left[0] - left[1], PERSON.burst - 3 <= left[1]) == (1, True)
    assert int(second["RateLimit-Reset"]) >= 1
    assert "RateLimit-Limit" not in Client().get("/api/v1/jobs")


def test_options_of_another_launch_are_refused(client, team, alice, host):
    training = Plan.objects.create(
        team=team, owner=alice, name="a", draft=stored_draft(demo_document(host))
    )
    serving = Plan.objects.create(
        team=team, owner=alice, name="b", draft=stored_draft(serve_document(host))
    )
    for plan, body, code, words in [
        (training, {"engine": "vllm"}, "engine", "this launch is a pre-training"),
        (training, {"run": "load"}, "run", "load test of a plan to serve"),
        (training, {"adapter": "x"}, "adapter", "batch generation"),
        (training, {"draft_model": "lookup"}, "draft_model", "endpoint"),
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
    launch = {"launch": {"max_duration_seconds": 3600}}
    body = json.dumps(launch)
    changed = client.patch(f"/api/v1/plans/{made['id']}", body, "application/json")
    for answer in (post(client, "/plans", document | launch), changed):
        code, detail = refused(answer)
        assert (code, "/launch" in detail) == ("launch", True)
    assert Plan.objects.count() == 1


def test_a_failure_of_the_server_is_a_problem_document_and_no_fault_of_the_request(
    client, monkeypatch, caplog
):
    client.raise_request_exception = False
    monkeypatch.setattr(team_api, "_scope", lambda: "no scope")  # the reply breaks its own schema
    answer = client.get("/api/v1/me")
    body = answer.json()
    assert (answer.status_code, body["code"]) == (500, "unexpected")
    assert answer["Content-Type"] == "application/problem+json"
    assert answer["X-Request-Id"] in body["detail"]
    assert f"Request id: {answer['X-Request-Id']}" in caplog.text


def test_a_document_put_together_by_an_operation_is_refused_field_by_field(client, team, alice):
    plan = Plan.objects.create(team=team, owner=alice, draft=stored_draft(serve_document(None)))
    for change, field, words in [
        ({"workload": {"input_tokns": 3}}, "workload.input_tokns", "nearest is “input_tokens”"),
        ({"goal": "sell"}, "goal", "It is 'sell'; it can be compress"),
        ({"workload": {"input_tokens": "many"}}, "workload.input_tokens", "integer"),
    ]:
        answer = client.patch(f"/api/v1/plans/{plan.pk}", json.dumps(change), "application/json")
        code, detail = refused(answer)
        named = answer.json()["errors"][0]["field"]
        assert (code, named, words in detail) == ("invalid", field, True), detail
