"""Silence in words: what is known, how old it is, and never a state of its own."""

from datetime import timedelta

import pytest

from tests.webapp.conftest import client_of
from webapp.core.clock import now
from webapp.hosts.models import Host
from webapp.jobs.models import Job
from webapp.jobs.progress import StateLabel, state_label_of

pytestmark = pytest.mark.django_db(databases="__all__")


def after(attempt, seconds: float) -> Job:
    """Return the running job as it stands when its host has been silent for so long."""
    Host.objects.update(last_seen_at=now() - timedelta(seconds=seconds))
    Job.objects.update(state="running")
    return Job.objects.select_related("host").get(pk=attempt.job_id)


@pytest.mark.parametrize(
    ("seconds", "standing"),
    [
        (3, StateLabel("running")),
        (34, StateLabel("running", note="silent 34 s")),
        (240, StateLabel("lost", "Last known: running", "host silent 4 min")),
    ],
)
def test_a_running_job_stands_as_its_hosts_silence_says(attempt, seconds, standing):
    assert state_label_of(after(attempt, seconds)) == standing


def test_silence_says_nothing_about_a_job_that_is_over(attempt):
    job = after(attempt, 240)
    job.state = "succeeded"

    assert state_label_of(job) == StateLabel("succeeded")


def test_silence_says_nothing_about_a_job_without_a_host(draft):
    assert state_label_of(draft) == StateLabel("draft")


@pytest.mark.parametrize("address", ["/jobs/", "/", "/hosts/box/", "/jobs/{job}/"])
def test_every_page_says_it_in_the_same_words(attempt, alice, address):
    job = after(attempt, 240)

    text = client_of(alice).get(address.format(job=job.pk)).content.decode()

    assert "Last known: running" in text
    assert "host silent 4" in text


def test_a_degraded_host_leaves_the_job_running_in_every_list(attempt, alice):
    after(attempt, 34)

    text = client_of(alice).get("/jobs/").content.decode()

    assert "Running" in text
    assert "silent 34" in text
