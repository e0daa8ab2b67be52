"""Publishing helps where it can and never hurts."""

import json

import pytest

from tests.webapp.conftest import STARTED, batch_of
from webapp.jobs import ingest
from webapp.jobs.ingest import Pace, events_accept
from webapp.live import publish as publish_module
from webapp.live.publish import STREAM, publish

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture(autouse=True)
def _untripped(monkeypatch):
    monkeypatch.setattr(publish_module, "_breaker", publish_module.Breaker())
    monkeypatch.setattr(ingest, "list_pace", Pace())


def published(client) -> list[tuple[str, str, dict]]:
    entries = client.xrange(STREAM)
    return [
        (fields[b"t"].decode(), fields[b"e"].decode(), json.loads(fields[b"d"]))
        for _, fields in entries
    ]


def test_a_message_stands_in_the_stream(redis_client):
    assert publish("job:1", "job.state", {"state": "running"})
    assert published(redis_client) == [("job:1", "job.state", {"state": "running"})]


def test_without_redis_it_says_no(settings, tmp_path):
    settings.REDIS_URL = f"unix://{tmp_path}/nobody.sock"
    assert not publish("job:1", "job.state", {})


def test_after_a_failure_it_does_not_ask_again_at_once(settings, tmp_path, monkeypatch):
    settings.REDIS_URL = f"unix://{tmp_path}/nobody.sock"
    publish("job:1", "job.state", {})
    monkeypatch.setattr("webapp.live.publish.connection", lambda: pytest.fail("asked again"))

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


def test_a_new_state_goes_to_the_page_and_to_the_teams_list(reported, attempt):
    topics = [topic for topic, _ in reported["job.state"]]
    assert topics == [f"job:{attempt.job_id}", f"jobs:{attempt.job.team_id}"]
    assert reported["job.state"][0][1]["state"] == "running"


def test_of_progress_only_the_last_is_told(reported):
    _, data = reported["job.progress"][0]
    assert (data["done"], data["phase"], len(reported["job.progress"])) == (2, "Training", 2)


def test_a_list_hears_of_progress_once_a_second():
    at = [0.0]
    pace = Pace(lambda: at[0])
    heard = []
    for tenth in range(25):
        at[0] = tenth / 10
        heard.append(pace.may_go("team"))
    assert heard.count(True) == 3


def test_teams_do_not_slow_each_other():
    pace = Pace(lambda: 0.0)
    assert [pace.may_go("a"), pace.may_go("b"), pace.may_go("a")] == [True, True, False]


def test_points_go_together_without_what_json_cannot_say(reported):
    ((_, data),) = reported["job.metric"]
    assert [point["values"] for point in data["points"]] == [{"loss": 2.0}]


def test_lines_go_together_with_their_numbers(reported):
    ((_, data),) = reported["job.log"]
    assert [(line["seq"], line["text"]) for line in data["lines"]] == [(6, "a"), (7, "b")]


def test_the_result_is_told(reported):
    ((_, data),) = reported["job.result"]
    assert data["measured"] == {"step_seconds": 1.0}
