"""From a host's stream into the database, whatever happens to Redis meanwhile."""

import pytest
import redis

from runners.redis_access import CONSUMER_GROUP, ack_key, encode, events_key
from tests.webapp.conftest import EXIT_OK, batch_of, enrol
from webapp.jobs import consume
from webapp.jobs.consume import StreamConsumer
from webapp.jobs.models import Attempt, AttemptEvent, Job

pytestmark = pytest.mark.django_db(databases="__all__")
LINE = ("log", {"stream": "stdout", "text": "hello"})
RESULT = ("result", {"measured": {"loss": 1.0}, "notes": {}})  # goes alone


@pytest.fixture
def consumer(redis_client, attempt, monkeypatch) -> StreamConsumer:
    monkeypatch.setattr(consume, "BLOCK_MS", 20)
    return StreamConsumer(redis_client)


def ship(client: redis.Redis, attempt: Attempt, *events, first: int = 1) -> None:
    client.xadd(events_key(attempt.host_id), encode(batch_of(attempt, *events, first=first)))


def acked(client: redis.Redis, attempt: Attempt) -> int:
    return int(client.hget(ack_key(attempt.host_id), attempt.pk) or 0)


def stored() -> int:
    return AttemptEvent.objects.count()


def test_a_batch_is_stored_acknowledged_and_leaves_the_stream(redis_client, consumer, attempt):
    ship(redis_client, attempt, LINE, LINE)
    consumer.step()
    assert (stored(), acked(redis_client, attempt)) == (2, 2)
    assert redis_client.xlen(events_key(attempt.host_id)) == 0


def test_batches_that_came_before_the_consumer_are_taken(redis_client, attempt):
    ship(redis_client, attempt, LINE)
    StreamConsumer(redis_client).step()
    assert stored() == 1


def test_a_job_ends_through_the_stream(redis_client, consumer, attempt):
    ship(redis_client, attempt, LINE, ("exited", EXIT_OK))
    consumer.step()
    assert Job.objects.get(pk=attempt.job_id).state == "succeeded"


def test_a_gap_is_answered_with_where_to_go_on(redis_client, consumer, attempt):
    ship(redis_client, attempt, LINE)
    ship(redis_client, attempt, LINE, first=5)
    consumer.step()
    assert (stored(), acked(redis_client, attempt)) == (1, 1)


def test_what_was_read_but_not_stored_is_taken_after_a_restart(redis_client, consumer, attempt):
    consumer.step()
    ship(redis_client, attempt, LINE)
    key = events_key(attempt.host_id)
    redis_client.xreadgroup(CONSUMER_GROUP, consume.CONSUMER, {key: ">"})  # and then it died
    StreamConsumer(redis_client).step()
    assert stored() == 1


def test_what_was_read_when_redis_went_away_is_taken_when_it_is_back(
    redis_client, consumer, attempt, monkeypatch
):
    def away(**_options):
        raise redis.ConnectionError

    consumer.step()
    ship(redis_client, attempt, LINE)
    with monkeypatch.context() as patch:
        patch.setattr(redis_client, "pipeline", away)
        with pytest.raises(redis.ConnectionError):
            consumer.step()
    consumer.step()
    assert (stored(), redis_client.xlen(events_key(attempt.host_id))) == (1, 0)


def test_a_new_consumer_publishes_the_acknowledgements_again(redis_client, consumer, attempt):
    ship(redis_client, attempt, LINE)
    consumer.step()
    redis_client.flushall()
    StreamConsumer(redis_client).step()
    assert acked(redis_client, attempt) == 1


def test_an_emptied_redis_is_set_up_anew(redis_client, consumer, attempt):
    ship(redis_client, attempt, LINE)
    consumer.step()
    redis_client.flushall()
    consumer.step()  # finds no group
    ship(redis_client, attempt, LINE, LINE, first=1)
    consumer.step()
    assert (stored(), acked(redis_client, attempt)) == (2, 2)


@pytest.mark.faults
def test_a_killed_redis_loses_nothing(redis_server, redis_client, consumer, attempt):
    ship(redis_client, attempt, LINE)
    consumer.step()
    ship(redis_client, attempt, LINE, first=2)
    redis_server.kill()
    with pytest.raises(redis.RedisError):
        consumer.step()
    redis_server.start()
    consumer.step()
    if acked(redis_client, attempt) == 1:  # Redis may delay a write to its log by two seconds:
        ship(redis_client, attempt, LINE, first=2)  # a host ships what it has no receipt for
        consumer.step()
    assert (stored(), acked(redis_client, attempt)) == (2, 2)


def test_a_damaged_entry_is_dropped_and_the_next_one_taken(redis_client, consumer, attempt):
    redis_client.xadd(events_key(attempt.host_id), {"a": "x", "f": "y", "b": "not json"})
    ship(redis_client, attempt, LINE)
    consumer.step()
    assert (stored(), redis_client.xlen(events_key(attempt.host_id))) == (1, 0)


def test_a_batch_with_a_wrong_fence_is_dropped(redis_client, consumer, attempt):
    batch = batch_of(attempt, LINE).model_copy(update={"fence": "0" * 32})
    redis_client.xadd(events_key(attempt.host_id), encode(batch))
    consumer.step()
    assert (stored(), redis_client.xlen(events_key(attempt.host_id))) == (0, 0)


def test_a_host_cannot_report_for_another(redis_client, consumer, attempt, team):
    stranger, _ = enrol(team, name="Stranger")
    redis_client.xadd(events_key(stranger.pk), encode(batch_of(attempt, LINE)))
    consumer.step()
    assert stored() == 0


def test_a_host_that_enrols_later_is_read_too(redis_client, consumer, attempt, team):
    consumer.step()
    enrol(team, name="Later")
    consumer._hosts_at -= consume.HOSTS_SECONDS
    consumer.step()
    assert len(consumer._hosts) == 2


def test_no_hosts_no_work(redis_client, db):
    assert StreamConsumer(redis_client).step() == 0


class Clock:
    """Seconds that pass only while entries of one host are taken."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_host_that_takes_more_than_its_share_waits_as_long_as_it_took(
    redis_client, attempt, monkeypatch
):
    clock = Clock()
    consumer = StreamConsumer(redis_client, clock)
    whole = consume.events_accept

    def slowly(**given):
        clock.now += 3.0
        return whole(**given)

    monkeypatch.setattr(consume, "BLOCK_MS", 20)
    monkeypatch.setattr(consume, "events_accept", slowly)
    ship(redis_client, attempt, RESULT)
    assert consumer.step() == 1
    ship(redis_client, attempt, RESULT, first=2)

    assert consumer.step() == 0  # it waits for three seconds
    clock.now += 3.1
    assert consumer.step() == 1
    assert acked(redis_client, attempt) == 2
