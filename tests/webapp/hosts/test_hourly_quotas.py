"""What a host may send within an hour: honest ones never notice, others wait, nothing is lost."""

import pytest

from tests.webapp.api.conftest import HostClient
from tests.webapp.api.test_beat_door import bearer, knock
from tests.webapp.conftest import batch_of, enrol, make_beat
from webapp.core.pace import Pace
from webapp.hosts import host_limits
from webapp.hosts.host_limits import QuotaProblem
from webapp.hosts.models import RefusedMessage
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import Attempt, AttemptEvent

pytestmark = pytest.mark.django_db(databases="__all__")
LINE = ("log", {"stream": "stdout", "text": "hello"})
QUOTAS = {
    "events": ("EVENTS", host_limits.EVENTS),
    "events_of_attempt": ("EVENTS_OF_ATTEMPT", host_limits.EVENTS_OF_ATTEMPT),
}


def narrow(monkeypatch, name: str, per_hour: int) -> None:
    monkeypatch.setattr(host_limits, name, getattr(host_limits, name)._replace(per_hour=per_hour))


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(host_limits, "_counts", Pace(clock))
    return clock


def send(attempt: Attempt, num: int):
    attempt.refresh_from_db()
    first = attempt.acked_seq + 1
    return events_accept(host=attempt.host, batch=batch_of(attempt, *[LINE] * num, first=first))


@pytest.mark.parametrize("what", QUOTAS)
def test_events_beyond_the_hour_are_refused_by_name_with_the_way_out(
    attempt, monkeypatch, clock, what
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


def test_what_waited_is_taken_after_the_wait_without_a_gap(attempt, monkeypatch, clock):
    narrow(monkeypatch, "EVENTS", 10)
    send(attempt, 10)
    with pytest.raises(QuotaProblem) as refused:
        send(attempt, 1)
    clock.at += refused.value.wait_seconds

    assert send(attempt, 1).acked_seq == 11
    assert AttemptEvent.objects.count() == 11


def test_bytes_are_counted_too(attempt, monkeypatch, clock):
    monkeypatch.setattr(host_limits, "_IN_BYTES", host_limits._IN_BYTES._replace(burst=1000))
    batch = batch_of(attempt, LINE)

    events_accept(host=attempt.host, batch=batch, num_bytes=900)
    with pytest.raises(QuotaProblem, match="MiB of events in an hour"):
        events_accept(host=attempt.host, batch=batch, num_bytes=200)


def test_the_api_answers_429_and_operators_see_one_row(attempt, credential, monkeypatch, clock):
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
    team, credential, monkeypatch, clock
):
    narrow(monkeypatch, "HEARTBEATS", 2)
    _, other = enrol(team, name="Good")
    body = make_beat().model_dump_json().encode()

    statuses = [knock(body, bearer(credential)).status for _ in range(4)]

    assert statuses == [200, 200, 429, 429]
    assert knock(body, bearer(other)).status == 200
    assert RefusedMessage.objects.get().kind == "heartbeat"


def test_two_hundred_jobs_that_report_each_second_for_hours_are_not_limited(clock):
    for _ in range(3 * 3600 // 10):
        for number in range(200):
            host_limits.keep_events("host", f"attempt {number}", num_events=30, num_bytes=20_000)
        clock.at += 10


def test_a_heartbeat_each_second_for_hours_is_not_limited(clock):
    for _ in range(3 * 3600):
        host_limits.keep_heartbeat("host")
        clock.at += 1
