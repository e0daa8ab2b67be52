"""What one host sends never harms another: every shape on the wire, with hostile values."""

import json

import pytest

from runners.messages import ReceivedBatch
from runners.redis_access import ack_key, encode, events_key
from runners.wire import excerpt
from tests.plugins.extent import first
from tests.webapp.api.conftest import HostClient
from tests.webapp.api.test_beat_door import bearer, knock
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
from webapp.core.clock import now
from webapp.core.pace import calls
from webapp.hosts import heartbeats
from webapp.hosts.models import Host, RefusedMessage
from webapp.jobs import consume, ingest
from webapp.jobs.consume import StreamConsumer
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import Attempt, AttemptEvent, Job
from webapp.jobs.services import job_submit
from webapp.metrics.models import MetricBatch, MetricSource
from webapp.metrics.rollup import seal_due
from webapp.metrics.store import MAX_METRICS

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

    def fails_for_one(spoken):
        if any(each.beat.boot_id == "poison" for each in spoken):
            raise ValueError("poison")
        return whole(spoken)

    monkeypatch.setattr(heartbeats, "host_beats", fails_for_one)

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


@pytest.mark.parametrize(("kind", "body"), BODIES, ids=[kind for kind, _ in BODIES])
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


def test_facts_that_are_stored_longer_than_their_limits_are_still_read(host):
    texts = ("hostname", "os", "kernel", "cpu_model", "python_version", "agent_version", "boot_id")
    long = make_facts().model_dump(mode="json") | dict.fromkeys(texts, "x" * 900)

    assert len(make_facts().model_validate(long).agent_version) == 40


def test_an_end_that_cannot_be_carried_out_is_not_passed_over(attempt, monkeypatch):
    def fails(*_):
        raise KeyError("a fault of the server")

    monkeypatch.setattr(ingest, "final_state", fails)
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


def test_an_excerpt_of_what_is_nested_too_deep_is_no_fault():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]

    assert "nested deeper" in excerpt(deep)
