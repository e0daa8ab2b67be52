"""Exactly one claim ever gets an attempt's spec."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections

from tests.webapp.conftest import claim, enrol, new_attempt
from webapp.core.problems import ConflictProblem
from webapp.jobs.models import Attempt, Command, Job
from webapp.jobs.services import job_stop

pytestmark = pytest.mark.django_db(databases="__all__")


def test_the_claim_brings_the_spec(job):
    request = claim(job.current_attempt)
    assert (request.attempt_id, request.spec.kind) == (job.current_attempt_id, "train")


def test_the_same_claim_again_gets_the_same_answer(job):
    assert claim(job.current_attempt) == claim(job.current_attempt)


def test_another_claim_is_refused(job):
    claim(job.current_attempt, "folder-1")
    with pytest.raises(ConflictProblem, match="another folder"):
        claim(job.current_attempt, "folder-2")


def test_a_wrong_fence_is_refused(job):
    with pytest.raises(ConflictProblem, match="fence"):
        claim(job.current_attempt, fence="0" * 32)


def test_an_empty_claim_id_gets_nothing_from_an_unclaimed_attempt(job):
    job_stop(job=job, by="alice")
    with pytest.raises(ConflictProblem):
        claim(job.current_attempt, "")


def test_another_host_cannot_claim(job, team):
    stranger, _ = enrol(team, name="Stranger")
    attempt = Attempt.objects.get(pk=job.current_attempt_id)
    attempt.host = stranger
    with pytest.raises(ConflictProblem):
        claim(attempt)


def test_a_stopped_job_cannot_be_claimed(job):
    job_stop(job=job, by="alice")
    with pytest.raises(ConflictProblem, match="not to be run"):
        claim(job.current_attempt)


def test_a_superseded_attempt_cannot_be_claimed(job):
    old = job.current_attempt
    new_attempt(job)
    with pytest.raises(ConflictProblem):
        claim(old)


def test_the_claim_proves_that_the_doorbell_was_heard(job):
    claim(job.current_attempt)
    assert Command.objects.get(attempt=job.current_attempt).state == "acked"


def test_the_claim_keeps_the_hosts_facts_with_the_attempt(attempt):
    assert attempt.facts["cpu_model"] == "Test CPU"


@pytest.mark.django_db(transaction=True, databases="__all__")
def test_of_eight_racing_claims_one_wins(job):
    start = threading.Barrier(8)

    def race(number: int) -> bool:
        start.wait()
        try:
            claim(job.current_attempt, f"folder-{number}")
        except ConflictProblem:
            return False
        finally:
            connections.close_all()
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(race, range(8)))
    assert won.count(True) == 1
    assert Job.objects.get(pk=job.pk).state == "starting"
