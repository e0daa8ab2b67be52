"""Logs and metrics of a job on several hosts: one page, one host at a time."""

import pytest
from django.urls import reverse

from runners.messages import MetricPoint
from tests.webapp.conftest import batch_of, client_of
from tests.webapp.jobs.gangs import end, make_gang, make_hosts, members, silence, start, tell
from webapp.jobs.ingest import announce
from webapp.jobs.models import Job
from webapp.jobs.plots import draw

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def gang(team, alice):
    """A training on two hosts, each of which has said something."""
    job = make_gang(team, alice, make_hosts(team, 2))
    for member in start(job):
        name = f"rank {member.node_rank}"
        point = MetricPoint(source="job", values={"loss": 3.0 + member.node_rank}, step=1)
        tell(
            member,
            ("log", {"stream": "stdout", "text": f"[{name}] step 1\n"}),
            ("metric", point.model_dump(mode="json")),
        )
    job.refresh_from_db()
    return job


def page(job, user, name: str, **query: str) -> str:
    return client_of(user).get(reverse(name, args=[job.pk]), query).content.decode()


@pytest.mark.parametrize("name", ["job-logs", "job-metrics"])
def test_every_host_is_offered_with_how_it_stands(gang, alice, name):
    end(members(gang)[1], "oom_gpu")

    text = page(gang, alice, name)

    assert 'aria-current="page">Box 1 <span>running</span>' in text
    assert 'Box 2 <span class="bad">oom gpu</span>' in text


def test_a_silent_host_is_not_said_to_be_running(gang, alice):
    silence(members(gang)[1].host, minutes=4)

    text = page(gang, alice, "job-logs").replace("\N{NO-BREAK SPACE}", " ")

    assert 'Box 2 <span class="warn">silent 4 min' in text


def test_a_job_on_one_host_offers_no_choice(job, alice):
    assert 'aria-label="Host"' not in page(job, alice, "job-logs")


def test_the_log_is_that_of_the_chosen_host(gang, alice):
    first, second = (page(gang, alice, "job-logs", host=rank) for rank in ("0", "1"))

    assert "[rank 0] step 1" in first
    assert "[rank 1]" not in first
    assert "[rank 1] step 1" in second


def test_a_filter_keeps_the_chosen_host(gang, alice):
    text = page(gang, alice, "job-logs", host="1", q="step")

    assert '<input type="hidden" name="host" value="1">' in text


@pytest.mark.parametrize("asked", ["7", "-1", "x", "\u0661", "99999999999999999999"])
def test_a_host_that_is_not_there_shows_the_first(gang, alice, asked):
    assert "[rank 0] step 1" in page(gang, alice, "job-logs", host=asked)


def test_the_charts_are_those_of_the_chosen_host(gang):
    losses = [
        next(each for each in draw(gang, part=part) if each.chart.metric == "loss").series.values
        for part in members(gang)
    ]

    assert losses == [(3.0,), (4.0,)]


def test_only_the_first_host_is_held_against_the_prediction(gang):
    said = {"tokens_per_second": {"value": 5.0}}
    Job.objects.filter(pk=gang.pk).update(prediction=said)
    point = MetricPoint(source="job", values={"tokens_per_second": 9.0}, step=2)
    for part in members(gang):
        tell(part, ("metric", point.model_dump(mode="json")))

    first, second = (draw(gang, part=part) for part in members(gang))

    assert any(each.prediction for each in first)
    assert not any(each.prediction for each in second)


def test_a_script_reads_each_hosts_events(gang, alice):
    answer = client_of(alice).get(f"/api/v1/jobs/{gang.pk}/events", {"host": 1, "kind": "log"})

    assert [event["body"]["text"] for event in answer.json()["events"]] == ["[rank 1] step 1\n"]


def test_a_script_that_asks_for_a_host_too_many_is_told(gang, alice):
    answer = client_of(alice).get(f"/api/v1/jobs/{gang.pk}/series", {"host": 2, "metrics": "loss"})

    assert answer.status_code == 422
    assert "the job runs on 2" in answer.json()["detail"]


def test_frames_say_which_host_speaks_and_only_the_first_moves_the_bar(gang, monkeypatch):
    sent = []
    monkeypatch.setattr("webapp.jobs.ingest.publish_all", sent.extend)
    second = members(gang)[1]
    batch = batch_of(
        second, ("phase", {"name": "Training"}), ("log", {"stream": "stdout", "text": "x"})
    )
    announce(second, list(batch.events))

    assert [(kind, data["host"]) for _, kind, data in sent] == [("job.log", 1)]
