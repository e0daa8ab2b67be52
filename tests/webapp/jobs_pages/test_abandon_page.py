"""Giving a job up: what is known, what is asked, and what is said until the old one is dead."""

from datetime import timedelta

import pytest

from tests.webapp.conftest import batch_of, claim, client_of, enrol, make_beat, make_microbench
from webapp.core.clock import now
from webapp.hosts.heartbeats import host_beat
from webapp.hosts.models import Host
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import Allocation, Job

pytestmark = pytest.mark.django_db(databases="__all__")

STOPPED = {
    "exit_code": None,
    "signal": 15,
    "reason": "lost_and_abandoned_by_user",
    "by": "supervisor",
    "started_at_ms": 1,
    "ended_at_ms": 2,
}


def silence(host: Host, seconds: float = 240) -> None:
    Host.objects.filter(pk=host.pk).update(last_seen_at=now() - timedelta(seconds=seconds))


@pytest.fixture
def lost(attempt) -> Job:
    """A running job whose host has not been heard for four minutes."""
    started = {"pid": 7, "boot_id": "boot-1", "argv": ["python"]}
    events_accept(host=attempt.host, batch=batch_of(attempt, ("started", started)))
    silence(attempt.host)
    return Job.objects.get(pk=attempt.job_id)


def page(user, job, tab: str = "") -> str:
    text = client_of(user).get(f"/jobs/{job.pk}/{tab}").content.decode()
    return text.replace("\N{NO-BREAK SPACE}", " ")


def give_up(user, job, name: str = "Box", **more: str):
    return client_of(user).post(f"/jobs/{job.pk}/abandon/", {"host_name": name, **more})


def test_the_page_says_what_is_known(lost, alice):
    text = page(alice, lost, "abandon/")

    assert "Last known: running, host silent 4 min" in text
    assert "1 events stored" in text


def test_the_job_page_leads_there_while_the_host_is_lost(lost, alice):
    assert f"/jobs/{lost.pk}/abandon/" in page(alice, lost)


def test_a_host_in_contact_leads_nowhere(attempt, alice):
    assert "/abandon/" not in page(alice, attempt.job)
    assert "There is nothing to give up" in page(alice, attempt.job, "abandon/")


def test_a_wrong_name_gives_nothing_up(lost, alice):
    answer = give_up(alice, lost, "box")

    lost.refresh_from_db()
    assert (answer.status_code, lost.state) == (422, "running")
    assert b"Type the host" in answer.content


def test_the_right_name_ends_the_job_and_frees_its_devices(lost, alice):
    give_up(alice, lost)

    lost.refresh_from_db()
    assert (lost.state, lost.reason) == ("stopped", "lost_and_abandoned_by_user")
    assert not Allocation.objects.filter(released_at=None).exists()


def test_the_page_says_that_the_old_one_may_still_run(lost, alice):
    give_up(alice, lost)

    text = page(alice, lost)
    assert "Its attempt may still run there" in text
    assert "told to stop the attempt at its next heartbeat" in text


def report(host: Host, attempt, phase: str):
    """Have the host come back with the old attempt on its disk, and return the stop orders."""
    status = {"attempt_id": attempt.pk, "fence": attempt.fence, "phase": phase}
    status |= {"last_seq": 1, "acked_seq": 1}
    return host_beat(host=host, beat=make_beat(attempts=(status,))).stop


def test_a_host_that_returns_is_told_to_stop_it(lost, attempt, alice):
    give_up(alice, lost)

    (order,) = report(attempt.host, attempt, "running")

    assert (order.attempt_id, order.reason) == (attempt.pk, "lost_and_abandoned_by_user")
    assert "was told to stop it; it has not confirmed yet" in page(alice, lost)


def test_once_the_end_is_reported_the_page_confirms_it(lost, attempt, alice):
    give_up(alice, lost)
    report(attempt.host, attempt, "running")

    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", STOPPED), first=2))

    text = page(alice, lost)
    assert "Confirmed by Box: nothing of it runs any more" in text
    lost.refresh_from_db()
    assert lost.state == "stopped"


def test_an_attempt_that_ended_well_meanwhile_changes_nothing_but_is_told(lost, attempt, alice):
    give_up(alice, lost)
    well = STOPPED | {"exit_code": 0, "signal": None, "reason": "ok"}

    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", well), first=2))

    assert "It had succeeded before it could be stopped" in page(alice, lost)
    assert Job.objects.get(pk=lost.pk).state == "stopped"


@pytest.fixture
def second(team) -> Host:
    host, _ = enrol(team, name="Second")
    host_beat(host=host, beat=make_beat(microbench=make_microbench()))
    return Host.objects.get(pk=host.pk)


def test_it_starts_anew_on_another_host_of_the_pool(lost, alice, second):
    give_up(alice, lost, elsewhere=second.pk)

    copy = Job.objects.exclude(pk=lost.pk).get()
    assert (copy.state, copy.host, copy.current_attempt.number) == ("preflight", second, 1)
    assert claim(copy.current_attempt).spec.kind == "train"


def test_a_host_that_cannot_take_it_is_not_offered(lost, alice, second):
    silence(second)

    give_up(alice, lost, elsewhere=second.pk)

    assert Job.objects.count() == 1
    assert "restart it on" not in page(alice, lost, "abandon/")


def test_only_its_owner_or_an_operator_gives_a_job_up(lost, bob, olga):
    assert give_up(bob, lost).status_code == 403
    give_up(olga, lost)

    assert Job.objects.get(pk=lost.pk).state == "stopped"
