"""Silence is judged by the server's clock, and never ends a job."""

from datetime import timedelta

import pytest

from webapp.core.clock import now
from webapp.hosts.contact import Contact, ContactSweep, contact_of, expire_tokens
from webapp.hosts.models import Host
from webapp.jobs.models import Event, Job

pytestmark = pytest.mark.django_db(databases="__all__")


class Clock:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def silent_for(host: Host, seconds: float) -> Host:
    Host.objects.filter(pk=host.pk).update(last_seen_at=now() - timedelta(seconds=seconds))
    host.refresh_from_db()
    return host


@pytest.mark.parametrize(
    ("seconds", "contact"),
    [(0, "live"), (29, "live"), (31, "degraded"), (89, "degraded"), (91, "unreachable")],
)
def test_contact_fades_with_silence(host, seconds, contact):
    assert contact_of(silent_for(host, seconds)) == contact


def test_a_host_that_never_spoke_is_unknown(enrolled):
    assert contact_of(enrolled[0]) is Contact.UNKNOWN


@pytest.fixture
def awake(host) -> ContactSweep:
    """A sweep that is past its pause after the start."""
    clock = Clock()
    sweep = ContactSweep(clock)
    for _ in range(10):
        clock.at += 10
        sweep.step()
    sweep.clock = clock
    return sweep


def test_a_host_that_falls_silent_is_announced_once(awake, host):
    silent_for(host, 100)
    assert [awake.step(), awake.step()] == [[host], []]
    assert Event.objects.filter(kind="host.contact").last().to_state == "unreachable"


def test_silence_never_moves_a_job(awake, attempt):
    silent_for(attempt.host, 10_000)
    awake.step()
    assert Job.objects.get(pk=attempt.job_id).state == "starting"


def test_a_server_that_just_started_accuses_nobody(host):
    silent_for(host, 100)
    assert ContactSweep(Clock()).step() == []


def test_a_server_that_slept_accuses_nobody(awake, host):
    silent_for(host, 100)
    awake.clock.at += 3600
    assert awake.step() == []


def test_good_news_is_not_held_back_by_the_pause(host):
    assert ContactSweep(Clock()).step() == [host]


def test_a_retired_host_is_not_watched(awake, host):
    Host.objects.update(state="retired")
    silent_for(host, 100)
    assert awake.step() == []


def test_tokens_that_ended_long_ago_are_deleted(host):
    host.enrolmenttoken_set.update(expires_at=now() - timedelta(days=31))
    assert expire_tokens() == 1
