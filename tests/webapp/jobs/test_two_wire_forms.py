"""Events by HTTP and through a host's stream: the same batches leave the same rows."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runners.host.redis_access import encode, events_key
from tests.webapp.api.conftest import HostClient
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, enrol, make_job, new_attempt
from tests.webapp.jobs.undone import undone
from webapp.agents import consume
from webapp.agents.consume import StreamConsumer
from webapp.hosts.models import RefusedMessage
from webapp.jobs.models import Artefact, Attempt, AttemptEvent, Job
from webapp.metrics.store import read_raw

pytestmark = pytest.mark.django_db(databases="__all__")
EVENTS = (
    ("phase", {"name": "Loading libraries"}),
    ("metric", {"source": "job", "values": {"loss": 2.5}, "step": 1}),
    ("started", STARTED),
    ("log", {"stream": "stdout", "text": "a\0b"}),
    ("progress", {"done": 3, "total": 10, "unit": "steps", "eta_seconds": 7.0}),
    ("metric", {"source": "job", "values": {"loss": "much"}}),
    ("log", {}),
    ("artefact", {"name": "m", "kind": "report", "total_bytes": 0, "files": {}, "sha256": {}}),
    ("metric", {"source": "job", "values": {"loss": 2.0}, "step": 2}),
    ("phase", {"name": "Training"}),
    ("progress", {"done": -1, "total": 10}),
    ("result", {"measured": {"loss": 2.0}, "notes": {}}),
    ("progress", {"done": 10, "total": 10, "unit": "steps"}),
    ("exited", EXIT_OK),
    ("phase", {"name": "After the end"}),
)
LAST = len(EVENTS)
# First and last number of each batch, in the order in which they come.
DELIVERIES = {
    "all at once": [(1, LAST)],
    "one by one": [(n, n) for n in range(1, LAST + 1)],
    "each twice": [(n, n) for n in range(1, LAST + 1) for _ in range(2)],
    "the whole again": [(1, LAST), (1, LAST)],
    "overlapping": [(1, 4), (3, 9), (5, LAST)],
    "the second half first, then all": [(8, LAST), (1, 7), (8, LAST)],
    "backwards, then all": [*((n, n) for n in range(LAST, 0, -1)), (1, LAST)],
    "the end before the start": [(14, LAST), (1, 2), (14, LAST), (3, LAST)],
}


@pytest.fixture
def by_both(team, alice, redis_client, monkeypatch):
    """Send the same batches by both ways, to an attempt each; return what each leaves."""
    monkeypatch.setattr(consume, "BLOCK_MS", 20)
    monkeypatch.setattr(consume, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(consume, "HOST_SECONDS", 60.0)
    (http_host, credential), (stream_host, _) = enrol(team, name="HTTP"), enrol(team, name="Redis")

    def running(host) -> Attempt:
        attempt = new_attempt(make_job(team, alice, host))
        Job.objects.filter(pk=attempt.job_id).update(state="starting", current_attempt=attempt)
        Attempt.objects.filter(pk=attempt.pk).update(missed_beats=2)
        return attempt

    def send(deliveries: list[tuple[int, int]]) -> tuple[dict, dict]:
        by_http, by_stream = running(http_host), running(stream_host)
        consumer, client = StreamConsumer(redis_client), HostClient(credential)
        for first, last in deliveries:
            events = EVENTS[first - 1 : last]
            path, batch = f"/attempts/{by_http.pk}/events", batch_of(by_http, *events, first=first)
            assert client.post(path, batch).status_code == 200
            entry = encode(batch_of(by_stream, *events, first=first))
            redis_client.xadd(events_key(stream_host.pk), entry)
        while redis_client.xlen(events_key(stream_host.pk)):
            consumer.step()
        return rows_of(by_http), rows_of(by_stream)

    return send


def rows_of(attempt: Attempt) -> dict:
    """Return every row that events of an attempt leave, but for when they came."""
    counters = "acked_seq", "missed_beats", "dropped_duplicates", "refused_gaps"
    figures = "state", "reason", "phase", "progress_done", "progress_total", "eta_seconds"
    ended = Attempt.objects.exclude(ended_at=None).filter(pk=attempt.pk)
    return {
        "events": list(
            AttemptEvent.objects.filter(attempt=attempt)
            .order_by("seq")
            .values_list("seq", "t_ms", "kind", "body")
        ),
        "points": read_raw(attempt.pk, "job", "loss").seq.tolist(),
        "artefacts": list(Artefact.objects.filter(attempt=attempt).values_list("name", "kind")),
        "attempt": Attempt.objects.values(*counters, "exit_record").get(pk=attempt.pk),
        "has_ended": ended.exists(),
        "job": Job.objects.values(*figures, "result").get(pk=attempt.job_id),
        "refused": sorted(
            RefusedMessage.objects.filter(host=attempt.host).values_list("kind", "reason", "count")
        ),
    }


def test_both_ways_leave_the_same_rows_in_whatever_order_batches_come(by_both):
    for name, deliveries in DELIVERIES.items():
        with undone(name):
            by_http, by_stream = by_both(deliveries)

            assert by_stream == by_http
            assert by_http["attempt"]["acked_seq"] == LAST
            assert by_http["points"] == [2, 9]
            assert (by_http["job"]["state"], by_http["job"]["phase"]) == ("succeeded", "Training")
            assert by_http["job"]["progress_done"] == 10
            assert len(by_http["events"]) == LAST - 3  # three are points


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sent=st.lists(
        st.tuples(st.integers(1, LAST), st.integers(0, 5)).map(
            lambda pair: (pair[0], min(LAST, sum(pair)))
        ),
        max_size=6,
    )
)
def test_both_ways_leave_the_same_rows_of_any_deliveries(by_both, sent):
    with undone(sent):
        by_http, by_stream = by_both([*sent, (1, LAST)])
        assert by_stream == by_http
        assert by_http["attempt"]["acked_seq"] == LAST
