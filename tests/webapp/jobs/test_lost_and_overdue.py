"""Attempts that a host no longer knows, starts that nobody took, turns that came free."""

from datetime import timedelta

import pytest

from tests.webapp.conftest import claim, enrol, make_beat, make_job, make_microbench
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem
from webapp.hosts.heartbeats import host_beat
from webapp.hosts.models import Host
from webapp.jobs.deadlines import (
    GRACE_BEATS,
    START_TIMEOUT,
    StartDeadline,
    allocate_all,
    end_unclaimed,
    end_unknown_attempts,
)
from webapp.jobs.models import Attempt, Command, Event, Job
from webapp.jobs.services import job_submit
from webapp.jobs.views import waiting_sentence

pytestmark = pytest.mark.django_db


def fresh(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)


def miss(host: Host, times: int, seen=()) -> list[list[Attempt]]:
    return [end_unknown_attempts({host.pk: seen}) for _ in range(times)]


def test_an_attempt_may_be_missed_for_two_beats(attempt):
    assert miss(attempt.host, GRACE_BEATS) == [[], []]
    assert fresh(attempt.job).state == "starting"


def test_an_attempt_that_is_missed_once_more_is_lost(attempt):
    assert miss(attempt.host, GRACE_BEATS + 1)[-1] == [attempt]
    assert fresh(attempt.job).state == "error"


@pytest.mark.parametrize(("acked", "reason"), [(0, "never_started"), (1, "supervisor_lost")])
def test_what_was_heard_of_an_attempt_decides_what_its_loss_is_called(attempt, acked, reason):
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


def test_a_lost_attempt_notes_when_it_ended(attempt):
    miss(attempt.host, GRACE_BEATS + 1)

    assert Attempt.objects.get().ended_at is not None


def test_a_lost_attempt_is_noted_with_who_decided(attempt):
    miss(attempt.host, GRACE_BEATS + 1)

    assert Event.objects.filter(to_state="error").get().actor == "system:reconcile"


def test_a_lost_attempt_is_lost_once(attempt):
    assert [len(lost) for lost in miss(attempt.host, GRACE_BEATS + 4)] == [0, 0, 1, 0, 0, 0]


# Starts that nobody took


def age(job: Job, seconds: float) -> None:
    at = now() - timedelta(seconds=seconds)
    Event.objects.filter(subject=job.pk).update(at=at)


@pytest.mark.parametrize(("beyond", "ended"), [(-2, 0), (2, 1)])
def test_a_start_waits_for_its_claim_as_long_as_is_said(job, beyond, ended):
    age(job, START_TIMEOUT.total_seconds() + beyond)

    assert len(end_unclaimed()) == ended


def test_a_start_that_nobody_took_says_so(job):
    age(job, 500)
    end_unclaimed()

    assert (fresh(job).state, fresh(job).reason) == ("error", "start_timeout")


def test_ending_twice_ends_once(job):
    age(job, 500)

    assert (len(end_unclaimed()), len(end_unclaimed())) == (1, 0)


def test_an_ended_start_rings_no_more(job):
    age(job, 500)
    end_unclaimed()

    assert set(Command.objects.values_list("state", flat=True)) == {"dead"}


def test_the_next_job_gets_the_host_of_one_that_nobody_took(team, alice, host, job):
    waiting = job_submit(job=make_job(team, alice, host, name="Second"), by="alice")
    age(job, 500)
    end_unclaimed()

    assert allocate_all() == [waiting]


def test_only_ready_hosts_with_waiting_jobs_are_looked_at(team, alice, host, job):
    assert allocate_all() == []


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


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (45, "silent for 45 s;"),
        (200, "silent for 3 min 20 s;"),
        (7200, "silent for 2 h;"),
        (3 * 86_400, "silent for 3 d;"),
    ],
)
def test_silence_is_said_in_the_unit_that_people_use(team, alice, host, seconds, words):
    Host.objects.update(last_seen_at=now() - timedelta(seconds=seconds))

    assert words in waiting_sentence(queued(team, alice, host))


@pytest.mark.parametrize("state", ["draining", "maintenance", "retired", "checking"])
def test_a_host_that_takes_nothing_is_named_with_its_state(team, alice, host, state):
    job = queued(team, alice, host)
    Host.objects.update(state=state)

    assert f"Box is {state}" in waiting_sentence(fresh(job))


def test_another_teams_job_is_not_named(team, alice, other_team, charlie, host, job):
    waiting = queued(team, alice, host, name="Mine")
    Job.objects.filter(pk=job.pk).update(team=other_team, name="Secret work")

    assert "when another job ends" in waiting_sentence(waiting)
    assert "Secret" not in waiting_sentence(waiting)


@pytest.mark.parametrize(
    ("ahead", "words"),
    [(0, "(predicted)."), (1, "It is number 2 in"), (2, "It is number 3 in")],
)
def test_those_who_wait_before_are_counted(team, alice, host, job, ahead, words):
    for _ in range(ahead):
        queued(team, alice, host)

    assert words in waiting_sentence(queued(team, alice, host, name="Last"))


def test_a_deleted_job_waits_before_nobody(team, alice, host, job):
    first = queued(team, alice, host)
    Job.objects.filter(pk=first.pk).update(deleted_at=now())

    assert "number" not in waiting_sentence(queued(team, alice, host, name="Last"))


@pytest.mark.parametrize("state", ["draft", "preflight", "starting", "running", "succeeded"])
def test_only_a_queued_job_waits(draft, state):
    Job.objects.update(state=state)

    assert waiting_sentence(fresh(draft)) is None


def test_a_claim_after_the_deadline_is_refused(job):
    age(job, 500)
    end_unclaimed()

    with pytest.raises(ConflictProblem):
        claim(job.current_attempt)


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

    assert look_for(deadline, clock, START_TIMEOUT.total_seconds() - 5) == []
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

    assert look_for(deadline, clock, START_TIMEOUT.total_seconds() - 5) == []


def test_a_server_that_slept_blames_no_host(job):
    age(job, 500)
    clock = Clock()
    deadline = StartDeadline(clock)
    look_for(deadline, clock, 100)
    clock.now += 3600

    assert look_for(deadline, clock, START_TIMEOUT.total_seconds() - 5) == []
