"""A signed ping through Redis to a host's worker and back, timed; and what happens without one."""

import time

import pytest

from runners.messages import Doorbell
from runners.redis_address import pong_key
from tests.webapp.conftest import make_beat, make_facts
from webapp.hosts.heartbeats import host_beat
from webapp.hosts.round_trips import RoundTrips
from webapp.hosts.services import checks_update

pytestmark = pytest.mark.django_db


class Bell:
    """A host's worker in this process: it answers each ping as it is told."""

    def __init__(self, client, *answers: str) -> None:
        self.client = client
        self.answers = list(answers)
        self.rung: list[Doorbell] = []

    def __call__(self, host, doorbell: Doorbell) -> None:
        self.rung.append(doorbell)
        for answer in self.answers:
            words = doorbell.command_id if answer == "right" else answer
            self.client.lpush(pong_key(host.pk), words)


@pytest.fixture
def live(redis_client, enrolled):
    """A host in contact that was given Redis users."""
    found, _ = enrolled
    host_beat(host=found, beat=make_beat(facts=make_facts()))
    checks_update(found.pk, has_redis=True)
    found.refresh_from_db()
    return found


@pytest.fixture
def at(monkeypatch):
    monkeypatch.setattr("webapp.hosts.round_trips.WAIT_SECONDS", 0.2)


def queue_of(found) -> dict:
    found.refresh_from_db()
    return found.checks["queue"]


def test_an_answer_is_timed(live, redis_client, at):
    bell = Bell(redis_client, "right")

    assert RoundTrips(redis_client, bell).step() == 1

    assert queue_of(live)["seconds"] >= 0
    assert bell.rung[0].is_echoed


def test_a_queue_that_answered_is_not_tried_again(live, redis_client, at):
    bell = Bell(redis_client, "right")
    trips = RoundTrips(redis_client, bell)
    trips.step()

    assert trips.step() == 0
    assert len(bell.rung) == 1


def test_an_answer_to_an_earlier_ping_counts_for_nothing(live, redis_client, at):
    redis_client.lpush(pong_key(live.pk), "an-earlier-one")

    assert RoundTrips(redis_client, Bell(redis_client)).step() == 0
    assert queue_of(live) == {"problem": "no answer within 0 s"}


def test_no_answer_is_a_problem_and_is_tried_again_ever_more_rarely(live, redis_client, at):
    skipped = [0.0]
    bell = Bell(redis_client)
    trips = RoundTrips(redis_client, bell, clock=lambda: time.monotonic() + skipped[0])
    for _ in range(80):
        skipped[0] += 5.0
        trips.step()

    assert 4 <= len(bell.rung) <= 8  # at 0, 10, 30, 70, 150 and 310 seconds


def test_asking_again_does_not_wait_for_the_rest(live, redis_client, at):
    bell = Bell(redis_client)
    trips = RoundTrips(redis_client, bell)
    trips.step()

    checks_update(live.pk, queue=None)
    trips.step()

    assert len(bell.rung) == 2


def test_a_ping_that_cannot_be_sent_says_why(live, redis_client):
    def broken(*_: object) -> None:
        raise ConnectionError("refused")

    RoundTrips(redis_client, broken).step()

    assert queue_of(live) == {"problem": "the ping could not be sent: refused"}


@pytest.mark.parametrize("why", ["no users", "silent", "locked out"])
def test_hosts_without_a_queue_are_not_tried(live, redis_client, at, why):
    if why == "no users":
        checks_update(live.pk, has_redis=False)
    elif why == "silent":
        type(live).objects.update(last_seen_at=None)
    else:
        type(live).objects.update(credential_hash="")
    bell = Bell(redis_client)

    RoundTrips(redis_client, bell).step()

    assert bell.rung == []
