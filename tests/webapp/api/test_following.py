"""Jobs by script: lists by cursor, the log in pieces, and the stream of a job's events."""

import asyncio
import json
from datetime import timedelta

import pytest
from asgiref.sync import sync_to_async
from django.test import AsyncClient

from runners.jobspec import TrainSpec
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, client_of
from webapp.agents.ingest import events_accept
from webapp.api import jobs as api_jobs
from webapp.api.urls import api
from webapp.core.clock import now
from webapp.jobs.models import Attempt, Job
from webapp.jobs.services import job_create

pytestmark = pytest.mark.django_db(databases="__all__")


def log(text: str, stream: str = "stdout") -> tuple[str, dict]:
    return ("log", {"stream": stream, "text": text})


def get(user, path: str):
    return client_of(user).get(f"/api/v1{path}")


@pytest.fixture
def many(team, alice, host) -> list[str]:
    """Seven jobs, the newest first; two of them were created at the same instant."""
    made = [
        job_create(
            team=team,
            owner=alice,
            host=host,
            spec=TrainSpec(),
            name=f"job {number}",
            model_name="",
        )
        for number in range(7)
    ]
    instant = now() - timedelta(hours=1)
    for number, job in enumerate(made):
        at = instant + timedelta(seconds=max(1, number))
        Job.objects.filter(pk=job.pk).update(created_at=at)
    return [job.pk for job in Job.objects.order_by("-created_at", "-pk")]


def test_pages_hold_each_job_once_though_new_ones_come(alice, team, host, many):
    found, path = [], "/jobs?limit=3"
    while path:
        page = get(alice, path).json()
        found += [each["id"] for each in page["items"]]
        job_create(team=team, owner=alice, host=host, spec=TrainSpec(), name="new", model_name="")
        path = page["next_cursor"] and f"/jobs?limit=3&cursor={page['next_cursor']}"
    assert found == many
    before_the_year_1 = "WyIwMDAxLTAxLTAxVDAwOjAwOjAwKzIzOjU5IiwiYSJd"
    for cursor in ("x", "e30", "WyJhIl0", "WzEsMl0", "😀", before_the_year_1):
        answer = get(alice, f"/jobs?cursor={cursor}")
        assert (answer.status_code, answer.json()["code"]) == (422, "cursor"), cursor


def test_filters_find_jobs_and_an_unknown_state_is_named(alice, host, many):
    assert len(get(alice, f"/jobs?host={host.slug}&owner=alice&kind=train").json()["items"]) == 7
    assert [one["name"] for one in get(alice, "/jobs?q=JOB 3").json()["items"]] == ["job 3"]
    assert get(alice, "/jobs?state=running,queued").json()["items"] == []
    answer = get(alice, "/jobs?state=dancing")
    assert (answer.status_code, "dancing" in answer.json()["detail"]) == (422, True)
    assert get(alice, "/jobs?limit=201").status_code == 422


def test_jobs_of_a_time_come_in_either_order_page_by_page(alice, many):
    named = [one["name"] for one in get(alice, "/jobs?limit=200").json()["items"]]
    found, cursor = [], ""
    while cursor is not None:
        page = get(alice, f"/jobs?sort=created_at&limit=3&cursor={cursor}").json()
        found, cursor = [*found, *(one["name"] for one in page["items"])], page["next_cursor"]
    assert found == named[::-1]
    times = [one["created_at"] for one in get(alice, "/jobs?sort=created_at").json()["items"]]
    span = f"created_after={times[2]}&created_before={times[-1]}"
    for sort, expected in (("created_at", found[2:-1]), ("-created_at", found[2:-1][::-1])):
        items = get(alice, f"/jobs?{span}&sort={sort}").json()["items"]
        assert [one["name"] for one in items] == expected, sort
    assert get(alice, "/jobs?created_after=2026-11-28").status_code == 422  # no time zone
    assert get(alice, "/jobs?sort=name").status_code == 422


def test_a_job_says_what_its_page_says(alice, job, attempt):
    found = get(alice, f"/jobs/{job.pk}").json()
    assert (found["state"], found["is_final"], found["host"]) == ("starting", False, "box")
    assert found["spec"]["kind"] == "train"
    assert [each["number"] for each in found["attempts"]] == [1]
    assert found["allowed"] == ["stop", "run_again"]
    stopped = client_of(alice).post(f"/api/v1/jobs/{job.pk}/stop").json()
    assert (stopped["state"], stopped["allowed"]) == ("stopping", ["run_again"])
    Job.objects.filter(pk=job.pk).update(state="stopped", reason="stopped_by_user")
    again = client_of(alice).post(f"/api/v1/jobs/{job.pk}/stop")
    assert (again.status_code, again.json()["code"]) == (409, "not_stoppable")
    ended = get(alice, f"/jobs/{job.pk}").json()
    assert ended["allowed"] == ["run_again", "delete"]
    outcome = ended["outcome"]
    assert outcome["reason"] == "stopped_by_user"
    assert outcome["sentence"]
    Attempt.objects.update(started_at=now())
    assert "resume" in get(alice, f"/jobs/{job.pk}").json()["allowed"]
    resumed = client_of(alice).post(f"/api/v1/jobs/{job.pk}/resume").json()
    assert (resumed["spec"]["resume_from"], resumed["host"]) == (job.pk, "box")
    copy = client_of(alice).post(f"/api/v1/jobs/{job.pk}/run-again").json()
    assert (copy["spec"], copy["name"].endswith("(copy)")) == (found["spec"], True)


def test_the_log_comes_in_pieces_without_a_line_twice_or_half(alice, attempt):
    batch = batch_of(attempt, ("started", STARTED), log("one\ntwo\nthr"), log("\rthree\nfour\n"))
    events_accept(host=attempt.host, batch=batch)
    path = f"/jobs/{attempt.job_id}/log"
    last = get(alice, f"{path}?limit=2").json()
    assert [line["text"] for line in last["lines"]] == ["three", "four"]
    found, after = [], 0
    while piece := (answer := get(alice, f"{path}?after={after}&limit=1").json())["lines"]:
        found += [line["text"] for line in piece if line["stream"] == "stdout"]
        after = answer["last_seq"]
    assert found == ["one", "two", "three", "four"]
    assert [one["text"] for one in get(alice, f"{path}?q=OU").json()["lines"]] == ["four"]


def test_a_search_after_an_event_skips_other_lines_and_reads_to_the_end(
    alice, attempt, monkeypatch
):
    monkeypatch.setattr("webapp.api.jobs.EVENTS_AT_ONCE", 2)
    outputs = [log(f"line {number}\n") for number in range(6)]
    batch = batch_of(attempt, ("started", STARTED), *outputs, log("An ERROR\n"), log("more\n"))
    events_accept(host=attempt.host, batch=batch)
    path = f"/jobs/{attempt.job_id}/log"
    found = get(alice, f"{path}?after=0&q=error").json()
    assert [line["text"] for line in found["lines"]] == ["An ERROR"]
    rest = get(alice, f"{path}?after={found['last_seq']}&q=error").json()
    last = get(alice, path).json()["last_seq"]
    assert (rest["lines"], rest["last_seq"]) == ([], last)


def frames_of(text: str) -> list[tuple[str, dict]]:
    parts = [part.splitlines() for part in text.split("\n\n") if "event:" in part]
    named = [dict(line.split(": ", 1) for line in part) for part in parts]
    return [(part["event"], json.loads(part["data"])) for part in named]


def documented_events() -> list[str]:
    schema = api.get_openapi_schema()["paths"]["/api/v1/jobs/{job_id}/stream"]["get"]
    event = schema["responses"][200]["content"]["text/event-stream"]["schema"]
    assert set(event["properties"]) == {"event", "data", "id"}
    return event["properties"]["event"]["enum"]


async def read(user, path: str, *, last: str = "") -> str:
    client = AsyncClient()
    await sync_to_async(client.force_login)(user)
    headers = {"Last-Event-ID": last} if last else {}
    answer = await client.get(f"/api/v1{path}", headers=headers)
    assert answer.status_code == 200, answer.content
    async with asyncio.timeout(30):
        return "".join([part.decode() async for part in answer.streaming_content])


@pytest.mark.django_db(databases="__all__", transaction=True)
def test_a_stream_tells_log_state_and_metrics_until_the_end(alice, attempt, monkeypatch):
    monkeypatch.setattr(api_jobs, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(api_jobs, "now_ms", lambda: 0)
    point = ("metric", {"source": "job", "values": {"loss": 1.5}})
    batch = batch_of(attempt, ("started", STARTED), log("a\nhalf"), point, ("exited", EXIT_OK))
    events_accept(host=attempt.host, batch=batch)
    path = f"/jobs/{attempt.job_id}/stream?kinds=log,state,metric"
    found = frames_of(asyncio.run(read(alice, path)))
    assert {event for event, _ in found} == set(documented_events())
    lines = [data["text"] for event, data in found if event == "log"]
    assert lines[1:3] == ["a", "half"]
    assert [data["state"] for event, data in found if event == "state"][-1] == "succeeded"
    assert [data["value"] for event, data in found if event == "metric"] == [[1.5]]
    assert found[-1] == ("end", {})
    number = next(
        data["seq"] for event, data in found if event == "log" and data["text"] == "half"
    )
    rest = frames_of(asyncio.run(read(alice, path, last=str(number))))
    assert [data["text"] for event, data in rest if event == "log"] == lines[3:]


def test_streams_are_few_per_person_and_only_of_known_kinds(alice, job, monkeypatch):
    assert "dance" in get(alice, f"/jobs/{job.pk}/stream?kinds=dance").json()["detail"]
    monkeypatch.setattr(api_jobs, "_open_streams", {alice.pk: api_jobs.MOST_STREAMS_EACH})
    answer = get(alice, f"/jobs/{job.pk}/stream")
    assert (answer.status_code, answer["Retry-After"]) == (429, "10")
