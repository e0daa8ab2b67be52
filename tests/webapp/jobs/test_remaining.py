"""What is told of jobs when their host is silent or the site stops."""

import os
import signal
import threading
import time
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import call_command

from runners.shared.reasons import Reason
from tests.webapp.conftest import client_of, make_job
from tests.webapp.jobs.undone import undone
from webapp.core.clock import now
from webapp.hosts.models import Host
from webapp.jobs import allocation
from webapp.jobs.models import Attempt, Job, JobState
from webapp.jobs.progress import StateLabel, state_label_of
from webapp.jobs.services import Remaining, job_submit, remaining, remaining_sentences
from webapp.operations.management.commands import control

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def resumed():
    """Let the process give out devices again, whatever the test did."""
    yield
    allocation.paused.clear()


def test_a_job_runs_on_on_another_host_and_is_unreported_on_this_machine(attempt, host):
    name = f"{attempt.job.name} ({attempt.job_id})"
    found = remaining("somebody-else", now())
    assert (found.elsewhere, found.unreported) == ([f"{name} on {host}"], [])
    found = remaining(host.pk, now())
    assert found.unreported == [name]
    assert "when Slipway is back" in " ".join(remaining_sentences(found))


def test_only_what_ended_with_this_stop_is_named(attempt):
    Job.objects.update(
        state=JobState.STOPPED, reason=Reason.SITE_STOPPED, ended_at=now() - timedelta(hours=1)
    )
    Attempt.objects.update(ended_at=now())
    assert remaining("x", now() - timedelta(minutes=1)).ended == []
    assert len(remaining("x", now() - timedelta(hours=2)).ended) == 1


def test_a_job_that_is_given_to_a_host_and_not_claimed_waits(job):
    assert remaining(job.shown_host.pk, now()).num_waiting == 1


def test_nothing_left_is_said(db):
    assert remaining_sentences(remaining("x", now())) == ["No job was running or waiting."]


def test_of_many_jobs_the_first_are_named_and_the_rest_counted():
    (told,) = remaining_sentences(Remaining([f"job {number}" for number in range(13)], [], [], 0))
    assert "job 9 and 3 more" in told
    assert "job 10" not in told


def test_the_command_prints_a_sentence_a_line(attempt):
    out = StringIO()
    call_command("remaining", since=time.time(), stdout=out)
    assert out.getvalue().startswith("Still running on other hosts")


def test_a_paused_process_gives_nothing_out(team, alice, host, resumed):
    allocation.paused.set()
    waiting = job_submit(job=make_job(team, alice, host), by="alice")
    assert waiting.state == JobState.QUEUED
    assert not Attempt.objects.exists()


def test_usr1_pauses_the_control_worker_and_it_goes_on_storing(monkeypatch, resumed):
    rounds = []

    class Consumer:
        def __init__(self, _):
            pass

        def step(self):
            rounds.append(allocation.paused.is_set())
            time.sleep(0.02)

    class Idle:
        def __init__(self, *_):
            pass

        def step(self):
            time.sleep(0.02)

    monkeypatch.setattr(control, "StreamConsumer", Consumer)
    monkeypatch.setattr(control, "RoundTrips", Idle)
    monkeypatch.setattr(control, "Dispatcher", Idle)
    monkeypatch.setattr(control, "provision", lambda: None)

    def tell() -> None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    }
    telling = threading.Thread(target=tell)
    telling.start()
    call_command("control")
    telling.join()
    for number, handler in before.items():
        signal.signal(number, handler)

    assert rounds[0] is False
    assert rounds[-1] is True


def test_the_page_of_a_job_that_ended_with_the_site_says_so(alice, attempt):
    Job.objects.update(state=JobState.STOPPED, reason=Reason.SITE_STOPPED, ended_at=now())
    page = client_of(alice).get(f"/jobs/{attempt.job_id}/").content.decode()
    assert "ended because Slipway was stopped on the machine that ran it" in page


# Silence in words: what is known, how old it is, and never a state of its own.


def after(attempt, seconds: float) -> Job:
    """Return the running job as it stands when its host has been silent for so long."""
    Host.objects.update(last_seen_at=now() - timedelta(seconds=seconds))
    Job.objects.update(state="running")
    return Job.objects.select_related("host").get(pk=attempt.job_id)


def test_a_running_job_stands_as_its_hosts_silence_says(attempt):
    for seconds, standing in [
        (3, StateLabel("running")),
        (34, StateLabel("running", note="no heartbeat for 34 s")),
        (240, StateLabel("lost", "Last known: running", "host unreachable for 4 min")),
    ]:
        with undone(seconds, standing):
            assert state_label_of(after(attempt, seconds)) == standing


def test_silence_says_nothing_about_a_job_that_is_over(attempt):
    job = after(attempt, 240)
    job.state = "succeeded"
    assert state_label_of(job) == StateLabel("succeeded")


def test_silence_says_nothing_about_a_job_without_a_host(draft):
    assert state_label_of(draft) == StateLabel("draft")


def test_every_page_says_it_in_the_same_words(attempt, alice):
    for address in ["/jobs/", "/", "/hosts/box/", "/jobs/{job}/"]:
        job = after(attempt, 240)
        text = client_of(alice).get(address.format(job=job.pk)).content.decode()
        assert "Last known: running" in text, address
        assert "host unreachable for 4" in text, address


def test_a_degraded_host_leaves_the_job_running_in_every_list(attempt, alice):
    after(attempt, 34)
    text = client_of(alice).get("/jobs/").content.decode()
    assert "Running" in text
    assert "no heartbeat for 34" in text
