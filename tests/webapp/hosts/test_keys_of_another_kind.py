"""A host may write any kind of value below its prefix in Redis: that stops no other host."""

import pytest
import redis

from runners.redis_access import ack_key, encode, events_key
from runners.redis_address import key_prefix, pong_key
from tests.webapp.conftest import batch_of, enrol, make_beat, make_facts
from tests.webapp.hosts.test_round_trips import Bell
from webapp.core.clock import now
from webapp.hosts.heartbeats import host_beat
from webapp.hosts.models import Host, RefusedMessage
from webapp.hosts.round_trips import NO_LIST, RoundTrips
from webapp.hosts.services import checks_update
from webapp.jobs import consume, dispatch
from webapp.jobs.consume import StreamConsumer
from webapp.jobs.models import AttemptEvent, Command

pytestmark = pytest.mark.django_db(databases="__all__")
LINE = ("log", {"stream": "stdout", "text": "hello"})
KEYS = {"stream": events_key, "acknowledgements": ack_key}
KINDS = {
    "text": lambda client, key: client.set(key, "x"),
    "sorted set": lambda client, key: client.zadd(key, {"x": 1.0}),
    "list": lambda client, key: client.rpush(key, "x"),
}


class Clock:
    at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def consumer(redis_client, attempt, monkeypatch, clock) -> StreamConsumer:
    monkeypatch.setattr(consume, "BLOCK_MS", 20)
    monkeypatch.setattr(consume, "REST_MS", 20)
    return StreamConsumer(redis_client, clock)


@pytest.fixture
def bad(team) -> Host:
    return enrol(team, name="Bad")[0]


def make(client: redis.Redis, key: str, kind: str) -> None:
    client.delete(key)
    KINDS[kind](client, key)


def stored_after(
    client: redis.Redis, consumer: StreamConsumer, attempt, num_steps: int = 4
) -> int:
    """Return how many events of the good host are stored some rounds after it sent one."""
    first = AttemptEvent.objects.count() + 1
    client.xadd(events_key(attempt.host_id), encode(batch_of(attempt, LINE, first=first)))
    for _ in range(num_steps):
        consumer.step()
    return AttemptEvent.objects.count()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", KEYS)
def test_another_hosts_events_are_stored(redis_client, consumer, attempt, bad, name, kind):
    make(redis_client, KEYS[name](bad.pk), kind)
    redis_client.hset(ack_key(attempt.host_id), "x", "1")
    assert stored_after(redis_client, consumer, attempt) == 1

    make(redis_client, KEYS[name](bad.pk), kind)  # while the consumer runs
    assert stored_after(redis_client, consumer, attempt) == 2


def test_the_host_itself_is_told_of_and_goes_on_after_a_rest(
    redis_client, consumer, attempt, clock
):
    own = attempt.host
    consumer.step()
    make(redis_client, events_key(own.pk), "text")
    consumer.step()
    consumer.step()

    assert not redis_client.exists(events_key(own.pk))
    assert "another kind of value" in RefusedMessage.objects.get(host=own).reason
    clock.at += consume.ASIDE_SECONDS + 1
    assert stored_after(redis_client, consumer, attempt) == 1


def test_a_stream_that_is_too_long_is_deleted_and_told_of(
    redis_client, consumer, attempt, bad, monkeypatch
):
    monkeypatch.setattr(consume, "MAX_STREAM_BYTES", 10_000)
    redis_client.xadd(events_key(bad.pk), {"b": b"x" * 100_000})

    assert stored_after(redis_client, consumer, attempt) == 1
    assert redis_client.xlen(events_key(bad.pk)) == 0
    assert "it was deleted" in RefusedMessage.objects.get(host=bad).reason


def test_acknowledgements_that_are_no_hash_cost_no_event(redis_client, consumer, attempt, clock):
    consumer.step()
    make(redis_client, ack_key(attempt.host_id), "text")
    assert stored_after(redis_client, consumer, attempt, num_steps=1) == 1

    clock.at += consume.ASIDE_SECONDS + 1
    assert stored_after(redis_client, consumer, attempt) == 2
    assert int(redis_client.hget(ack_key(attempt.host_id), attempt.pk)) == 2


def test_a_queue_that_cannot_be_written_holds_up_no_other_hosts_doorbell(
    redis_client, attempt, bad
):
    make(redis_client, f"{key_prefix(bad.pk)}jobs", "text")
    Command.objects.all().delete()
    for host in (bad, attempt.host):
        Command.objects.create(host=host, kind="ping", next_at=now())

    assert dispatch.dispatch_due() == 1
    assert redis_client.llen(f"{key_prefix(attempt.host_id)}jobs") == 1


def test_an_answer_that_is_no_list_holds_up_no_other_hosts_check(
    redis_client, team, bad, monkeypatch
):
    monkeypatch.setattr("webapp.hosts.round_trips.WAIT_SECONDS", 1.0)
    good, _ = enrol(team, name="Good")
    for host in (bad, good):
        host_beat(host=host, beat=make_beat(facts=make_facts()))
        checks_update(host.pk, has_redis=True)
    bell = Bell(redis_client, "right")

    def ring(host, doorbell):
        if host.pk == bad.pk:
            make(redis_client, pong_key(host.pk), "text")
        else:
            bell(host, doorbell)

    assert RoundTrips(redis_client, ring).step() == 1
    assert Host.objects.get(pk=bad.pk).checks["queue"]["problem"] == NO_LIST
    assert "seconds" in Host.objects.get(pk=good.pk).checks["queue"]
