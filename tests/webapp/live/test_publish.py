"""Live events: who publishes and who may read them, and how their server ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from django.contrib.auth.models import AnonymousUser
from django.core.signing import TimestampSigner

from tests.webapp.conftest import STARTED, batch_of
from webapp.agents import live_messages
from webapp.agents.ingest import events_accept
from webapp.agents.live_messages import Pace
from webapp.live import stream as publish_module
from webapp.live.stream import SALT, STREAM, publish, read_ticket, ticket_for
from webapp.plans.models import Plan

# Publishing helps where it can and never hurts.


pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture(autouse=True)
def _untripped(monkeypatch):
    monkeypatch.setattr(publish_module, "_breaker", publish_module.Breaker())
    monkeypatch.setattr(live_messages, "list_pace", Pace())


def published(client) -> list[tuple[str, str, dict]]:
    entries = client.xrange(STREAM)
    return [
        (fields[b"t"].decode(), fields[b"e"].decode(), json.loads(fields[b"d"]))
        for _, fields in entries
    ]


def test_a_message_stands_in_the_stream(redis_client):
    assert publish("job:1", "job.state", {"state": "running"})
    assert published(redis_client) == [("job:1", "job.state", {"state": "running"})]


def test_the_stream_is_bounded_in_bytes_and_keeps_the_newest(redis_client, monkeypatch):
    monkeypatch.setattr(publish_module, "MAX_BYTES", 1024**2)
    monkeypatch.setattr(publish_module, "CHECK_BYTES", 60 * 1024)
    assert publish_module.publish_all(
        ("job:1", "job.log", {"n": n, "text": "x" * (10 if n < 100 else 60 * 1024)})
        for n in range(140)
    )
    for n in range(140, 150):
        assert publish("job:1", "job.log", {"n": n, "text": "x" * 60 * 1024})
    assert redis_client.memory_usage(STREAM, samples=0) <= 1024**2 + 64 * 1024
    kept = [data["n"] for _, _, data in published(redis_client)]
    assert len(kept) > 5
    assert kept == [*range(150 - len(kept), 150)]


def test_without_redis_it_says_no_and_does_not_ask_again_at_once(settings, tmp_path, monkeypatch):
    settings.REDIS_URL = f"unix://{tmp_path}/nobody.sock"
    assert not publish("job:1", "job.state", {})
    publish("job:1", "job.state", {})
    monkeypatch.setattr("webapp.live.stream.connection", lambda: pytest.fail("asked again"))
    assert not publish("job:1", "job.state", {})


@pytest.fixture
def reported(redis_client, attempt, django_capture_on_commit_callbacks):
    """What a batch of every kind publishes."""
    redis_client.delete(STREAM)
    batch = batch_of(
        attempt,
        ("started", STARTED),
        ("phase", {"name": "Training"}),
        ("progress", {"done": 1, "total": 4, "unit": "steps"}),
        ("progress", {"done": 2, "total": 4, "unit": "steps"}),
        ("metric", {"source": "job", "values": {"loss": 2.0, "grad_norm": float("inf")}}),
        ("log", {"stream": "stdout", "text": "a"}),
        ("log", {"stream": "stdout", "text": "b"}),
        ("result", {"measured": {"step_seconds": 1.0}, "notes": {}}),
    )
    with django_capture_on_commit_callbacks(execute=True):
        events_accept(host=attempt.host, batch=batch)
    found: dict = {}
    for topic, event, data in published(redis_client):
        found.setdefault(event, []).append((topic, data))
    return found


def test_a_batch_tells_state_last_progress_lines_and_that_more_came(reported, attempt):
    topics = [topic for topic, _ in reported["job.state"]]
    assert topics == [f"job:{attempt.job_id}", f"jobs:{attempt.job.team_id}"]
    assert reported["job.state"][0][1]["state"] == "running"
    _, data = reported["job.progress"][0]
    assert (data["done"], data["phase"], len(reported["job.progress"])) == (2, "Training", 2)
    ((_, data),) = reported["job.metric"]
    assert data == {"host": 0}  # a page reads the points with its regions
    ((_, data),) = reported["job.log"]
    assert [(line["seq"], line["text"]) for line in data["lines"]] == [(6, "a"), (7, "b")]
    ((_, data),) = reported["job.result"]
    assert data == {"host": 0}


def test_a_list_hears_of_progress_once_a_second_whatever_others_do():
    at = [0.0]
    pace = Pace(lambda: at[0])
    heard = []
    for tenth in range(25):
        at[0] = tenth / 10
        heard.append(pace.may_go("team"))
    assert heard.count(True) == 3
    pace = Pace(lambda: 0.0)
    assert [pace.may_go("a"), pace.may_go("b"), pace.may_go("a")] == [True, True, False]


# A real server: open streams end quickly when it is told to stop.


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def server(port, redis_server, settings):
    environment = os.environ | {
        "REDIS_URL": redis_server.url,
        "SLIPWAY_SECRET_KEY": settings.SECRET_KEY,
    }
    command = [sys.executable, "-m", "uvicorn", "webapp.asgi:application", "--port", str(port)]
    process = subprocess.Popen([*command, "--timeout-graceful-shutdown", "20"], env=environment)
    for _ in range(200):
        try:
            httpx.get(f"http://127.0.0.1:{port}/healthz")
            break
        except httpx.HTTPError:
            time.sleep(0.1)
    yield process
    process.kill()
    process.wait()


def test_term_ends_open_streams_with_a_farewell_at_once(server, port):
    ticket = TimestampSigner(salt=SALT).sign_object({"u": 1, "t": ["job:1"]})
    url, headers = f"http://127.0.0.1:{port}/live/", {"Live-Ticket": ticket}
    with httpx.stream("GET", url, headers=headers, timeout=10) as answer:
        chunks = answer.iter_text()
        assert "retry: 3000" in next(chunks)
        server.send_signal(signal.SIGTERM)
        rest = "".join(chunks)
    assert "event: bye" in rest
    server.wait(600)


# A ticket names only what its holder may see.


def topics(user, *wanted: str) -> tuple[str, ...]:
    return read_ticket(ticket_for(user, wanted))[1]


def test_members_follow_the_teams_jobs_and_hosts_and_another_team_neither(
    bob, vera, draft, host, charlie
):
    wanted = (f"host:{host.pk}", f"job:{draft.pk}")
    assert topics(bob, *wanted) == topics(vera, *wanted) == wanted
    assert topics(charlie, f"job:{draft.pk}", f"host:{host.pk}") == ()
    assert topics(AnonymousUser(), "jobs", f"job:{draft.pk}") == ()


def test_plans_can_be_followed_too(alice, charlie, team):
    plan = Plan.objects.create(team=team, owner=alice)
    assert topics(alice, f"plan:{plan.pk}") == (f"plan:{plan.pk}",)
    assert topics(charlie, f"plan:{plan.pk}") == ()


def test_lists_are_those_of_the_own_team(alice, charlie, team, other_team):
    assert topics(alice, "jobs", "hosts") == (f"hosts:{team.pk}", f"jobs:{team.pk}")
    assert topics(charlie, "jobs") == (f"jobs:{other_team.pk}",)
    assert topics(charlie, f"jobs:{team.pk}") == ()


def test_what_is_no_topic_is_left_out(alice):
    for topic in ["", "revoke:1", "user:1", "job:", "job:nope", "*"]:
        assert topics(alice, topic) == (), topic
