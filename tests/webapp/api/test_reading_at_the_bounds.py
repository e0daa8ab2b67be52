"""Series, events and tickets at the bounds of what a script may ask for."""

import pytest
from django.test import Client

from tests.webapp.conftest import STARTED, batch_of, client_of
from webapp.accounts.models import Membership
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import Attempt, AttemptEvent, Job
from webapp.live.publish import read_ticket

pytestmark = pytest.mark.django_db(databases="__all__")
PROBLEM = "application/problem+json"
FIRST_MS = 1_700_000_000_000  # the instant of the first event that batch_of makes
BEYOND_EVERYTHING = 10**20  # more than any database has in an integer


def points(*losses: float) -> list[tuple[str, dict]]:
    return [("metric", {"source": "job", "values": {"loss": loss}}) for loss in losses]


@pytest.fixture
def reported(attempt) -> Attempt:
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


def test_both_ends_of_a_range_belong_to_it(alice, reported):
    second = FIRST_MS + 2000  # the point with loss 2

    assert losses(alice, reported, f"&since={second}&until={second}") == [2.0]
    assert losses(alice, reported, f"&since={second}") == [2.0, 1.0]
    assert losses(alice, reported, f"&until={second}") == [3.0, 2.0]


def test_a_range_that_ends_before_it_begins_is_empty(alice, reported):
    assert losses(alice, reported, f"&since={FIRST_MS + 3000}&until={FIRST_MS}") == []


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (f"&since={BEYOND_EVERYTHING}", []),
        (f"&since=-{BEYOND_EVERYTHING}", [3.0, 2.0, 1.0]),
        (f"&until={BEYOND_EVERYTHING}", [3.0, 2.0, 1.0]),
        (f"&until=-{BEYOND_EVERYTHING}", []),
    ],
)
def test_an_instant_that_no_database_can_hold_is_only_far_away(alice, reported, more, expected):
    assert losses(alice, reported, more) == expected


@pytest.mark.parametrize(
    ("points_wanted", "bound"), [("9", "10"), ("5001", "5000"), ("0", "10"), ("-600", "10")]
)
def test_a_number_of_points_out_of_bounds_is_refused_with_the_bound(
    alice, reported, points_wanted, bound
):
    answer = ask(alice, reported, f"series?metrics=loss&points={points_wanted}")

    assert (answer.status_code, answer["Content-Type"]) == (422, PROBLEM)
    assert answer.json()["errors"][0]["field"] == "query.points"
    assert answer.json()["detail"].endswith(f"equal to {bound}.")


@pytest.mark.parametrize("number", [10, 5000])
def test_a_number_of_points_at_its_bound_is_taken(alice, reported, number):
    assert losses(alice, reported, f"&points={number}") == [3.0, 2.0, 1.0]


@pytest.mark.parametrize("field", ["since", "until", "points"])
def test_what_is_no_number_is_refused_by_the_name_of_its_field(alice, reported, field):
    answer = ask(alice, reported, f"series?metrics=loss&{field}=yesterday")

    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == [f"query.{field}"]


def test_each_wrong_field_is_named_and_the_first_is_said(alice, reported):
    answer = ask(alice, reported, "series?since=a&points=b").json()

    assert {one["field"] for one in answer["errors"]} == {
        "query.metrics",
        "query.since",
        "query.points",
    }
    assert answer["errors"][0]["field"] in answer["detail"]


def test_a_metric_asked_for_twice_comes_once(alice, reported):
    found = ask(alice, reported, "series?metrics=loss,%20loss,,loss").json()["series"]

    assert [one["metric"] for one in found] == ["loss"]


@pytest.mark.parametrize("wish", ["", ",,", "%20", "LOSS", "lo"])
def test_a_wish_that_names_no_metric_gives_none(alice, reported, wish):
    answer = ask(alice, reported, f"series?metrics={wish}")

    assert (answer.status_code, answer.json()["series"]) == (200, [])


def test_a_metric_of_two_sources_comes_once_for_each(alice, reported):
    other = ("metric", {"source": "host", "values": {"loss": 7.0}})
    events_accept(host=reported.host, batch=batch_of(reported, other, first=6))

    found = ask(alice, reported, "series?metrics=loss").json()["series"]

    assert {one["source"]: one["value"] for one in found} == {"host": [7.0], "job": [3, 2, 1]}


# Events


def test_points_are_no_events(alice, reported):
    assert numbers(alice, reported) == [1, 5]


def test_going_on_from_the_last_number_reads_everything_once(alice, reported):
    first = ask(alice, reported, "events").json()

    again = ask(alice, reported, f"events?after={first['last_seq']}").json()

    assert (again["events"], again["last_seq"]) == ([], first["last_seq"])


def test_the_thousandth_event_is_in_the_first_answer_and_the_next_in_the_second(alice, reported):
    AttemptEvent.objects.bulk_create(
        AttemptEvent(attempt=reported, seq=seq, t_ms=FIRST_MS, kind="log", body={})
        for seq in range(6, 1006)
    )

    first = ask(alice, reported, "events").json()
    rest = ask(alice, reported, f"events?after={first['last_seq']}").json()

    assert len(first["events"]) == 1000
    assert [event["seq"] for event in rest["events"]] == [1004, 1005]


@pytest.mark.parametrize(
    ("after", "found"),
    [(-1, [1, 5]), (0, [1, 5]), (1, [5]), (4, [5]), (5, []), (BEYOND_EVERYTHING, [])],
)
def test_events_begin_beyond_the_number_asked_for(alice, reported, after, found):
    assert numbers(alice, reported, f"?after={after}") == found


@pytest.mark.parametrize(
    ("kinds", "found"), [("log", [5]), ("log,started", [1, 5]), (",", []), ("LOG", [])]
)
def test_several_kinds_of_events_are_told_apart_by_commas(alice, reported, kinds, found):
    assert numbers(alice, reported, f"?kind={kinds}") == found


def test_a_job_between_two_attempts_tells_nothing_of_the_one_before(alice, reported):
    Job.objects.filter(pk=reported.job_id).update(current_attempt=None)

    answer = ask(alice, reported, "events").json()

    assert (answer["attempt"], answer["events"]) == (None, [])


@pytest.mark.parametrize("path", ["series?metrics=loss", "events"])
def test_a_deleted_job_is_told_like_one_that_never_was(alice, reported, path):
    Job.objects.filter(pk=reported.job_id).update(deleted_at="2026-01-01T00:00:00Z")

    answer = ask(alice, reported, path)

    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


# Tickets


def ticket_topics(user, topics: str) -> tuple[str, ...]:
    answer = client_of(user).get("/api/v1/tickets", {"topics": topics})
    return read_ticket(answer.json()["ticket"])[1]


def test_a_ticket_leaves_out_what_is_not_ones_own_and_keeps_the_rest(charlie, alice, host, job):
    wanted = f"job:{job.pk}, host:{host.pk},nothing,job:"

    assert ticket_topics(alice, wanted) == (f"host:{host.pk}", f"job:{job.pk}")
    assert ticket_topics(charlie, wanted) == ()


def test_a_ticket_names_each_topic_once(alice, job):
    assert ticket_topics(alice, f"job:{job.pk},job:{job.pk}") == (f"job:{job.pk}",)


def test_a_member_of_two_teams_follows_the_lists_of_both(alice, team, other_team):
    Membership.objects.create(user=alice, team=other_team, role="viewer")

    assert set(ticket_topics(alice, "jobs")) == {f"jobs:{team.pk}", f"jobs:{other_team.pk}"}


def test_who_left_the_team_gets_no_new_ticket_for_it(bob, team, job):
    before = ticket_topics(bob, f"job:{job.pk}")
    bob.memberships.all().delete()

    assert (before, ticket_topics(bob, f"job:{job.pk},jobs")) == ((f"job:{job.pk}",), ())


def test_a_ticket_without_topics_named_is_refused_by_the_field(alice):
    answer = client_of(alice).get("/api/v1/tickets")

    assert answer.status_code == 422
    assert "query.topics" in answer.json()["detail"]


def test_nobody_gets_no_ticket(db):
    answer = Client().get("/api/v1/tickets?topics=jobs")

    assert (answer.status_code, answer["Content-Type"]) == (401, PROBLEM)
