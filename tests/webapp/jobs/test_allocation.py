"""Who gets a host next, what is checked before, and what is lost or overdue."""

from datetime import timedelta

import pytest

from runners.shared.timing import CLAIM_TIMEOUT_SECONDS
from tests.webapp.conftest import (
    EXIT_OK,
    GIB,
    batch_of,
    claim,
    enrol,
    make_beat,
    make_job,
    make_microbench,
)
from tests.webapp.jobs.undone import undone
from webapp.agents.dispatch import (
    GRACE_BEATS,
    StartDeadline,
    allocate_all,
    end_unclaimed,
    end_unknown_attempts,
)
from webapp.agents.heartbeats import host_beat
from webapp.agents.ingest import events_accept
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem
from webapp.hosts.models import Host
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.gangs import devices_release, run_checks
from webapp.jobs.models import Attempt, Command, Job
from webapp.jobs.services import job_submit
from webapp.jobs.waiting import waiting_sentence

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


def test_a_host_runs_one_job_at_a_time_and_other_hosts_do_not_wait_for_it(team, alice, host, job):
    assert allocate_all() == []
    submit(team, alice, host)
    assert allocate_pool(host.pool) == []
    other, _ = enrol(team, name="Other")
    change(other, state="ready", last_seen_at=now(), last_beat=host.last_beat)
    assert submit(team, alice, other).state == "preflight"


def test_the_end_of_a_job_gives_its_host_to_the_next(
    team, alice, host, attempt, django_capture_on_commit_callbacks
):
    second = submit(team, alice, host)
    with django_capture_on_commit_callbacks(execute=True):
        events_accept(host=host, batch=batch_of(attempt, ("exited", EXIT_OK)))
    assert fresh(second).state == "preflight"


def test_only_a_ready_host_gets_work(host, team, alice):
    for state in ["draining", "maintenance", "checking", "retired"]:
        with undone(state):
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


def test_a_job_that_needs_more_memory_than_is_there_goes_back_twice_and_then_ends(
    team, alice, host
):
    job = submit(team, alice, host, prediction=TOO_MUCH)
    event = Event.objects.filter(subject=job.pk).last()
    assert (job.state, event.reason) == ("queued", "preflight_failed")
    assert "50.00" in event.detail["checks"][0]["sentence"]
    assert "predicted to need at least 50.00" in waiting_sentence(job)
    allocate_pool(host.pool)  # it rests
    assert Event.objects.filter(subject=job.pk, to_state="preflight").count() == 1
    for _ in range(2):
        assert fresh(job).state == "queued"
        age(job, 60)
        allocate_pool(host.pool)
    assert (fresh(job).state, fresh(job).reason) == ("error", "preflight_failed")


def test_a_job_whose_best_case_fits_may_try(team, alice, host):
    prediction = {"peak_memory_bytes": {"value": 13 * GIB, "low": 11 * GIB, "high": 15 * GIB}}
    assert submit(team, alice, host, prediction=prediction).state == "preflight"


def test_a_full_disk_fails_the_check(job, host):
    host_beat(host=host, beat=make_beat(disk_free_bytes=1))
    failed = [check.name for check in run_checks(job, host) if not check.is_ok]
    assert failed == ["disk"]


def test_a_job_behind_a_resting_one_may_go(team, alice, host):
    submit(team, alice, host, prediction=TOO_MUCH)
    assert submit(team, alice, host).state == "preflight"


# A start that nobody took


def age(job: Job, seconds: float) -> None:
    Event.objects.filter(subject=job.pk).update(at=now() - timedelta(seconds=seconds))


def test_an_unclaimed_start_ends_once_after_two_minutes_and_rings_no_more(job):
    age(job, 110)
    assert end_unclaimed() == []
    age(job, 130)
    assert (len(end_unclaimed()), len(end_unclaimed())) == (1, 0)
    assert (fresh(job).state, fresh(job).reason) == ("error", "start_timeout")
    assert Command.objects.get().state == "dead"
    with pytest.raises(ConflictProblem):
        claim(job.current_attempt)


def test_a_claimed_start_is_not_ended(attempt):
    age(attempt.job, 500)
    assert end_unclaimed() == []


def test_waiting_in_the_queue_does_not_count_as_starting(team, alice, host, job):
    second = submit(team, alice, host)
    age(second, 500)
    end_unclaimed()
    assert fresh(second).state == "queued"


# Why it waits


def test_a_job_behind_another_says_which_unless_it_is_of_another_team(
    team, alice, other_team, host, job
):
    waiting = submit(team, alice, host, name="Second")
    assert "Box has 0 of 1 free; next free ≈ " in waiting_sentence(waiting)
    assert "when “Train the demo model” ends" in waiting_sentence(waiting)
    Job.objects.filter(pk=job.pk).update(team=other_team, name="Secret work")
    assert "when another job ends" in waiting_sentence(waiting)
    assert "Secret" not in waiting_sentence(waiting)


def test_a_job_on_a_host_that_never_spoke_says_so(team, alice):
    quiet, _ = enrol(team, name="Quiet")
    change(quiet, state="ready")
    assert waiting_sentence(submit(team, alice, quiet)) == "Quiet has never reported."


def test_a_job_on_a_free_host_starts_soon(team, alice, host):
    job = submit(team, alice, host)
    Job.objects.filter(pk=job.pk).update(state="queued")
    devices_release(job.current_attempt)
    assert "within seconds" in waiting_sentence(fresh(job))


# Attempts that a host no longer knows, starts that nobody took, turns that came free.


def miss(host: Host, times: int, seen=()) -> list[list[Attempt]]:
    return [end_unknown_attempts({host.pk: seen}) for _ in range(times)]


def test_an_attempt_may_be_missed_for_two_beats_and_is_then_lost_once_by_the_reconciler(attempt):
    assert miss(attempt.host, GRACE_BEATS) == [[], []]
    assert fresh(attempt.job).state == "starting"
    assert miss(attempt.host, 4) == [[attempt], [], [], []]
    assert fresh(attempt.job).state == "error"
    assert Attempt.objects.get().ended_at is not None
    assert Event.objects.filter(to_state="error").get().actor == "system:reconcile"


def test_what_was_heard_of_an_attempt_decides_what_its_loss_is_called(attempt):
    for acked, reason in [(0, "never_started"), (1, "supervisor_lost")]:
        with undone(acked, reason):
            Attempt.objects.update(acked_seq=acked)
            miss(attempt.host, GRACE_BEATS + 1)
            assert fresh(attempt.job).reason == reason


def test_being_seen_again_forgives_what_was_missed(attempt):
    miss(attempt.host, GRACE_BEATS)
    end_unknown_attempts({attempt.host.pk: [attempt.pk]})
    assert miss(attempt.host, GRACE_BEATS) == [[], []]


def test_an_attempt_that_nobody_claimed_cannot_be_lost(job):
    assert miss(job.host, GRACE_BEATS + 5)[-1] == []


def test_an_attempt_that_ended_cannot_be_lost(attempt):
    Attempt.objects.update(ended_at=now())
    assert miss(attempt.host, GRACE_BEATS + 5)[-1] == []


def test_one_host_cannot_lose_the_attempt_of_another(attempt, team):
    other, _ = enrol(team, name="Elsewhere")
    miss(other, GRACE_BEATS + 5)
    assert fresh(attempt.job).state == "starting"


def test_a_start_waits_for_its_claim_as_long_as_is_said(job):
    for beyond, ended in [(-2, 0), (2, 1)]:
        with undone(beyond, ended):
            age(job, CLAIM_TIMEOUT_SECONDS + beyond)
            assert len(end_unclaimed()) == ended


def test_the_next_job_gets_the_host_of_one_that_nobody_took(team, alice, host, job):
    waiting = job_submit(job=make_job(team, alice, host, name="Second"), by="alice")
    age(job, 500)
    end_unclaimed()
    assert allocate_all() == [waiting]


def test_every_free_host_gets_a_job_in_one_round(team, alice, host):
    other, _ = enrol(team, name="Elsewhere")
    host_beat(host=other, beat=make_beat(microbench=make_microbench()))
    jobs = [make_job(team, alice, one) for one in (host, other)]
    Host.objects.update(state="draining")
    for one in jobs:
        job_submit(job=one, by="alice")
    Host.objects.update(state="ready")
    assert {one.pk for one in allocate_all()} == {one.pk for one in jobs}


# Why a job waits


def queued(team, alice, host, **changes) -> Job:
    job = job_submit(job=make_job(team, alice, host, **changes), by="alice")
    Job.objects.filter(pk=job.pk).update(state="queued")
    return fresh(job)


def test_silence_is_said_in_the_unit_that_people_use(team, alice, host):
    for seconds, words in [
        (45, "no heartbeat for 45 s;"),
        (200, "no heartbeat for 3 min 20 s;"),
        (7200, "no heartbeat for 2 h;"),
        (3 * 86_400, "no heartbeat for 3 d;"),
    ]:
        with undone(seconds, words):
            Host.objects.update(last_seen_at=now() - timedelta(seconds=seconds))

            assert words in waiting_sentence(queued(team, alice, host))


def test_a_host_that_takes_nothing_is_named_with_its_state(team, alice, host):
    for state in ["draining", "maintenance", "retired", "checking"]:
        with undone(state):
            job = queued(team, alice, host)
            Host.objects.update(state=state)
            assert f"Box is {state}" in waiting_sentence(fresh(job))


def test_those_who_wait_before_are_counted(team, alice, host, job):
    for ahead, words in [
        (0, "(predicted, with a margin)."),
        (1, "It is number 2 in"),
        (2, "It is number 3 in"),
    ]:
        with undone(ahead, words):
            for _ in range(ahead):
                queued(team, alice, host)
            assert words in waiting_sentence(queued(team, alice, host, name="Last"))


def test_a_deleted_job_waits_before_nobody(team, alice, host, job):
    first = queued(team, alice, host)
    Job.objects.filter(pk=first.pk).update(deleted_at=now())
    assert "number" not in waiting_sentence(queued(team, alice, host, name="Last"))


def test_only_a_queued_job_waits(draft):
    for state in ["draft", "preflight", "starting", "running", "succeeded"]:
        Job.objects.update(state=state)
        assert waiting_sentence(fresh(draft)) is None, state


# Silence and the deadline


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def look_for(deadline: StartDeadline, clock: Clock, seconds: float) -> list[Job]:
    """Look every five seconds, as the ticker does, and return what was ended."""
    ended = deadline.step()
    for _ in range(int(seconds / 5)):
        clock.now += 5.0
        ended += deadline.step()
    return ended


def test_a_host_that_is_heard_all_the_time_must_claim_in_time(job):
    age(job, 500)
    clock = Clock()
    deadline = StartDeadline(clock)
    assert look_for(deadline, clock, CLAIM_TIMEOUT_SECONDS - 5) == []
    assert look_for(deadline, clock, 5) == [job]


def test_the_silence_of_a_host_ends_no_unclaimed_job(job, host):
    age(job, 500)
    Host.objects.filter(pk=host.pk).update(last_seen_at=now() - timedelta(seconds=600))
    clock = Clock()
    assert look_for(StartDeadline(clock), clock, 600) == []
    assert fresh(job).state == "preflight"


def test_a_host_that_comes_back_gets_the_whole_time_anew(job, host):
    age(job, 500)
    clock = Clock()
    deadline = StartDeadline(clock)
    look_for(deadline, clock, 100)
    Host.objects.filter(pk=host.pk).update(last_seen_at=now() - timedelta(seconds=600))
    look_for(deadline, clock, 100)
    Host.objects.filter(pk=host.pk).update(last_seen_at=now())
    assert look_for(deadline, clock, CLAIM_TIMEOUT_SECONDS - 5) == []


def test_a_server_that_slept_blames_no_host(job):
    age(job, 500)
    clock = Clock()
    deadline = StartDeadline(clock)
    look_for(deadline, clock, 100)
    clock.now += 3600
    assert look_for(deadline, clock, CLAIM_TIMEOUT_SECONDS - 5) == []
