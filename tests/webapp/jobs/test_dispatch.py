"""Doorbells ring until somebody proves that they were heard; a dead broker stops nothing."""

from datetime import timedelta

import pytest
import redis as redis_package

from runners.host.app import SignedDoorbell, verify
from runners.shared.messages import Doorbell
from tests.webapp.conftest import make_beat
from tests.webapp.jobs.undone import undone
from webapp.agents import dispatch
from webapp.agents.dispatch import Dispatcher, dispatch_due, expire_stuck_commands, ping_hosts
from webapp.agents.heartbeats import host_beat
from webapp.core.clock import now, now_ms
from webapp.hosts.models import Host
from webapp.hosts.services import command_key
from webapp.jobs.models import Command
from webapp.jobs.services import job_stop

pytestmark = pytest.mark.django_db(databases="__all__")


class Bell:
    def __init__(self, *, is_broken: bool = False) -> None:
        self.is_broken = is_broken
        self.rung: list[Doorbell] = []

    def __call__(self, _host, doorbell: Doorbell) -> None:
        if self.is_broken:
            raise redis_package.ConnectionError("refused")
        self.rung.append(doorbell)


def test_a_command_rings_with_attempt_and_fence_and_then_rests(job):
    bell = Bell()
    dispatch_due(bell)
    attempt = job.current_attempt
    assert [(ring.kind, ring.attempt_id, ring.fence) for ring in bell.rung] == [
        ("start", attempt.pk, attempt.fence)
    ]
    dispatch_due(bell)
    command = Command.objects.get()
    assert (len(bell.rung), command.state, command.tries) == (1, "sent", 1)


def test_rests_grow_to_a_minute(job):
    for _ in range(12):
        Command.objects.update(next_at=now())
        dispatch_due(Bell())
    rest = (Command.objects.get().next_at - now()).total_seconds()
    assert rest == pytest.approx(60, abs=2)


def test_a_claim_silences_the_bell_and_a_stop_rings_it(attempt):
    bell = Bell()
    dispatch_due(bell)
    assert bell.rung == []
    job_stop(job=attempt.job, by="alice")
    dispatch_due(bell)
    assert [ring.kind for ring in bell.rung] == ["stop"]


def test_with_a_dead_broker_everything_waits_and_the_beat_carries_the_start(host, job):
    assert dispatch_due(Bell(is_broken=True)) == 0
    assert Command.objects.get().state == "new"
    assert host_beat(host=host, beat=make_beat()).wanted[0].attempt_id == job.current_attempt_id


def test_commands_of_ended_attempts_or_that_nobody_heard_for_an_hour_are_buried(job):
    with undone():
        attempt = job.current_attempt
        attempt.ended_at = now()
        attempt.save()
        assert expire_stuck_commands() == 1
    with undone():
        Command.objects.update(created_at=now() - timedelta(hours=2))
        assert expire_stuck_commands() == 1


def test_hosts_in_contact_are_pinged_and_silent_ones_are_not(host):
    bell = Bell()
    assert ping_hosts(bell) == 1
    assert bell.rung[0].kind == "ping"
    host.last_seen_at = now() - timedelta(hours=1)
    host.save()
    assert ping_hosts(Bell()) == 0


def test_pings_come_once_a_minute(host):
    at = [100.0]
    bell = Bell()
    dispatcher = Dispatcher(bell, clock=lambda: at[0])
    for _ in range(130):
        at[0] += 1
        dispatcher.step()
    assert [ring.kind for ring in bell.rung] == ["ping", "ping", "ping"]


def test_a_real_broker_gets_a_signed_message_below_the_hosts_prefix(redis_client, host, job):
    dispatch_due()
    queue = f"host:{host.pk}:jobs"
    message = redis_client.lrange(queue, 0, -1)
    assert len(message) == 1


def test_the_message_passes_the_hosts_own_check(redis_client, host, job, monkeypatch):
    sent = []
    app = dispatch.celery_app(dispatch.settings.REDIS_URL)
    monkeypatch.setattr(app, "send_task", lambda name, args, **_: sent.append((name, args)))
    for ahead_ms in (0, 3_600_000):
        with undone(ahead_ms):
            Host.objects.update(clock_offset_ms=ahead_ms)
            dispatch_due()
            name, (body, mac) = sent.pop()
            doorbell = verify(
                SignedDoorbell(body, mac),
                host_id=host.pk,
                key=command_key(host),
                now=(now_ms() + ahead_ms) / 1000,
                is_new_nonce=lambda *_: True,
            )
            assert (name, doorbell.attempt_id) == ("runners.start", job.current_attempt_id)
    assert sent == []


def test_all_hosts_are_rung_over_one_connection(redis_client, host, other_host):
    def connections_after(each) -> int:
        dispatch.ring(each, Doorbell(command_id="one", kind="ping"))
        return redis_client.info("clients")["connected_clients"]

    first, *others = [connections_after(each) for each in (host, other_host, host)]
    assert others == [first, first]
    assert [redis_client.llen(f"host:{one.pk}:jobs") for one in (host, other_host)] == [2, 1]


def test_a_connection_that_died_costs_no_doorbell(redis_server, host):
    ping = Doorbell(command_id="one", kind="ping")
    dispatch.ring(host, ping)
    redis_server.kill()
    redis_server.start()
    dispatch.ring(host, ping)
    with redis_package.Redis.from_url(redis_server.url) as client:
        assert client.llen(f"host:{host.pk}:jobs") >= 1


def test_a_real_broker_that_is_away_is_done_without(job, settings, tmp_path):
    settings.REDIS_URL = f"unix://{tmp_path}/nobody.sock"
    assert dispatch_due() == 0
