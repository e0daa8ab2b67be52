"""Times, places and kinds of bodies are read as documented, or refused by name."""

import json
from urllib.parse import quote

import pytest
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from tests.webapp.conftest import STARTED, batch_of, client_of
from webapp.accounts.models import Membership, Role
from webapp.agents.ingest import events_accept
from webapp.api.urls import api
from webapp.metrics.models import MetricSource

pytestmark = pytest.mark.django_db(databases="__all__")
GOOD = ["2030-11-28T00:00:00Z", "2030-11-28T00:00Z", "2030-11-28T01:00:00.25%2B01:00"]
ODD = ["20301128", "20261128", "2026", "0", "-1", "1.5", "1700000000000", "20301128T000000Z",
       "2026-11-28", "2026-11-28T09:00:00", "2026-W48-6T09:00:00Z", "٢026-11-28T09:00:00Z"]  # fmt: skip


def test_an_instant_is_iso_8601_with_a_zone_and_nothing_else(alice, job):
    client = client_of(alice)
    for path in (
        "jobs?created_after",
        "jobs?created_before",
        f"jobs/{job.pk}/series?metrics=loss&since",
    ):
        for text in GOOD:
            answer = client.get(f"/api/v1/{path}={text}")
            assert answer.status_code == 200, (path, text, answer.content)
        for text in ODD:
            answer = client.get(f"/api/v1/{path}={quote(text)}")
            assert (answer.status_code, text in answer.json()["detail"]) == (422, True), (
                path,
                text,
            )
        lost = client.get(f"/api/v1/{path}=2026-11-28T19:00:00+01:00")
        assert (lost.status_code, "%2B" in lost.json()["detail"]) == (422, True), path
        assert "Value error" not in lost.content.decode(), path  # pydantic's prefix
    assert client.get("/api/v1/jobs?created_after=2030-11-28T00:00:00Z").json()["items"] == []
    Membership.objects.filter(user=alice).update(role=Role.ADMIN)
    for text, status in (("2026-11-28", 200), ("20261128", 422), ("86400", 422), ("abc", 422)):
        assert client.get(f"/api/v1/audit?since={text}").status_code == status, text


def test_a_span_or_a_place_that_is_none_is_said(alice, attempt):
    client, job = client_of(alice), attempt.job
    phase = ("phase", {"name": "training"})
    events_accept(host=attempt.host, batch=batch_of(attempt, ("started", STARTED), phase))
    names = ["loss", "odd_seconds"]
    MetricSource.objects.create(attempt_id=attempt.pk, source="job", metrics=names)
    series = f"/api/v1/jobs/{job.pk}/series?metrics="
    for query, words in (
        ("nosuch", "reported loss, odd_seconds"),
        ("loss,nosuch", "no metric 'nosuch'"),
        ("loss&since=2026-11-29T00:00:00Z&until=2026-11-28T00:00:00Z", "after until"),
    ):
        answer = client.get(f"{series}{query}")
        assert (answer.status_code, words in answer.json()["detail"]) == (422, True), query
    assert client.get(f"{series}loss,odd_seconds,tokens_per_second").status_code == 200
    for what in ("log", "events"):
        beyond = client.get(f"/api/v1/jobs/{job.pk}/{what}?after=1000").json()
        assert beyond["last_seq"] == 2, what


def test_a_file_is_sent_in_a_form(alice):
    answer = client_of(alice).post("/api/v1/data", '{"file": "a"}', "application/json")
    assert (answer.status_code, "multipart/form-data" in answer.json()["detail"]) == (415, True)


def test_the_document_is_one_of_openapi_3_1():
    document = json.loads(json.dumps(api.get_openapi_schema()))
    faults = [str(fault)[:300] for fault in OPENAPI_31_VALIDATOR.iter_errors(document)]
    assert faults == []
    operations = [each for path in document["paths"].values() for each in path.items()]
    parameters = [one for _, each in operations for one in each.get("parameters", ())]
    assert all(isinstance(one.get("examples", {}), dict) for one in parameters)
    of_hosts = [each for _, each in operations if each["tags"] == ["host agents"]]
    assert len(of_hosts) == 15
    assert not any({"TokenAuth": []} in each.get("security", ()) for each in of_hosts)
