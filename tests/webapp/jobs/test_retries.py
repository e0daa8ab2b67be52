"""A job that its host failed tries again, as often as it was told to, and no other does."""

import pytest

from runners.reasons import Reason
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, claim, make_job
from tests.webapp.jobs.gangs import end as end_part
from tests.webapp.jobs.gangs import make_gang, make_hosts, members
from tests.webapp.jobs.gangs import start as start_together
from webapp.core.problems import InvalidProblem
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.deadlines import GRACE_BEATS, end_unknown_attempts
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import Allocation, Attempt, Event, Job
from webapp.jobs.services import job_clone, job_stop, job_submit
from webapp.jobs.transitions import RETRYABLE
from webapp.jobs.views import waiting_sentence

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def running(team, alice, host) -> Job:
    """A running job that may be tried twice again."""
    job = job_submit(job=make_job(team, alice, host, max_retries=2), by="alice")
    return start(job)


def start(job: Job) -> Job:
    attempt = Attempt.objects.get(pk=Job.objects.get(pk=job.pk).current_attempt_id)
    claim(attempt)
    events_accept(host=attempt.host, batch=batch_of(attempt, ("started", STARTED)))
    return Job.objects.get(pk=job.pk)


def end(job: Job, reason: Reason) -> Job:
    """Have the host report that the job's attempt ended so."""
    attempt = job.current_attempt
    record = {**EXIT_OK, "exit_code": 1, "reason": reason}
    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", record), first=2))
    return Job.objects.get(pk=job.pk)


@pytest.mark.parametrize("reason", sorted(RETRYABLE))
def test_a_job_that_its_host_failed_is_queued_again(running, reason):
    job = end(running, reason)
    assert (job.state, job.num_retries, job.reason) == ("queued", 1, reason)


@pytest.mark.parametrize("reason", sorted(set(Reason) - RETRYABLE - {Reason.QUEUE_TIMEOUT}))
def test_every_other_end_is_final(running, reason):
    job = end(running, reason)
    assert (job.ended_at is not None, job.num_retries) == (True, 0)


def test_a_job_that_ran_out_of_memory_is_never_retried():
    assert not {Reason.OOM_GPU, Reason.OOM_HOST} & RETRYABLE


def test_the_failed_attempt_keeps_its_record_and_lets_go(running):
    first = running.current_attempt
    end(running, Reason.HOST_REBOOTED)
    first.refresh_from_db()
    assert first.exit_record["reason"] == "host_rebooted"
    assert first.ended_at is not None
    assert not Allocation.objects.filter(released_at=None).exists()


def test_the_next_try_is_a_new_attempt_with_a_fence_of_its_own(running):
    first = running.current_attempt
    end(running, Reason.GPU_FAULT)
    allocate_pool(running.pool)
    again = Job.objects.get(pk=running.pk)
    assert (again.state, again.current_attempt.number) == ("preflight", 2)
    assert again.current_attempt.fence != first.fence


def test_after_the_last_retry_the_job_ends(running):
    job = running
    for _ in range(2):
        end(job, Reason.HOST_REBOOTED)
        allocate_pool(job.pool)
        job = start(job)
    job = end(job, Reason.HOST_REBOOTED)
    assert (job.state, job.reason, job.num_retries) == ("error", "host_rebooted", 2)


def test_a_job_without_retries_ends_at_once(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, ("started", STARTED)))
    assert end(attempt.job, Reason.HOST_REBOOTED).state == "error"


def test_an_attempt_that_its_host_no_longer_knows_counts_too(running):
    for _ in range(GRACE_BEATS + 1):
        end_unknown_attempts({running.host_id: []})
    job = Job.objects.get(pk=running.pk)
    assert (job.state, job.reason) == ("queued", "supervisor_lost")


def test_a_job_that_is_being_stopped_is_not_tried_again(running):
    job_stop(job=running, by="alice")
    assert end(Job.objects.get(pk=running.pk), Reason.HOST_REBOOTED).state == "error"


def test_a_job_between_two_tries_can_be_stopped(running):
    job = end(running, Reason.HOST_REBOOTED)
    assert job_stop(job=job, by="alice").state == "stopped"


def test_a_late_word_of_the_failed_attempt_changes_nothing(running):
    first = running.current_attempt
    end(running, Reason.HOST_REBOOTED)
    events_accept(host=first.host, batch=batch_of(first, ("started", STARTED), first=3))
    assert Job.objects.get(pk=running.pk).state == "queued"


def test_the_retry_is_on_record_and_in_the_sentence(running):
    job = end(running, Reason.HOST_REBOOTED)
    event = Event.objects.filter(subject=job.pk, to_state="queued").last()
    assert (event.reason, event.detail["retry"], event.detail["of"]) == ("host_rebooted", 1, 2)
    assert waiting_sentence(job).startswith("Retry 1 of 2. ")


def test_a_copy_may_try_as_often_as_its_original(running, bob):
    assert job_clone(job=running, owner=bob).max_retries == 2


@pytest.mark.parametrize("retries", [-1, 6])
def test_a_number_of_retries_out_of_bounds_is_refused(team, alice, host, retries):
    with pytest.raises(InvalidProblem, match=f"retries is {retries}; it can be 0 to 5"):
        make_job(team, alice, host, max_retries=retries)


@pytest.fixture
def together(team, alice) -> Job:
    """A running job over two hosts that may be tried once again."""
    job = make_gang(team, alice, make_hosts(team, 2, first=7), retries=1)
    start_together(job)
    return job


def test_a_job_on_several_hosts_is_queued_again_once_all_its_parts_have_ended(together):
    first, second = members(together)

    end_part(second, "killed_externally")
    together.refresh_from_db()
    assert (together.state, together.num_retries) == ("stopping", 0)
    end_part(first, "peer_ended")

    together.refresh_from_db()
    assert (together.num_retries, together.reason) == (1, "killed_externally")
    allocate_pool(together.pool)
    again = members(together)
    assert [each.number for each in again] == [2, 2]
    assert [each.host for each in again] == [first.host, second.host]


def test_a_job_on_several_hosts_that_a_person_stops_is_not_tried_again(together):
    job_stop(job=together, by="alice")
    for member in members(together):
        end_part(member, "rank_lost")

    together.refresh_from_db()
    assert (together.state, together.num_retries) == ("stopped", 0)
