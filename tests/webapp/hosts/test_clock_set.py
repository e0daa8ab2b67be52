"""The server's own clock is set: no host is accused, and no silent one looks live."""

from datetime import timedelta

import pytest

from runners.shared.messages import EnrollRequest
from tests.webapp.conftest import make_facts
from webapp.agents import dispatch
from webapp.core.clock import now
from webapp.core.problems import UnauthorizedProblem
from webapp.hosts import services
from webapp.hosts.models import Host
from webapp.hosts.services import (
    Contact,
    ContactSweep,
    contact_of,
    host_enroll,
    token_create,
)
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db


class Clocks:
    """The server's clock, which people set, and the one that they cannot."""

    def __init__(self, monkeypatch) -> None:
        self.at, self.begin, self.set_by = 1000.0, now(), 0.0
        monkeypatch.setattr(services, "now", self.now)
        monkeypatch.setattr(dispatch, "now", self.now)

    def __call__(self) -> float:
        return self.at

    def now(self):
        return self.begin + timedelta(seconds=self.at - 1000.0 + self.set_by)

    def wait(self, seconds: float) -> None:
        self.at += seconds


@pytest.fixture
def clocks(monkeypatch) -> Clocks:
    return Clocks(monkeypatch)


@pytest.mark.parametrize("hours", [1, -1])
def test_a_clock_that_is_set_announces_no_host_that_reports(host, clocks, hours):
    Host.objects.update(last_seen_at=clocks.now(), contact=Contact.LIVE)
    sweep = ContactSweep(clocks)
    found = []
    for step in range(40):
        clocks.wait(5)
        if step == 20:
            clocks.set_by = 3600.0 * hours
        if step % 2 and step != 21:  # a heartbeat each ten seconds; one comes late
            Host.objects.update(last_seen_at=clocks.now())
        found += sweep.step()
    assert found == []


def test_a_host_that_fell_silent_does_not_look_live_for_an_hour(host, clocks):
    sweep = ContactSweep(clocks)
    Host.objects.update(last_seen_at=clocks.now(), contact=Contact.LIVE)
    clocks.set_by = -3600.0
    found = []
    for _ in range(40):
        clocks.wait(5)
        found += sweep.step()
    assert {each.pk for each in found} == {host.pk}
    host.refresh_from_db()
    assert contact_of(host) is Contact.UNREACHABLE


def test_a_job_that_was_just_given_out_outlives_a_clock_that_is_set(job, clocks, monkeypatch):
    monkeypatch.setattr(services, "contact_of", lambda _host: Contact.LIVE)
    monkeypatch.setattr(dispatch, "contact_of", lambda _host: Contact.LIVE)
    deadline = dispatch.StartDeadline(clocks)
    for _ in range(40):
        clocks.wait(5)
        deadline.step()
        Job.objects.filter(pk=job.pk).update(state="preflight")
        dispatch.Event.objects.filter(subject=job.pk).update(at=clocks.now())
    clocks.set_by = 3600.0
    clocks.wait(5)
    assert deadline.step() == []


def enrols(text: str) -> bool:
    try:
        host_enroll(EnrollRequest(token=text, facts=make_facts(), sent_at_ms=1))
    except UnauthorizedProblem:
        return False
    return True


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("seconds", [-3600.0, -600.0])
def test_a_clock_that_is_set_back_gives_no_token_more_than_its_hour(
    team, clocks, is_running, seconds
):
    tokens = [token_create(team=team, by=None, name=name)[1] for name in "ab"]
    sweep = ContactSweep(clocks)
    clocks.wait(5)
    if is_running:
        sweep.step()
    clocks.set_by = seconds
    clocks.wait(5)
    if not is_running:  # the site starts after its clock was set
        sweep = ContactSweep(clocks)
    sweep.step()
    clocks.wait(3585)
    assert enrols(tokens[0])
    clocks.wait(10 if is_running else 20)
    assert not enrols(tokens[1])
