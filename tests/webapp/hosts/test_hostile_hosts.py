"""A hostile host breaks nothing: strange messages, keys of another kind, too many events."""

import json

import pytest
import redis

from runners.host.redis_access import ack_key, encode, events_key
from runners.jobspec.base import excerpt
from runners.shared.messages import ReceivedBatch
from runners.shared.redis_address import key_prefix, pong_key
from tests.plugins.extent import first, sample
from tests.webapp.api.conftest import HostClient
from tests.webapp.api.test_agents_api import bearer, knock
from tests.webapp.conftest import (
    EXIT_OK,
    batch_of,
    claim,
    enrol,
    make_beat,
    make_facts,
    make_job,
    make_microbench,
)
from tests.webapp.hosts import shapes
from tests.webapp.hosts.hostile import messages
from tests.webapp.hosts.shapes import heartbeat
from tests.webapp.hosts.test_beats import Bell
from webapp.agents import consume, dispatch, event_effects, heartbeats
from webapp.agents.consume import StreamConsumer
from webapp.agents.heartbeats import host_beat
from webapp.agents.ingest import events_accept
from webapp.agents.round_trips import NO_LIST, RoundTrips
from webapp.core.clock import now
from webapp.core.pace import Pace, calls
from webapp.hosts import pools
from webapp.hosts.models import Host, RefusedMessage
from webapp.hosts.pools import QuotaProblem
from webapp.hosts.services import checks_update
from webapp.jobs.models import Attempt, AttemptEvent, Command, Job
from webapp.jobs.services import job_submit
from webapp.metrics.models import MetricBatch, MetricSource
from webapp.metrics.store import MAX_METRICS
from webapp.operations.ticker import seal_due

# What one host sends never harms another: every shape on the wire, with hostile values.


pytestmark = pytest.mark.django_db(databases="__all__")
SEEDS = first(
    range(1, 21)
)  # the first draws some of the variants, all of them together nearly all
COUNT = 150
PAGES = (
    "", "logs/", "metrics/", "post-mortem/", "artefacts/", "events/", "config/", "figures.csv",
    "figures.json", "artefacts/model/download/",
)  # fmt: skip

BODIES = [*shapes.BODIES, ("exited", EXIT_OK | {"last_lines": ["bye"]})]
STORED = sample(BODIES, share=0.4)
ROUTINE_BODIES = BODIES[1:5]  # what shares a transaction with other hosts' reports


@pytest.fixture
def good(team) -> str:
    """The credential of a host that does nothing wrong."""
    return enrol(team, name="Good")[1]


@pytest.fixture
def good_attempt(team, alice) -> Attempt:
    host, credential = enrol(team, name="Good 2")
    knock(make_beat(microbench=make_microbench()).model_dump_json().encode(), bearer(credential))
    job = job_submit(job=make_job(team, alice, host), by="alice")
    claim(job.current_attempt)
    return Attempt.objects.get(pk=job.current_attempt_id)


def is_served(credential: str) -> bool:
    calls.forget()  # the pace of calls has tests of its own
    body = make_beat().model_dump_json().encode()
    return knock(body, bearer(credential)).status == 200


# Heartbeats


@pytest.mark.parametrize("seed", SEEDS)
def test_no_heartbeat_is_a_fault_of_the_server_or_of_another_host(credential, good, seed):
    for number, body in enumerate(messages(heartbeat(), COUNT, seed)):
        calls.forget()
        answer = knock(body.encode("utf-8", "surrogatepass"), bearer(credential))
        assert answer.status in {200, 400, 413, 422}, (answer, body[:300])
        assert number % 20 or is_served(good)
    assert is_served(good)


def test_a_heartbeat_with_nan_is_refused_by_its_field(credential):
    body = make_beat().model_dump_json().replace('"cpu_utilization":0.1', '"cpu_utilization":NaN')
    answer = knock(body.encode(), bearer(credential))
    assert answer.status == 422
    assert answer.body["errors"][0]["field"] == "cpu_utilization"
    (kept,) = RefusedMessage.objects.all()
    assert (kept.kind, kept.count) == ("heartbeat", 1)
    assert "cpu_utilization" in kept.reason


def test_heartbeats_that_fail_together_are_stored_one_by_one(
    enrolled, team, credential, monkeypatch
):
    _, other = enrol(team, name="Good")
    whole = heartbeats.host_beats

    def raise_for_one_host(spoken):
        if any(each.beat.boot_id == "poison" for each in spoken):
            raise ValueError("poison")
        return whole(spoken)

    monkeypatch.setattr(heartbeats, "host_beats", raise_for_one_host)

    poisoned, fine = heartbeats.answers_to(
        [
            heartbeats.ReceivedHeartbeat(credential, make_beat(boot_id="poison")),
            heartbeats.ReceivedHeartbeat(other, make_beat(boot_id="fine")),
        ]
    )

    assert (poisoned.status, poisoned.code) == (422, "not_stored")
    assert fine.server_time_ms
    assert Host.objects.get(name="Good").boot_id == "fine"
    assert RefusedMessage.objects.get().host == enrolled[0]


# Events over HTTP and through Redis


def sent(attempt: Attempt, first_seq: int) -> dict:
    return batch_of(attempt, *BODIES[:-1], first=first_seq).model_dump(mode="json")


@pytest.mark.parametrize("seed", SEEDS)
def test_no_event_is_a_fault_of_the_server_and_none_breaks_the_jobs_pages(
    attempt, credential, client, alice, seed
):
    own = HostClient(credential)
    client.force_login(alice)
    for number, body in enumerate(messages(sent(attempt, 1), COUNT, seed)):
        calls.forget()
        Attempt.objects.filter(pk=attempt.pk).update(acked_seq=0)
        AttemptEvent.objects.all().delete()
        answer = own.post(f"/attempts/{attempt.pk}/events", body)
        assert answer.status_code < 500, (answer.content, body[:300])
        if number % 10 == 0:
            page = client.get(f"/jobs/{attempt.job_id}/")
            assert page.status_code == 200, body[:300]
    seal_due()
    assert client.get(f"/jobs/{attempt.job_id}/").status_code == 200


@pytest.mark.parametrize(("kind", "body"), STORED, ids=[kind for kind, _ in STORED])
def test_every_page_of_a_job_shows_any_event_that_is_stored(attempt, client, alice, kind, body):
    bodies = [one for one in messages(body, 10_000, seed=0) if is_object(one)]
    for begin in range(1, len(bodies) + 1, 100):
        part = enumerate(bodies[begin - 1 : begin + 99], start=begin)
        events = [
            f'{{"seq": {seq}, "t_ms": 1700000000000, "kind": "{kind}", "body": {one}}}'
            for seq, one in part
        ]
        ids = json.dumps({"attempt_id": attempt.pk, "fence": attempt.fence, "events": []})
        batch = ids.replace("[]", f"[{', '.join(events)}]")
        events_accept(host=attempt.host, batch=ReceivedBatch.model_validate(json.loads(batch)))
    seal_due()
    client.force_login(alice)
    client.raise_request_exception = False

    pages = [f"/jobs/{attempt.job_id}/{page}" for page in PAGES]
    pages += [f"/api/v1/jobs/{attempt.job_id}/{page}" for page in ("figures", "events")]
    pages += ["/", "/jobs/", f"/hosts/{attempt.host.slug}/"]
    found = {page: client.get(page).status_code for page in pages}

    assert {page: status for page, status in found.items() if status >= 500} == {}


def is_object(text: str) -> bool:
    """Tell what a batch can carry as an event's body."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


@pytest.mark.parametrize("bodies", [BODIES[:-1], ROUTINE_BODIES], ids=["alone", "together"])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_stream_entry_stops_another_hosts_stream(
    redis_client, attempt, good_attempt, monkeypatch, seed, bodies
):
    monkeypatch.setattr(consume, "BLOCK_MS", 20)
    monkeypatch.setattr(consume, "ALONE_SECONDS", 0.0)
    monkeypatch.setattr(consume, "ROUND_SECONDS", 0.0)
    consumer = StreamConsumer(redis_client)
    batch = batch_of(attempt, *bodies).model_dump(mode="json")
    for body in _entries(batch, seed):
        entry = {"a": attempt.pk, "f": attempt.fence, "b": body.encode("utf-8", "surrogatepass")}
        redis_client.xadd(events_key(attempt.host_id), entry)
    line = batch_of(good_attempt, ("log", {"stream": "stdout", "text": "hello"}))
    redis_client.xadd(events_key(good_attempt.host_id), encode(line))
    while consumer.step() or redis_client.xlen(events_key(attempt.host_id)):
        pass
    assert int(redis_client.hget(ack_key(good_attempt.host_id), good_attempt.pk)) == 1
    assert redis_client.xlen(events_key(attempt.host_id)) == 0
    assert RefusedMessage.objects.filter(host=attempt.host).exists()


def _entries(batch: dict, seed: int) -> list[str]:
    """Return the bodies of stream entries: the event lists of hostile batches."""
    found = []
    for body in messages({"events": batch["events"]}, COUNT, seed):
        inner = body[len('{"events": ') : -1] if body.startswith('{"events": ') else body
        found.append(inner)
    return found


def test_a_damaged_event_does_not_hold_up_those_behind_it(attempt, credential):
    body = sent(attempt, 1)
    body["events"][1]["t_ms"] = 10**30
    body["events"][2]["body"] = {"done": "x" * 10, "total": [], "unit": 5}
    answer = HostClient(credential).post(f"/attempts/{attempt.pk}/events", json.dumps(body))
    assert answer.json()["acked_seq"] == len(body["events"])
    assert AttemptEvent.objects.filter(kind="endpoint").exists()
    reasons = set(RefusedMessage.objects.values_list("reason", flat=True))
    assert len(reasons) == 2, reasons
    assert Job.objects.get(pk=attempt.job_id).result["measured"]["tokens_per_second"] == 10.0


def test_metric_names_beyond_the_limit_are_left_out_and_named(attempt):
    many = [
        ("metric", {"source": "job", "values": {f"m{part}_{n}": 1.0 for n in range(250)}})
        for part in range(4)
    ]
    events_accept(host=attempt.host, batch=batch_of(attempt, *many))
    seal_due()
    assert len(MetricSource.objects.get().metrics) == MAX_METRICS
    assert "more than 500 names" in RefusedMessage.objects.get().reason


def test_operators_see_what_was_refused(credential, host, olga, vera, client):
    knock(b'{"boot_id": NaN}', bearer(credential))
    client.force_login(olga)
    shown = client.get(f"/hosts/{host.slug}/").content.decode()
    client.force_login(vera)
    hidden = client.get(f"/hosts/{host.slug}/").content.decode()
    assert "Refused messages" in shown
    assert "boot_id" in shown
    assert "Refused messages" not in hidden


def test_long_facts_are_still_read_and_deep_ones_excerpted(host):
    texts = ("hostname", "os", "kernel", "cpu_model", "python_version", "agent_version", "boot_id")
    long = make_facts().model_dump(mode="json") | dict.fromkeys(texts, "x" * 900)
    assert len(make_facts().model_validate(long).agent_version) == 40
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert "nested deeper" in excerpt(deep)


def test_an_end_that_cannot_be_carried_out_is_not_passed_over(attempt, monkeypatch):
    def fails(*_):
        raise KeyError("a fault of the server")

    monkeypatch.setattr(event_effects, "final_state", fails)
    with pytest.raises(KeyError):
        events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", EXIT_OK)))
    monkeypatch.undo()

    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", EXIT_OK)))

    assert Job.objects.get(pk=attempt.job_id).state == "succeeded"


def test_a_turn_of_sealing_ends_in_time_and_the_oldest_journal_comes_first(attempt):
    for source in ("a", "b", "c"):
        point = ("metric", {"source": source, "values": {"loss": 1.0}})
        attempt.refresh_from_db()
        batch = batch_of(attempt, point, first=attempt.acked_seq + 1)
        events_accept(host=attempt.host, batch=batch)
    Attempt.objects.filter(pk=attempt.pk).update(ended_at=now())  # every journal is due
    seconds = iter([0.0, 1.0, 2.0, 99.0])
    assert seal_due(lambda: next(seconds)) == 2
    assert [each.source for each in MetricBatch.objects.all()] == ["c"]
    assert seal_due() == 1


# A host may write any kind of value below its prefix in Redis: that stops no other host.


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
    monkeypatch.setattr(consume, "ROUND_SECONDS", 0.0)  # by a clock that stands still: each round
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
    monkeypatch.setattr("webapp.agents.round_trips.PONG_WAIT_SECONDS", 1.0)
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


# What a host may send within an hour: honest ones never notice, others wait, nothing is lost.


QUOTAS = {
    "events": ("EVENTS", pools.EVENTS),
    "events_of_attempt": ("EVENTS_OF_ATTEMPT", pools.EVENTS_OF_ATTEMPT),
}


def narrow(monkeypatch, name: str, per_hour: int) -> None:
    monkeypatch.setattr(pools, name, getattr(pools, name)._replace(per_hour=per_hour))


@pytest.fixture
def paced_clock(monkeypatch) -> Clock:
    paced = Clock()
    monkeypatch.setattr(pools, "_counts", Pace(paced))
    return paced


def send(attempt: Attempt, num: int):
    attempt.refresh_from_db()
    first = attempt.acked_seq + 1
    return events_accept(host=attempt.host, batch=batch_of(attempt, *[LINE] * num, first=first))


@pytest.mark.parametrize("what", QUOTAS)
def test_events_beyond_the_hour_are_refused_by_name_with_the_way_out(
    attempt, monkeypatch, paced_clock, what
):
    name, quota = QUOTAS[what]
    narrow(monkeypatch, name, 10)
    send(attempt, 10)
    with pytest.raises(QuotaProblem) as refused:
        send(attempt, 1)
    assert refused.value.code == quota.code
    assert "sent more than 10 events in an hour" in refused.value.detail
    assert quota.way_out in refused.value.detail
    assert refused.value.facts == {"retry_after_seconds": 360}


def test_what_waited_is_taken_after_the_wait_without_a_gap(attempt, monkeypatch, paced_clock):
    narrow(monkeypatch, "EVENTS", 10)
    send(attempt, 10)
    with pytest.raises(QuotaProblem) as refused:
        send(attempt, 1)
    paced_clock.at += refused.value.wait_seconds
    assert send(attempt, 1).acked_seq == 11
    assert AttemptEvent.objects.count() == 11


def test_bytes_are_counted_too(attempt, monkeypatch, paced_clock):
    monkeypatch.setattr(pools, "_IN_BYTES", pools._IN_BYTES._replace(burst=1000))
    batch = batch_of(attempt, LINE)
    events_accept(host=attempt.host, batch=batch, num_bytes=900)
    with pytest.raises(QuotaProblem, match="MiB of events in an hour"):
        events_accept(host=attempt.host, batch=batch, num_bytes=200)


def test_the_api_answers_429_and_operators_see_one_row(
    attempt, credential, monkeypatch, paced_clock
):
    narrow(monkeypatch, "EVENTS", 1)
    own = HostClient(credential)
    body = batch_of(attempt, LINE, LINE)
    answers = [own.post(f"/attempts/{attempt.pk}/events", body) for _ in range(3)]
    assert {(one.status_code, one.json()["code"]) for one in answers} == {(429, "too_many_events")}
    assert answers[0].headers["Retry-After"]
    row = RefusedMessage.objects.get()
    assert (row.kind, row.count) == ("event", 1)
    assert row.reason == "One host sent more than 1 events in an hour: it waits"


def test_heartbeats_beyond_the_hour_are_refused_and_another_hosts_are_not(
    team, credential, monkeypatch, paced_clock
):
    narrow(monkeypatch, "HEARTBEATS", 2)
    _, other = enrol(team, name="Good")
    body = make_beat().model_dump_json().encode()
    statuses = [knock(body, bearer(credential)).status for _ in range(4)]
    assert statuses == [200, 200, 429, 429]
    assert knock(body, bearer(other)).status == 200
    assert RefusedMessage.objects.get().kind == "heartbeat"


def test_reports_each_second_for_hours_are_not_limited(paced_clock):
    for _ in range(3 * 3600 // 10):
        for number in range(200):
            pools.keep_events("host", f"attempt {number}", num_events=30, num_bytes=20_000)
        paced_clock.at += 10
    for _ in range(3 * 3600):
        pools.keep_heartbeat("host")
        paced_clock.at += 1
