"""The API of people: jobs, series and events at their bounds, its schema, health and pace."""

import threading
from datetime import UTC, datetime

import pytest
from django.db import DatabaseError
from django.test import Client
from pydantic import TypeAdapter

from runners.shared.messages import EnrollRequest
from tests.webapp.api.conftest import HostClient
from tests.webapp.api.test_agents_api import bearer, knock, said
from tests.webapp.conftest import (
    STARTED,
    batch_of,
    client_of,
    enrol,
    make_beat,
    make_facts,
    make_job,
)
from webapp.accounts.models import Membership
from webapp.agents.ingest import events_accept
from webapp.api import urls
from webapp.api.descriptions import REQUEST_FIELDS
from webapp.api.jobs import MAX_EVENT_BYTES
from webapp.api.urls import api
from webapp.core import pace, readiness
from webapp.core.clock import now
from webapp.hosts.services import digest
from webapp.jobs.models import Attempt, AttemptEvent, Job
from webapp.jobs.progress import KIND_WORDS
from webapp.live.stream import read_ticket
from webapp.operations.management.commands.client import _references
from webapp.wizard.documents import SentLaunch, adapter

# What pages and scripts read: series, events, tickets.


pytestmark = pytest.mark.django_db(databases="__all__")
LINE = ("log", {"stream": "stdout", "text": "hello"})


def point(loss: float) -> tuple[str, dict]:
    return ("metric", {"source": "job", "values": {"loss": loss}})


@pytest.fixture
def reported(attempt):
    batch = batch_of(attempt, ("started", STARTED), point(2.0), point(1.5), LINE)
    events_accept(host=attempt.host, batch=batch)
    return attempt


def get(user, path: str):
    return client_of(user).get(f"/api/v1{path}")


def test_a_series_comes_with_times_and_values_after_since(alice, reported):
    answer = get(alice, f"/jobs/{reported.job_id}/series?metrics=loss,tokens_per_second").json()
    assert answer["attempt"] == reported.pk
    assert [(item["metric"], item["value"]) for item in answer["series"]] == [("loss", [2.0, 1.5])]
    first = get(alice, f"/jobs/{reported.job_id}/series?metrics=loss").json()["series"][0]
    instant = datetime.fromtimestamp((first["t_ms"][0] + 1) / 1000, tz=UTC)
    since = f"{instant:%FT%T}.{instant.microsecond:06}Z"
    later = get(alice, f"/jobs/{reported.job_id}/series?metrics=loss&since={since}")
    assert later.json()["series"][0]["value"] == [1.5]
    answer = get(alice, f"/jobs/{reported.job_id}/series?metrics=loss&points=99999")
    assert (answer.status_code, "points" in answer.json()["detail"]) == (422, True)


def test_what_was_not_measured_is_null(alice, attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, point(float("nan"))))
    answer = get(alice, f"/jobs/{attempt.job_id}/series?metrics=loss").json()
    assert answer["series"][0]["value"] == [None]


def test_a_job_without_an_attempt_has_no_series(alice, draft):
    answer = get(alice, f"/jobs/{draft.pk}/series?metrics=loss").json()
    assert (answer["attempt"], answer["series"]) == (None, [])


def test_events_come_in_order_after_a_number_and_of_some_kinds(alice, reported):
    answer = get(alice, f"/jobs/{reported.job_id}/events?after=1").json()
    assert [(event["seq"], event["kind"]) for event in answer["events"]] == [(4, "log")]
    assert answer["last_seq"] == 4
    answer = get(alice, f"/jobs/{reported.job_id}/events?kind=started").json()
    assert [event["kind"] for event in answer["events"]] == ["started"]


def test_many_long_events_come_in_several_answers_and_none_is_lost(alice, attempt):
    AttemptEvent.objects.bulk_create(
        AttemptEvent(attempt=attempt, seq=seq, t_ms=seq, kind="log", body={"text": 9000 * "x"})
        for seq in range(1, 101)
    )
    found, sizes, after = [], [], 0
    while events := (answer := get(alice, f"/jobs/{attempt.job_id}/events?after={after}")).json()[
        "events"
    ]:
        found += [event["seq"] for event in events]
        sizes.append(len(answer.content))
        after = answer.json()["last_seq"]
    assert found == list(range(1, 101))
    assert len(sizes) == 4
    assert max(sizes) < MAX_EVENT_BYTES + 16 * 1024


def test_a_job_is_read_by_its_team_alone(charlie, reported, bob, vera, client):
    for path in ["series?metrics=loss", "events"]:
        assert get(charlie, f"/jobs/{reported.job_id}/{path}").status_code == 404, path
    for path in ["series?metrics=loss", "events"]:
        answers = [
            get(user, f"/jobs/{reported.job_id}/{path}").status_code for user in (bob, vera)
        ]
        assert answers == [200, 200], path
    answer = client.get(f"/api/v1/jobs/{reported.job_id}/events")
    assert (answer.status_code, answer.json()["code"]) == (401, "not_authenticated")


def test_a_ticket_names_what_its_holder_may_follow(alice, reported):
    answer = get(alice, f"/tickets?topics=job:{reported.job_id}").json()
    assert read_ticket(answer["ticket"]) == (alice.pk, (f"job:{reported.job_id}",))


def test_a_ticket_is_for_some_topics_each_once(alice, job):
    many = ",".join(f"job:{number}" for number in range(33))
    answer = get(alice, f"/tickets?topics={many}")
    assert answer.status_code == 422
    assert "33 topics" in answer.json()["detail"]
    assert "at most 32" in answer.json()["detail"]
    answer = get(alice, f"/tickets?topics={','.join([f'job:{job.pk}'] * 500)}")
    assert read_ticket(answer.json()["ticket"]) == (alice.pk, (f"job:{job.pk}",))
    assert ticket_topics(alice, f"job:{job.pk},job:{job.pk}") == (f"job:{job.pk}",)
    for key in ["x" * 4000, "%F0%9F%9A%A2", "a b", "'--"]:
        answer = get(alice, f"/tickets?topics=job:{key},plan:{key}")
        assert answer.status_code == 200, key
        assert read_ticket(answer.json()["ticket"]) == (alice.pk, ()), key
    answer = client_of(alice).get("/api/v1/tickets")
    assert answer.status_code == 422
    assert "query.topics" in answer.json()["detail"]


# Series, events and tickets at the bounds of what a script may ask for.


PROBLEM = "application/problem+json"
FIRST_MS = 1_700_000_000_000  # the instant of the first event that batch_of makes
BEYOND_EVERYTHING = 10**20  # more than any database has in an integer


def points(*losses: float) -> list[tuple[str, dict]]:
    return [("metric", {"source": "job", "values": {"loss": loss}}) for loss in losses]


@pytest.fixture
def timed(attempt) -> Attempt:
    """Events 1 to 5: a start, three points a second apart, a line of output."""
    line = ("log", {"stream": "stdout", "text": "hello"})
    batch = batch_of(attempt, ("started", STARTED), *points(3.0, 2.0, 1.0), line)
    events_accept(host=attempt.host, batch=batch)
    return attempt


def ask(user, attempt, path: str):
    return client_of(user).get(f"/api/v1/jobs/{attempt.job_id}/{path}")


def losses(user, attempt, more: str = "") -> list[float]:
    series = ask(user, attempt, f"series?metrics=loss{more}").json()["series"]
    return series[0]["value"] if series else []


def numbers(user, attempt, more: str = "") -> list[int]:
    return [event["seq"] for event in ask(user, attempt, f"events{more}").json()["events"]]


# Series


def test_both_ends_of_a_range_belong_to_it_however_far(alice, timed):
    second, after, first = (
        datetime.fromtimestamp((FIRST_MS + ms) / 1000, tz=UTC).isoformat()[:19] + "Z"
        for ms in (2000, 3000, 0)
    )  # of the points with loss 2 and 1
    assert losses(alice, timed, f"&since={second}&until={second}") == [2.0]
    assert losses(alice, timed, f"&since={second}") == [2.0, 1.0]
    assert losses(alice, timed, f"&until={second}") == [3.0, 2.0]
    exchanged = ask(alice, timed, f"series?metrics=loss&since={after}&until={first}")
    assert exchanged.json()["code"] == "since"
    for more, expected in [
        ("&since=9999-12-31T23:59:59Z", []),
        ("&since=0001-01-01T00:00:00Z", [3.0, 2.0, 1.0]),
        ("&until=9999-12-31T23:59:59Z", [3.0, 2.0, 1.0]),
        ("&until=0001-01-01T00:00:00Z", []),
    ]:
        assert losses(alice, timed, more) == expected, more
    for number in [10, 5000]:
        assert losses(alice, timed, f"&points={number}") == [3.0, 2.0, 1.0], number


def test_a_field_that_is_wrong_is_refused_by_its_name_with_the_bound(alice, timed):
    for points_wanted, bound in [("9", "10"), ("5001", "5000"), ("0", "10"), ("-600", "10")]:
        answer = ask(alice, timed, f"series?metrics=loss&points={points_wanted}")
        assert (answer.status_code, answer["Content-Type"]) == (422, PROBLEM), points_wanted
        assert answer.json()["errors"][0]["field"] == "query.points", points_wanted
        assert answer.json()["detail"].endswith(f"equal to {bound}."), points_wanted
    for field in ["since", "until", "points"]:
        answer = ask(alice, timed, f"series?metrics=loss&{field}=yesterday")
        assert answer.status_code == 422, field
        assert [error["field"] for error in answer.json()["errors"]] == [f"query.{field}"], field
    answer = ask(alice, timed, "series?since=a&points=b").json()
    named = {one["field"] for one in answer["errors"]}
    assert named == {"query.since", "query.points"}
    assert answer["errors"][0]["field"] in answer["detail"]


def test_a_metric_comes_once_for_each_source_and_one_that_is_none_not(alice, timed):
    assert ask(alice, timed, "series").json()["reported"] == ["loss"]
    found = ask(alice, timed, "series?metrics=loss,%20loss,,loss").json()["series"]
    assert [one["metric"] for one in found] == ["loss"]
    for wish in ["", ",,", "%20", "tokens_per_second"]:
        answer = ask(alice, timed, f"series?metrics={wish}")
        assert (answer.status_code, answer.json()["series"]) == (200, []), wish
    for wish in ["LOSS", "lo"]:
        assert (
            "this attempt reported loss"
            in ask(alice, timed, f"series?metrics={wish}").json()["detail"]
        )
    other = ("metric", {"source": "host", "values": {"loss": 7.0}})
    events_accept(host=timed.host, batch=batch_of(timed, other, first=6))
    found = ask(alice, timed, "series?metrics=loss").json()["series"]
    assert {one["source"]: one["value"] for one in found} == {"host": [7.0], "job": [3, 2, 1]}


# Events


def test_events_begin_beyond_the_number_asked_for(alice, timed):
    assert numbers(alice, timed) == [1, 5]
    first = ask(alice, timed, "events").json()
    again = ask(alice, timed, f"events?after={first['last_seq']}").json()
    assert (again["events"], again["last_seq"]) == ([], first["last_seq"])
    assert ("queued", "alice") in {(e["to_state"], e["actor"]) for e in first["history"]}
    assert again["history"] == []
    for after, found in (
        (-1, [1, 5]), (0, [1, 5]), (1, [5]), (4, [5]), (5, []), (BEYOND_EVERYTHING, []),
    ):  # fmt: skip
        assert numbers(alice, timed, f"?after={after}") == found, after
    for kinds, found in [("log", [5]), ("log,started", [1, 5]), (",", []), ("LOG", [])]:
        assert numbers(alice, timed, f"?kind={kinds}") == found, kinds


def test_the_thousandth_event_is_in_the_first_answer_and_the_next_in_the_second(alice, timed):
    AttemptEvent.objects.bulk_create(
        AttemptEvent(attempt=timed, seq=seq, t_ms=FIRST_MS, kind="log", body={})
        for seq in range(6, 1006)
    )
    first = ask(alice, timed, "events").json()
    rest = ask(alice, timed, f"events?after={first['last_seq']}").json()
    assert len(first["events"]) == 1000
    assert [event["seq"] for event in rest["events"]] == [1004, 1005]


def test_a_job_without_an_attempt_or_deleted_tells_nothing(alice, timed):
    Job.objects.filter(pk=timed.job_id).update(current_attempt=None)
    answer = ask(alice, timed, "events").json()
    assert (answer["attempt"], answer["events"]) == (None, [])
    for path in ["series?metrics=loss", "events"]:
        Job.objects.filter(pk=timed.job_id).update(deleted_at="2026-01-01T00:00:00Z")
        answer = ask(alice, timed, path)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), path


# Tickets


def ticket_topics(user, topics: str) -> tuple[str, ...]:
    answer = client_of(user).get("/api/v1/tickets", {"topics": topics})
    return read_ticket(answer.json()["ticket"])[1]


def test_a_ticket_leaves_out_what_is_not_ones_own_and_keeps_the_rest(charlie, alice, host, job):
    wanted = f"job:{job.pk}, host:{host.pk},nothing,job:"
    assert ticket_topics(alice, wanted) == (f"host:{host.pk}", f"job:{job.pk}")
    assert ticket_topics(charlie, wanted) == ()


def test_a_member_of_two_teams_follows_the_lists_of_both(alice, team, other_team):
    Membership.objects.create(user=alice, team=other_team, role="viewer")
    assert set(ticket_topics(alice, "jobs")) == {f"jobs:{team.pk}", f"jobs:{other_team.pk}"}


def test_who_left_the_team_gets_no_new_ticket_for_it(bob, team, job):
    before = ticket_topics(bob, f"job:{job.pk}")
    bob.memberships.all().delete()
    assert (before, ticket_topics(bob, f"job:{job.pk},jobs")) == ((f"job:{job.pk}",), ())


def test_nobody_gets_no_ticket(db):
    answer = Client().get("/api/v1/tickets?topics=jobs")
    assert (answer.status_code, answer["Content-Type"]) == (401, PROBLEM)


# Alive, and able to work.


@pytest.fixture
def prepared(monkeypatch):
    monkeypatch.setattr(readiness, "_is_prepared", threading.Event())
    monkeypatch.setattr(readiness, "missing_preparation", lambda: "")


def test_a_living_process_says_so_and_is_ready_with_a_database_and_a_broker(
    client, redis_server, prepared
):
    assert client.get("/healthz").json() == {"status": "ok"}
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["broker"]) == (200, True)


def test_it_is_ready_once_its_version_is_prepared(client, settings, prepared, monkeypatch):
    monkeypatch.setattr(readiness, "missing_preparation", lambda: "static files are not collected")
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["prepared"]) == (503, False)
    monkeypatch.undo()
    monkeypatch.setattr(readiness, "missing_preparation", lambda: "")
    assert client.get("/readyz").status_code == 200


def test_without_a_broker_it_is_ready_and_says_what_is_missing(
    client, settings, tmp_path, prepared
):
    settings.REDIS_URL = f"unix://{tmp_path}/nobody.sock"
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["broker"]) == (200, False)


def test_without_a_database_it_is_not_ready(client, monkeypatch):
    class Broken:
        def cursor(self):
            raise DatabaseError("gone")

    monkeypatch.setattr(urls, "connection", Broken())
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "not ready")


# The published schema is complete, and its page loads nothing from elsewhere.


def operations():
    schema = api.get_openapi_schema()
    return [
        (f"{method} {path}", operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]


def test_every_operation_declares_its_refusals_and_says_what_it_does():
    found = operations()
    refusals = {"401", "404", "409", "422"}
    assert [name for name, one in found if not refusals <= set(map(str, one["responses"]))] == []
    assert [name for name, one in found if not one["description"].endswith(".")] == []


def test_the_schema_has_readable_summaries_headers_values_and_valid_examples():
    document = api.get_openapi_schema()
    assert document["paths"]["/api/v1/jobs"]["get"]["summary"] == "List jobs"
    assert document["paths"]["/api/v1/hosts/enroll"]["post"]["summary"] == "Enroll host"
    key = {"$ref": "#/components/parameters/Idempotency-Key"}
    keyed = {name for name, one in operations() if key in one["parameters"]}
    assert keyed == {name for name, _ in operations() if not name.startswith("get ")}
    busy = document["paths"]["/api/v1/plans"]["post"]["responses"][429]["headers"]
    for part in (key, *busy.values()):
        *_, section, name = part["$ref"].split("/")
        assert document["components"][section][name]["description"]
    given = {one["name"]: one for one in document["paths"]["/api/v1/jobs"]["get"]["parameters"]}
    assert "queued, preflight" in given["state"]["description"]
    assert "separated by commas" in given["state"]["description"]
    assert "train, compress" in given["kind"]["description"]
    models = {"create_plan": adapter(), "launch_plan": TypeAdapter(SentLaunch)}
    for _, one in operations():
        if model := models.get(one["operationId"]):
            model.validate_python(one["requestBody"]["content"]["application/json"]["example"])


def test_every_parameter_and_every_field_of_a_request_is_described():
    document = api.get_openapi_schema()
    schemas = document["components"]["schemas"]
    bare = [
        (one["operationId"], each["name"])
        for _, one in operations()
        for each in one["parameters"]
        if "$ref" not in each and not each.get("description")
    ]
    # The messages of hosts are those of ``runners.shared``: no person writes them.
    bodies = [
        one["requestBody"] for _, one in operations()
        if {"TokenAuth": []} in one.get("security", ()) and "requestBody" in one
    ]  # fmt: skip
    sent, pending = set(), list(_references(bodies))
    while pending:
        name = pending.pop()
        if name not in sent:
            sent.add(name)
            pending += _references(schemas[name])
    fields = [
        (name, *each) for name in sent for each in schemas[name].get("properties", {}).items()
    ]
    bare += [(name, field) for name, field, schema in fields if not schema.get("description")]
    assert len(fields) > 250
    assert bare == []
    assert set(REQUEST_FIELDS) <= sent  # and none is left over


def test_enumerations_specs_and_operations_have_names_in_the_schema():
    document = api.get_openapi_schema()
    schemas = document["components"]["schemas"]

    def values(name: str, field: str) -> set[str]:
        schema = schemas[name]["properties"][field]
        if "$ref" in schema:
            schema = schemas[schema["$ref"].rpartition("/")[2]]
        return set(schema["enum"])

    assert values("HostReply", "contact") == {"unknown", "live", "degraded", "unreachable"}
    assert values("JobReply", "priority") == values("QueuedJob", "priority")
    assert values("JobReply", "kind") == set(KIND_WORDS)
    assert values("VersionReply", "verdict") >= {"fits", "tight", "slow", "does-not-fit"}
    assert values("LaunchRequestReply", "state") == {"waiting", "approved", "denied"}
    spec = schemas["JobDetail"]["properties"]["spec"]["$ref"].rpartition("/")[2]
    assert set(schemas[spec]["discriminator"]["mapping"]) == set(KIND_WORDS)
    ids = [one["operationId"] for _, one in operations()]
    assert [each for each in ids if each.startswith("webapp")] == []
    assert len(ids) == len(set(ids))
    of_hosts = {one["operationId"] for name, one in operations() if "/attempts/" in name}
    assert of_hosts >= {"claim_attempt", "report_events", "upload_artefact_part"}


def test_priorities_hosts_and_instants_are_read_as_they_are_written(alice, team, host, reported):
    client = client_of(alice)
    job = Job.objects.get(pk=reported.job_id)
    assert client.get(f"/api/v1/jobs/{job.pk}").json()["priority"] == "normal"
    waiting = make_job(team, alice, host, name="waits")
    Job.objects.filter(pk=waiting.pk).update(state="queued", queued_at=now())
    Membership.objects.filter(user=alice).update(role="operator")
    path = f"/api/v1/pools/{waiting.pool_id}/jobs/{waiting.pk}"
    moved = client.patch(path, '{"priority": "low"}', content_type="application/json").json()
    assert {one["job"]: one["priority"] for one in moved["queue"]}[waiting.pk] == "low"
    detail = client.get(f"/api/v1/jobs/{job.pk}").json()
    assert [(one["host"], one["rank"]) for one in detail["attempts"]] == [(host.slug, 0)]
    assert set(detail["result"]) == {"measured", "notes"}
    event = client.get(f"/api/v1/jobs/{job.pk}/events").json()["events"][0]
    stored = AttemptEvent.objects.filter(attempt=reported).earliest("seq")
    assert datetime.fromisoformat(event["at"]).timestamp() * 1000 == stored.t_ms


def test_the_docs_page_loads_only_from_here(alice):
    text = client_of(alice).get("/api/v1/docs").content.decode()
    assert "https://cdn" not in text


def test_an_address_that_the_api_does_not_have_is_a_problem_and_no_page(client):
    for path in ["attempts/a/artefacts/b/c%0Ad", "nothing", "attempts/a/artefacts//"]:
        answer = client.put(f"/api/v1/{path}", b"")
        assert answer.status_code == 404, path
        assert answer.headers["Content-Type"] == "application/problem+json", path
        assert answer.json()["code"] == "no_such_address", path
    assert client.get("/nothing/here/").headers["Content-Type"].startswith("text/html")


# Whoever calls too often is told the limit and the wait; nobody else notices.


SLOW = {"per_second": 0.01, "burst": 3}


@pytest.fixture
def narrow(monkeypatch):
    """Make a limit so narrow that a test reaches it."""

    def make(module: str, name: str) -> None:
        limit = getattr(pace, name)._replace(**SLOW)
        monkeypatch.setattr(f"webapp.api.{module}.{name}", limit)

    return make


def statuses(call, times: int) -> list[int]:
    return [call().status_code for _ in range(times)]


def test_a_person_is_told_the_limit_and_when_to_come_back_and_others_go_on(alice, narrow, bob):
    narrow("auth", "PERSON")
    client = client_of(alice)
    assert statuses(lambda: client.get("/api/v1/tickets?topics=jobs"), 3) == [200] * 3
    refused = client.get("/api/v1/tickets?topics=jobs")
    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_calls")
    assert refused.headers["Retry-After"] in {"99", "100"}  # a second may pass meanwhile
    assert "One person may call 0.01 times a second" in refused.json()["detail"]
    assert 429 in statuses(lambda: client.get("/api/v1/tickets?topics=jobs"), 5)
    assert client_of(bob).get("/api/v1/tickets?topics=jobs").status_code == 200


def test_the_schema_names_every_field_of_a_refusal(alice, narrow):
    narrow("auth", "PERSON")
    client = client_of(alice)
    named = set(api.get_openapi_schema()["components"]["schemas"]["ProblemDocument"]["properties"])
    paths = ["/api/v1/jobs?limit=0", "/api/v1/jobs/none", "/api/v1/me", "/api/v1/me"]
    refusals = [one for one in map(client.get, paths) if one.status_code != 200]
    assert [one.status_code for one in refusals] == [422, 404, 429]
    assert {"errors", "retry_after_seconds"} <= {name for one in refusals for name in one.json()}
    assert [one.content for one in refusals if not set(one.json()) <= named] == []


def test_one_host_that_went_wild_leaves_the_others_alone(enrolled, team, narrow):
    narrow("agents", "HOST")
    _, other = enrol(team, name="Other")
    wild, calm = HostClient(enrolled[1]), HostClient(other)
    got = statuses(lambda: wild.post("/hosts/echo?num_bytes=1", ""), 5)
    assert got == [200, 200, 200, 429, 429]
    assert calm.post("/hosts/beat", make_beat()).status_code == 200


def test_credentials_that_no_host_has_are_counted_by_address_and_shut_out_no_host(
    db, narrow, as_host
):
    narrow("agents", "STRANGER")
    tries = [HostClient(f"guess-{n}").post("/hosts/echo", "").status_code for n in range(5)]
    assert tries == [401, 401, 401, 429, 429]
    statuses(lambda: HostClient("guess").post("/hosts/echo", ""), 5)
    assert as_host.post("/hosts/echo?num_bytes=1", "").status_code == 200


def test_tokens_are_not_tried_without_end(as_nobody, narrow):
    narrow("agents", "STRANGER")
    request = EnrollRequest(token="x" * 43, facts=make_facts(), sent_at_ms=1)
    tries = statuses(lambda: as_nobody.post("/hosts/enroll", request), 5)
    assert tries == [401, 401, 401, 429, 429]


def test_beats_have_a_limit_of_their_own(credential, narrow):
    narrow("agents", "BEAT")
    door = [knock(said(), bearer(credential)) for _ in range(4)]
    assert [answer.status for answer in door] == [200, 200, 200, 429]
    assert door[-1].headers[b"retry-after"] == b"100"
    assert digest(credential) not in str(door[-1].body)
