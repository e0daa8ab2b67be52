"""What one host sends takes neither the memory nor the time nor the live pages of others."""

import json
import threading
import time

import pytest
import redis

from runners.shared.messages import MAX_LAST_CHARACTERS, ReceivedBatch
from runners.shared.redis_address import key_prefix, pong_key
from tests.webapp.conftest import EXIT_OK, batch_of, enrol, make_beat, make_facts
from tests.webapp.hosts.conftest import another_attempt
from webapp.agents import event_effects, ingest
from webapp.agents.heartbeats import host_beat
from webapp.agents.ingest import HostBatch, events_accept, events_accept_together
from webapp.agents.live_messages import RESYNC, messages_of
from webapp.agents.round_trips import RoundTrips
from webapp.core.clock import now
from webapp.hosts import epoch, pools
from webapp.hosts.models import Host, RefusedMessage
from webapp.hosts.services import checks_update
from webapp.jobs.models import Artefact, Attempt, Job
from webapp.metrics import store
from webapp.operations.ticker import seal_due

pytestmark = pytest.mark.django_db(databases="__all__")


def received(attempt: Attempt, *events: tuple[str, dict]) -> ReceivedBatch:
    return ReceivedBatch.model_validate(batch_of(attempt, *events).model_dump(mode="json"))


@pytest.fixture
def round_of(monkeypatch, django_capture_on_commit_callbacks):
    """Store batches of many hosts in one round; return its answers and whom it told of events."""

    def store_together(*sent: tuple[Attempt, tuple[str, dict]]) -> tuple[list, list]:
        found: list = []
        monkeypatch.setattr(ingest, "publish_all", found.extend)
        batches = [HostBatch(each.host_id, received(each, event)) for each, event in sent]
        with django_capture_on_commit_callbacks(execute=True):
            stored = events_accept_together(batches)
        return stored, [topic for topic, _, _ in found]

    return store_together


# Live messages: they are built after the events of many hosts are stored.


POINT = ("metric", {"source": "job", "values": {"loss": 2.0}})


def test_a_number_that_is_a_text_is_refused_by_its_name_and_costs_no_other_host(
    attempt, team, alice, round_of
):
    good = another_attempt(team, alice, "Good")
    text = ("metric", {"source": "job", "values": {"loss": "2.5"}})
    assert round_of((attempt, text), (good, POINT)) == ([1, 1], [f"job:{good.job_id}"])
    assert "values.loss" in RefusedMessage.objects.get().reason


def test_messages_that_cannot_be_built_hold_back_no_others(
    attempt, team, alice, round_of, monkeypatch
):
    good = another_attempt(team, alice, "Good")

    def raise_for_one_host(reported, team_id, events):
        if reported.pk == attempt.pk:
            raise TypeError
        return messages_of(reported, team_id, events)

    monkeypatch.setattr(ingest, "messages_of", raise_for_one_host)
    assert round_of((attempt, POINT), (good, POINT)) == ([1, 1], [f"job:{good.job_id}"])


def test_frames_of_the_live_stream_are_short_and_for_long_output_pages_read_the_store(attempt):
    long, names = "x" * 1000, [f"m{n}" for n in range(250)]
    for kind, bodies, event in (
        ("log", [{"stream": "stdout", "text": long}] * 200, RESYNC),
        ("log", [{"stream": "stdout", "text": long}] * 20, "job.log"),
        ("metric", [{"source": "job", "values": dict.fromkeys(names, 1.0)}] * 40, "job.metric"),
        ("progress", [{"done": 1, "total": 2, "unit": long * 100}], "job.progress"),
        ("result", [{"measured": {}, "notes": {str(n): long for n in range(100)}}], "job.result"),
        ("phase", [{"name": long * 100}], "job.progress"),
    ):
        events = batch_of(attempt, *[(kind, body) for body in bodies]).events
        found = list(messages_of(attempt, "team", list(events)))
        assert found, kind
        assert {message[1] for message in found} == {event}, kind
        assert all(len(json.dumps(message)) < 100_000 for message in found), kind


# The metric store: what one host sends takes neither the time nor the memory of the upkeep.


def test_points_of_decades_apart_cost_no_window_between_them(attempt, monkeypatch):
    monkeypatch.setattr(store, "WINDOW_MS", 1000)  # between the two lie four thousand million
    for seq, t_ms in ((1, 0), (2, 4_102_444_800_000)):
        event = batch_of(attempt, POINT, first=seq).events[0].model_copy(update={"t_ms": t_ms})
        batch = batch_of(attempt, first=seq).model_copy(update={"events": (event,)})
        events_accept(host=attempt.host, batch=batch)
    Attempt.objects.filter(pk=attempt.pk).update(ended_at=now())
    assert seal_due() == 2
    chunks = store.MetricChunk.objects.exclude(step_ms=0)
    assert chunks.filter(step_ms=15_000).count() == 2
    (series,) = store.read_series(attempt.pk, ["loss"])
    assert [float(each) for each in series.value if each > 0] == [2.0, 2.0]


def test_a_long_journal_is_sealed_in_parts_that_fit_into_memory(attempt, monkeypatch):
    monkeypatch.setattr(store, "SEALED_VALUES", 3)
    sizes: list[int] = []

    def counted(points):
        sizes.append(len(points))
        return gathered(points)

    gathered = store.gather
    for seq in range(1, 8):
        events_accept(host=attempt.host, batch=batch_of(attempt, POINT, first=seq))
    monkeypatch.setattr(store, "gather", counted)
    assert store.seal(attempt.pk, "job", through_seq=6) == 6
    assert sizes == [3, 3]
    assert store.MetricBatch.objects.count() == 1


# Refusals: each reason may hold a name that the host made up.


def test_a_batch_of_different_faults_takes_a_few_rows(attempt, django_assert_max_num_queries):
    faults = [("metric", {"source": "job", "values": {f"m{n}": "x"}}) for n in range(300)]
    with django_assert_max_num_queries(80):
        events_accept(host=attempt.host, batch=batch_of(attempt, *faults))
    rows = dict(RefusedMessage.objects.values_list("reason", "count"))
    assert sum(rows.values()) == 300
    assert len(rows) == pools.MAX_REASONS_AT_ONCE + 1
    assert rows[pools.OTHER_REASONS] == 290


def test_an_attempt_announces_so_many_artefacts_and_the_next_is_refused_by_name(
    attempt, monkeypatch
):
    monkeypatch.setattr(event_effects, "MAX_ARTEFACTS", 2)
    body = {"kind": "report", "total_bytes": 0, "files": {}, "sha256": {}}
    names = ("a", "b", "c", "a")
    batch = batch_of(attempt, *[("artefact", {"name": name, **body}) for name in names])
    events_accept(host=attempt.host, batch=batch)
    assert set(Artefact.objects.values_list("name", flat=True)) == {"a", "b"}
    assert "2 artefacts, the limit" in RefusedMessage.objects.get().reason


def test_a_long_end_still_ends_its_job_and_keeps_its_last_lines(attempt):
    lines = [f"{number:06d}" + "x" * 2000 for number in range(900)]
    record = EXIT_OK | {"last_lines": lines, "conditions": {"xids": lines}}
    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", record)))
    attempt.refresh_from_db()
    kept = attempt.exit_record["last_lines"]
    assert kept[-1] == lines[-1]
    assert sum(map(len, kept)) <= MAX_LAST_CHARACTERS
    assert len(json.dumps(attempt.exit_record)) < 3 * MAX_LAST_CHARACTERS
    assert Job.objects.get(pk=attempt.job_id).state == "succeeded"


def test_figures_and_files_of_an_attempt_are_limited_by_name(attempt):
    files = {f"f{number}": 1 for number in range(20_001)}
    artefact = {"name": "a", "kind": "model", "total_bytes": 1, "sha256": {}}
    faults = {
        "result": {"measured": {f"m{number}": 1.0 for number in range(2001)}},
        "artefact": artefact | {"files": files},
    }
    batch = received(attempt, *faults.items(), ("artefact", artefact | {"files": {"a": -1}}))
    events_accept(host=attempt.host, batch=batch)
    reasons = sorted(RefusedMessage.objects.values_list("reason", flat=True))
    assert [reason.split(": ")[1] for reason in reasons] == ["files.a", "files", "measured"]


# Redis: it has no quotas, and a host may write any key below its own prefix.


def test_a_host_that_fills_redis_loses_its_keys_and_no_other_does(
    redis_client, attempt, team, monkeypatch
):
    bad, worse, good = attempt.host, enrol(team, name="Worse")[0], enrol(team, name="Good")[0]
    monkeypatch.setattr(epoch, "MAX_KEYS_BYTES", 100_000)
    monkeypatch.setattr(epoch, "MAX_KEYS", 20)
    for number in range(5):
        redis_client.set(f"{key_prefix(bad.pk)}{number}", "x" * 30_000)
    for number in range(21):
        redis_client.set(f"{key_prefix(worse.pk)}{number}", "x")
    redis_client.set(f"{key_prefix(good.pk)}jobs", "x" * 30_000)
    redis_client.set("live", "x" * 200_000)
    assert set(epoch.delete_excess()) == {bad.pk, worse.pk}
    assert sorted(redis_client.scan_iter()) == [f"{key_prefix(good.pk)}jobs".encode(), b"live"]
    told = RefusedMessage.objects.filter(kind="stream").values_list("host", flat=True)
    assert set(told) == {bad.pk, worse.pk}


def test_a_host_that_answers_pings_without_end_holds_back_no_other_hosts_answer(
    redis_client, team
):
    hosts = [enrol(team, name=name)[0] for name in ("Bad", "Good")]
    for host in hosts:
        host_beat(host=host, beat=make_beat(facts=make_facts()))
        checks_update(host.pk, has_redis=True)
    first, second = sorted(hosts, key=lambda host: host.pk)

    def ring(host, doorbell):
        if host.pk == first.pk:  # the one of which Redis is asked first
            redis_client.lpush(pong_key(host.pk), *["another"] * 1000)
        else:
            redis_client.lpush(pong_key(host.pk), doorbell.command_id)

    clock = iter(range(10**6))  # each look takes a tenth of a second
    trips = RoundTrips(redis_client, ring, clock=lambda: next(clock) / 10)
    assert trips.step() == 1
    assert "seconds" in Host.objects.get(pk=second.pk).checks["queue"]


def test_a_script_without_end_is_ended(redis_server, redis_client):
    redis_client.config_set("lua-time-limit", 50)  # milliseconds until others are told
    endless = redis.Redis.from_url(redis_server.url)
    runs = threading.Thread(target=_is_killed, args=(endless,))
    runs.start()
    time.sleep(0.2)
    with pytest.raises(redis.ResponseError, match="BUSY"):
        redis_client.get("x")
    epoch.keep()
    runs.join(timeout=5)
    assert not runs.is_alive()
    assert redis_client.get("x") is None


def _is_killed(client: redis.Redis) -> None:
    with pytest.raises(redis.ResponseError, match="killed"):
        client.eval("while true do end", 0)
    client.close()
