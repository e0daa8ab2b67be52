"""Who gets a host next, and what is checked before."""

from datetime import timedelta

import pytest

from tests.webapp.conftest import EXIT_OK, GIB, batch_of, enrol, make_beat, make_job
from webapp.core.clock import now
from webapp.hosts.heartbeats import host_beat
from webapp.hosts.models import Host
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.deadlines import allocate_all, end_unclaimed
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import Attempt, Command, Event, Job
from webapp.jobs.reservations import devices_release, run_checks
from webapp.jobs.services import job_submit
from webapp.jobs.views import waiting_sentence

pytestmark = pytest.mark.django_db(databases="__all__")


def submit(team, alice, host, **changes) -> Job:
    return job_submit(job=make_job(team, alice, host, **changes), by="alice")


def change(host: Host, **values) -> None:
    Host.objects.filter(pk=host.pk).update(**values)
    host.refresh_from_db()


def fresh(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)


def test_the_oldest_job_goes_first(team, alice, host):
    change(host, state="draining")
    first, second = submit(team, alice, host), submit(team, alice, host)
    change(host, state="ready")
    assert allocate_pool(host.pool) == [first]
    assert fresh(second).state == "queued"


def test_a_host_runs_one_job_at_a_time(team, alice, host, job):
    submit(team, alice, host)
    assert allocate_pool(host.pool) == []


def test_the_end_of_a_job_gives_its_host_to_the_next(
    team, alice, host, attempt, django_capture_on_commit_callbacks
):
    second = submit(team, alice, host)
    with django_capture_on_commit_callbacks(execute=True):
        events_accept(host=host, batch=batch_of(attempt, ("exited", EXIT_OK)))
    assert fresh(second).state == "preflight"


def test_other_hosts_do_not_wait_for_a_busy_one(team, alice, host, job):
    other, _ = enrol(team, name="Other")
    change(other, state="ready", last_seen_at=now(), last_beat=host.last_beat)
    assert submit(team, alice, other).state == "preflight"


@pytest.mark.parametrize("state", ["draining", "maintenance", "checking", "retired"])
def test_only_a_ready_host_gets_work(host, team, alice, state):
    job = make_job(team, alice, host)
    change(host, state=state)
    assert job_submit(job=job, by="alice").state == "queued"


def test_a_silent_host_gets_no_new_work(team, alice, host):
    change(host, last_seen_at=now() - timedelta(seconds=40))
    assert submit(team, alice, host).state == "queued"


def test_the_ticker_gives_waiting_jobs_their_host(team, alice, host):
    change(host, state="draining")
    job = submit(team, alice, host)
    change(host, state="ready")
    assert allocate_all() == [job]


# Preflight

TOO_MUCH = {"peak_memory_bytes": {"value": 64 * GIB, "low": 50 * GIB, "high": 70 * GIB}}


def test_every_check_stands_in_the_event(job):
    event = Event.objects.get(subject=job.pk, to_state="preflight")
    assert [check["name"] for check in event.detail["checks"]] == [
        "state",
        "contact",
        "disk",
        "memory",
    ]


def test_a_job_that_needs_more_memory_than_is_there_goes_back(team, alice, host):
    job = submit(team, alice, host, prediction=TOO_MUCH)
    event = Event.objects.filter(subject=job.pk).last()
    assert (job.state, event.reason) == ("queued", "preflight_failed")
    assert "50.00" in event.detail["checks"][0]["sentence"]


def test_a_job_whose_best_case_fits_may_try(team, alice, host):
    prediction = {"peak_memory_bytes": {"value": 13 * GIB, "low": 11 * GIB, "high": 15 * GIB}}
    assert submit(team, alice, host, prediction=prediction).state == "preflight"


def test_a_full_disk_fails_the_check(job, host):
    host_beat(host=host, beat=make_beat(disk_free_bytes=1))
    failed = [check.name for check in run_checks(job, host) if not check.is_ok]
    assert failed == ["disk"]


def test_a_failed_check_rests_before_it_is_tried_again(team, alice, host):
    job = submit(team, alice, host, prediction=TOO_MUCH)
    allocate_pool(host.pool)
    assert Event.objects.filter(subject=job.pk, to_state="preflight").count() == 1


def test_a_job_behind_a_resting_one_may_go(team, alice, host):
    submit(team, alice, host, prediction=TOO_MUCH)
    assert submit(team, alice, host).state == "preflight"


def test_the_third_failure_is_the_last(team, alice, host):
    job = submit(team, alice, host, prediction=TOO_MUCH)
    for _ in range(2):
        Event.objects.filter(subject=job.pk).update(at=now() - timedelta(minutes=1))
        allocate_pool(host.pool)
    assert (fresh(job).state, fresh(job).reason) == ("error", "preflight_failed")


# A start that nobody took


def age(job: Job, seconds: float) -> None:
    Event.objects.filter(subject=job.pk).update(at=now() - timedelta(seconds=seconds))


def test_an_unclaimed_start_is_waited_for(job):
    age(job, 110)
    assert end_unclaimed() == []


def test_an_unclaimed_start_ends_after_two_minutes(job):
    age(job, 130)
    end_unclaimed()
    assert (fresh(job).state, fresh(job).reason) == ("error", "start_timeout")
    assert Command.objects.get().state == "dead"


def test_a_claimed_start_is_not_ended(attempt):
    age(attempt.job, 500)
    assert end_unclaimed() == []


def test_waiting_in_the_queue_does_not_count_as_starting(team, alice, host, job):
    second = submit(team, alice, host)
    age(second, 500)
    end_unclaimed()
    assert fresh(second).state == "queued"


# Why it waits


def test_a_job_that_does_not_wait_has_no_reason(job):
    assert waiting_sentence(job) is None


def test_a_job_behind_another_says_which(team, alice, host, job):
    waiting = submit(team, alice, host, name="Second")
    assert "Box has 0 of 1 free; next free ≈ " in waiting_sentence(waiting)
    assert "when “Train the demo model” ends" in waiting_sentence(waiting)


def test_a_job_behind_several_says_how_many(team, alice, host, job):
    submit(team, alice, host)
    waiting = submit(team, alice, host)
    assert "It is number 2 in the queue." in waiting_sentence(waiting)


def test_a_job_on_a_draining_host_says_so(team, alice, host):
    change(host, state="draining")
    assert "draining" in waiting_sentence(submit(team, alice, host))


def test_a_job_on_a_silent_host_says_for_how_long(team, alice, host):
    change(host, last_seen_at=now() - timedelta(seconds=200))
    assert "silent for 3 min 20 s" in waiting_sentence(submit(team, alice, host))


def test_a_job_on_a_host_that_never_spoke_says_so(team, alice):
    quiet, _ = enrol(team, name="Quiet")
    change(quiet, state="ready")
    assert waiting_sentence(submit(team, alice, quiet)) == "Quiet has never reported."


def test_a_job_whose_check_failed_says_what_is_short(team, alice, host):
    job = submit(team, alice, host, prediction=TOO_MUCH)
    assert "predicted to need at least 50.00" in waiting_sentence(job)


def test_a_job_on_a_free_host_starts_soon(team, alice, host):
    job = submit(team, alice, host)
    Job.objects.filter(pk=job.pk).update(state="queued")
    devices_release(job.current_attempt)
    assert "within seconds" in waiting_sentence(fresh(job))


def test_an_attempt_is_made_once_per_submit(job):
    assert Attempt.objects.filter(job=job).count() == 1
