"""What pages and scripts read: series, events, tickets."""

import pytest

from tests.webapp.conftest import STARTED, batch_of, client_of
from webapp.api.jobs import MAX_EVENT_BYTES
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import AttemptEvent
from webapp.live.publish import read_ticket

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


def test_a_series_comes_with_times_and_values(alice, reported):
    answer = get(alice, f"/jobs/{reported.job_id}/series?metrics=loss,unknown").json()
    assert answer["attempt"] == reported.pk
    assert [(item["metric"], item["value"]) for item in answer["series"]] == [("loss", [2.0, 1.5])]


def test_a_series_begins_after_since(alice, reported):
    first = get(alice, f"/jobs/{reported.job_id}/series?metrics=loss").json()["series"][0]
    later = get(alice, f"/jobs/{reported.job_id}/series?metrics=loss&since={first['t_ms'][0] + 1}")
    assert later.json()["series"][0]["value"] == [1.5]


def test_what_was_not_measured_is_null(alice, attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, point(float("nan"))))
    answer = get(alice, f"/jobs/{attempt.job_id}/series?metrics=loss").json()
    assert answer["series"][0]["value"] == [None]


def test_a_job_without_an_attempt_has_no_series(alice, draft):
    answer = get(alice, f"/jobs/{draft.pk}/series?metrics=loss").json()
    assert (answer["attempt"], answer["series"]) == (None, [])


def test_too_many_points_are_refused_by_name(alice, reported):
    answer = get(alice, f"/jobs/{reported.job_id}/series?metrics=loss&points=99999")
    assert (answer.status_code, "points" in answer.json()["detail"]) == (422, True)


def test_events_come_in_order_after_a_number(alice, reported):
    answer = get(alice, f"/jobs/{reported.job_id}/events?after=1").json()
    assert [(event["seq"], event["kind"]) for event in answer["events"]] == [(4, "log")]
    assert answer["last_seq"] == 4


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


def test_events_can_be_narrowed_to_kinds(alice, reported):
    answer = get(alice, f"/jobs/{reported.job_id}/events?kind=started").json()
    assert [event["kind"] for event in answer["events"]] == ["started"]


@pytest.mark.parametrize("path", ["series?metrics=loss", "events"])
def test_another_teams_job_does_not_exist(charlie, reported, path):
    assert get(charlie, f"/jobs/{reported.job_id}/{path}").status_code == 404


@pytest.mark.parametrize("path", ["series?metrics=loss", "events"])
def test_a_team_mate_and_a_viewer_may_read(bob, vera, reported, path):
    answers = [get(user, f"/jobs/{reported.job_id}/{path}").status_code for user in (bob, vera)]
    assert answers == [200, 200]


def test_without_a_session_nothing_is_told(client, reported):
    answer = client.get(f"/api/v1/jobs/{reported.job_id}/events")
    assert (answer.status_code, answer.json()["code"]) == (401, "not_authenticated")


def test_a_ticket_names_what_its_holder_may_follow(alice, reported):
    answer = get(alice, f"/tickets?topics=job:{reported.job_id}").json()
    assert read_ticket(answer["ticket"]) == (alice.pk, (f"job:{reported.job_id}",))


def test_a_ticket_for_more_topics_than_a_page_has_is_refused_with_the_limit(alice, job):
    many = ",".join(f"job:{number}" for number in range(33))

    answer = get(alice, f"/tickets?topics={many}")

    assert answer.status_code == 422
    assert "33 topics" in answer.json()["detail"]
    assert "at most 32" in answer.json()["detail"]


def test_the_same_topic_many_times_is_one_topic(alice, job):
    answer = get(alice, f"/tickets?topics={','.join([f'job:{job.pk}'] * 500)}")

    assert read_ticket(answer.json()["ticket"]) == (alice.pk, (f"job:{job.pk}",))


@pytest.mark.parametrize("key", ["x" * 4000, "%F0%9F%9A%A2", "a b", "'--"])
def test_a_hostile_key_is_no_topic(alice, key):
    answer = get(alice, f"/tickets?topics=job:{key},plan:{key}")

    assert answer.status_code == 200
    assert read_ticket(answer.json()["ticket"]) == (alice.pk, ())
