"""From the hosts' streams into the database, one by one and many in one transaction."""

import pytest
import redis
from django.conf import settings
from django.db import connection
from django.test.utils import CaptureQueriesContext

from runners.host.redis_access import CONSUMER_GROUP, ack_key, encode, events_key
from runners.shared.messages import ReceivedBatch
from tests.webapp.conftest import EXIT_OK, batch_of, enrol, make_job, new_attempt
from tests.webapp.jobs.undone import undone
from webapp.agents import consume, ingest
from webapp.agents.consume import StreamConsumer
from webapp.agents.ingest import HostBatch, events_accept, events_accept_together, is_routine
from webapp.hosts.models import RefusedMessage
from webapp.jobs.models import Attempt, AttemptEvent, Job
from webapp.metrics.models import MetricBatch
from webapp.metrics.store import read_raw

pytestmark = pytest.mark.django_db(databases="__all__")
LINE = ("log", {"stream": "stdout", "text": "hello"})
RESULT = ("result", {"measured": {"loss": 1.0}, "notes": {}})  # goes alone


@pytest.fixture
def consumer(redis_client, attempt, monkeypatch) -> StreamConsumer:
    monkeypatch.setattr(consume, "BLOCK_MS", 20)
    monkeypatch.setattr(consume, "ROUND_SECONDS", 0.0)
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


def test_a_consumer_without_a_host_rests(redis_client, monkeypatch):
    rests = []
    monkeypatch.setattr(consume.time, "sleep", rests.append)
    assert StreamConsumer(redis_client).step() == 0
    assert rests == [consume.REST_MS / 1000]


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
    monkeypatch.setattr(consume, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(consume, "events_accept", slowly)
    ship(redis_client, attempt, RESULT)
    assert consumer.step() == 1
    ship(redis_client, attempt, RESULT, first=2)

    assert consumer.step() == 0  # it waits for three seconds
    clock.now += 3.1
    assert consumer.step() == 1
    assert acked(redis_client, attempt) == 2


# Routine reports of many hosts in one transaction: as good as one by one, and no host's harm.


POINT = ("metric", {"source": "job", "values": {"loss": 2.5}, "step": 3})
PHASE = ("phase", {"name": "Training"})
PROGRESS = ("progress", {"done": 3, "total": 10, "unit": "steps", "eta_seconds": 7.0})
SECOND = (PROGRESS, LINE, POINT)


@pytest.fixture
def others(team, alice) -> list[Attempt]:
    """Running attempts on hosts of their own."""
    found = []
    for number in range(4):
        host, _ = enrol(team, name=f"Other {number}")
        attempt = new_attempt(make_job(team, alice, host))
        Job.objects.filter(pk=attempt.job_id).update(state="starting", current_attempt=attempt)
        found.append(attempt)
    return found


def report(attempt: Attempt, *events, first: int = 1) -> HostBatch:
    received = ReceivedBatch.model_validate(batch_of(attempt, *events, first=first).model_dump())
    return HostBatch(attempt.host_id, received)


def rows_of(attempt: Attempt) -> dict:
    """Return everything that a report leaves of an attempt, but for when it came."""
    counters = "acked_seq", "missed_beats", "dropped_duplicates", "refused_gaps"
    figures = "phase", "progress_done", "progress_total", "progress_unit", "eta_seconds"
    return {
        "events": list(AttemptEvent.objects.filter(attempt=attempt).order_by("seq").values_list(
            "seq", "t_ms", "kind", "body")),
        "points": read_raw(attempt.pk, "job", "loss").seq.tolist(),
        "attempt": Attempt.objects.values_list(*counters).get(pk=attempt.pk),
        "job": Job.objects.values_list(*figures).get(pk=attempt.job_id),
        "refused": sorted(RefusedMessage.objects.filter(host=attempt.host).values_list(
            "kind", "reason", "count")),
    }  # fmt: skip


DELIVERIES = {
    "a second's report": [(SECOND, 1)],
    "two in a row": [(SECOND, 1), (SECOND, 4)],
    "the same again": [(SECOND, 1), (SECOND, 1)],
    "one that overlaps": [(SECOND, 1), (SECOND, 3)],
    "one behind a gap": [(SECOND, 1), (SECOND, 9)],
    "a phase": [((PHASE, *SECOND), 1)],
    "damaged ones": [((("metric", {"values": 1}), ("progress", {"done": -1}), ("log", {}), LINE), 1)],
    "NUL in a line": [((("log", {"stream": "stdout", "text": "a\0b"}),), 1)],
}  # fmt: skip


def test_together_leaves_what_one_by_one_leaves(attempt, others):
    for deliveries in DELIVERIES.values():
        with undone(deliveries):
            alone = others[0]
            Attempt.objects.update(missed_beats=2)
            for events, first in deliveries:
                events_accept(host=alone.host, batch=batch_of(alone, *events, first=first))

            events_accept_together(
                [report(attempt, *events, first=first) for events, first in deliveries]
            )

            assert rows_of(attempt) == rows_of(alone)


def test_each_batch_is_answered_with_what_is_stored(attempt, others):
    batches = [
        report(attempt, LINE),
        report(others[0], LINE, LINE),
        report(attempt, LINE, first=2),
    ]
    assert events_accept_together(batches) == [1, 2, 2]


def test_more_attempts_cost_few_more_queries(attempt, others):
    def queries(attempts: list[Attempt], first: int) -> int:
        with CaptureQueriesContext(connection) as found:
            events_accept_together([report(each, *SECOND, first=first) for each in attempts])
        return len(found)

    events_accept_together([report(each, *SECOND) for each in (attempt, *others)])
    one, five = queries([attempt], 4), queries(others, 4)
    assert five <= one


def test_a_stranger_goes_alone_and_changes_nothing(attempt, others):
    for change in [{"fence": "0" * 32}, {"attempt_id": "nobody"}]:
        with undone(change):
            before = Attempt.objects.values_list("missed_beats", "acked_seq").get(pk=attempt.pk)
            stranger = report(attempt, LINE)._replace(
                batch=report(attempt, LINE).batch.model_copy(update=change)
            )
            impostor = HostBatch(others[0].host_id, report(attempt, LINE).batch)

            assert events_accept_together([stranger, impostor, report(others[1], LINE)]) == [
                None,
                None,
                1,
            ]

            assert (
                Attempt.objects.values_list("missed_beats", "acked_seq").get(pk=attempt.pk)
                == before
            )


def test_a_round_takes_the_owners_report_and_not_that_of_an_impostor_beside_it(attempt, others):
    own = report(attempt, LINE)
    strangers = [own._replace(host_id=others[0].host_id)]
    strangers += [own._replace(batch=own.batch.model_copy(update={"fence": "0" * 32}))]
    assert events_accept_together([*strangers, own, *strangers]) == [None, None, 1, None, None]


def test_a_round_moves_nothing_by_a_superseded_attempt(attempt):
    new_attempt(attempt.job)
    events_accept_together([report(attempt, PHASE)])
    assert Job.objects.get(pk=attempt.job_id).phase == ""


def test_points_of_a_round_that_did_not_commit_are_not_doubled(attempt, monkeypatch):
    def crash(*_args):
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(ingest, "update_each", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            events_accept_together([report(attempt, POINT, LINE)])
    assert MetricBatch.objects.exists() == (settings.METRICS_DATABASE != "default")
    events_accept_together([report(attempt, POINT, LINE, POINT)])
    assert read_raw(attempt.pk, "job", "loss").seq.tolist() == [1, 3]


def test_only_what_moves_no_state_is_routine(attempt):
    damaged = ReceivedBatch.model_validate(
        {"attempt_id": "a", "fence": "f", "events": [{"seq": 1, "kind": "nothing"}]}
    )
    assert is_routine(report(attempt, PHASE, *SECOND).batch)
    assert not is_routine(report(attempt, LINE, ("exited", EXIT_OK)).batch)
    assert not is_routine(damaged)


# The consumer


def test_a_round_of_many_hosts_is_one_transaction(
    redis_client, others, consumer, monkeypatch, django_capture_on_commit_callbacks
):
    rounds, heard = [], []
    whole = events_accept_together
    monkeypatch.setattr(ingest, "publish_all", heard.extend)

    def counted(batches):
        rounds.append(len(batches))
        return whole(batches)

    monkeypatch.setattr(consume, "events_accept_together", counted)
    for each in others:
        ship(redis_client, each, *SECOND)
    with django_capture_on_commit_callbacks(execute=True):
        consumer.step()
    assert rounds == [4]
    assert [acked(redis_client, each) for each in others] == [3] * 4
    assert len(heard) >= 3 * 4  # pages have been told


def test_states_and_routine_of_one_attempt_keep_their_order(redis_client, attempt, consumer):
    ship(redis_client, attempt, LINE)
    ship(redis_client, attempt, ("result", {"measured": {"loss": 1.0}, "notes": {}}), first=2)
    ship(redis_client, attempt, LINE, first=3)
    ship(redis_client, attempt, ("exited", EXIT_OK), first=4)
    consumer.step()
    assert acked(redis_client, attempt) == 4
    assert Job.objects.get(pk=attempt.job_id).state == "succeeded"


def test_a_round_that_fails_is_stored_one_by_one(redis_client, others, consumer, monkeypatch):
    def fails(_batches):
        raise ValueError("poison")

    monkeypatch.setattr(consume, "events_accept_together", fails)
    for each in others:
        ship(redis_client, each, *SECOND)
    consumer.step()
    assert [acked(redis_client, each) for each in others] == [3] * 4


def test_a_host_that_poisons_a_round_does_not_poison_the_next(
    redis_client, attempt, others, consumer, monkeypatch
):
    whole_round, whole_alone = events_accept_together, events_accept
    rounds = []

    def poisoned_round(batches):
        rounds.append({each.host_id for each in batches})
        if attempt.host_id in rounds[-1]:
            raise ValueError("poison")
        return whole_round(batches)

    def poisoned_alone(*, host, batch, **more):
        if host.pk == attempt.host_id:
            raise ValueError("poison")
        return whole_alone(host=host, batch=batch, **more)

    monkeypatch.setattr(consume, "events_accept_together", poisoned_round)
    monkeypatch.setattr(consume, "events_accept", poisoned_alone)
    for first in (1, 2):
        for each in (attempt, *others):
            ship(redis_client, each, LINE, first=first)
        consumer.step()

    assert [acked(redis_client, each) for each in others] == [2] * 4
    assert (attempt.host_id in rounds[0], attempt.host_id in rounds[1]) == (True, False)
    assert RefusedMessage.objects.get().host_id == attempt.host_id


@pytest.mark.parametrize("limit", [("SHARED_BYTES", 300), ("SHARED_EVENTS", 4)])
def test_what_is_beyond_a_hosts_share_goes_alone(
    redis_client, attempt, others, consumer, monkeypatch, limit
):
    shared = []
    whole = events_accept_together

    def counted(batches):
        shared.extend(each.host_id for each in batches)
        return whole(batches)

    monkeypatch.setattr(consume, "events_accept_together", counted)
    monkeypatch.setattr(consume, *limit)
    for first in range(1, 30, 3):
        ship(redis_client, attempt, LINE, LINE, LINE, first=first)
    ship(redis_client, others[0], LINE)
    consumer.step()

    assert shared.count(attempt.host_id) <= 1
    assert shared.count(others[0].host_id) == 1
    assert (acked(redis_client, attempt), acked(redis_client, others[0])) == (30, 1)
