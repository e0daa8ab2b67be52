"""A job from submit to its end, through the services that the API calls."""

import pytest

from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, claim
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import AttemptEvent, Job

pytestmark = pytest.mark.django_db(databases="__all__")


def test_a_submitted_job_gets_its_free_host_at_once(job):
    assert job.state == "preflight"


def test_a_claim_moves_the_job_to_starting(job):
    claim(job.current_attempt)
    job.refresh_from_db()
    assert job.state == "starting"


def test_a_job_runs_and_succeeds_with_its_events(attempt):
    batch = batch_of(
        attempt, ("started", STARTED), ("phase", {"name": "Training"}), ("exited", EXIT_OK)
    )
    ack = events_accept(host=attempt.host, batch=batch)
    job = Job.objects.get(pk=attempt.job_id)
    assert (ack.acked_seq, job.state, job.reason) == (3, "succeeded", "ok")
    assert AttemptEvent.objects.filter(attempt=attempt).count() == 3
