"""Two teams' hosts on one machine, which is never given to both."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from django.db import connection, transaction

from tests.webapp.conftest import EXIT_OK, batch_of, claim, make_beat, make_job
from tests.webapp.jobs.undone import undone
from tests.webapp.machines import GPU, MACHINE, host_of
from webapp.agents.dispatch import allocate_all
from webapp.agents.heartbeats import host_beat
from webapp.agents.ingest import events_accept
from webapp.audit.guard import CUTS, EVENTS, LINKS
from webapp.core.clock import now
from webapp.hosts.models import Distinction, Host
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.models import Allocation, Attempt, Job
from webapp.jobs.services import job_abandon, job_stop, job_submit
from webapp.jobs.waiting import waiting_line

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def ours(team) -> Host:
    return host_of(team, "ours")


@pytest.fixture
def theirs(other_team) -> Host:
    return host_of(other_team, "theirs", user_id=1002)


@pytest.fixture
def running(ours, theirs, other_team, charlie) -> Attempt:
    """The other team's job, which its host has claimed."""
    job = make_job(other_team, charlie, theirs, name="Secret plan")
    job = job_submit(job=job, by="charlie")
    claim(job.current_attempt)
    return Attempt.objects.get(job=job)


@pytest.fixture
def waiting(running, team, alice, ours) -> Job:
    """Our job for the same machine, submitted while theirs runs."""
    return job_submit(job=make_job(team, alice, ours), by="alice")


def state(job: Job) -> str:
    return Job.objects.get(pk=job.pk).state


def change(host: Host, **values) -> None:
    Host.objects.filter(pk=host.pk).update(**values)


def test_a_processor_that_another_teams_job_holds_is_not_given_out_though_it_is_silent(
    waiting, theirs
):
    assert waiting.state == "queued"
    assert allocate_all() == []
    silent(theirs)
    assert allocate_all() == []


def test_one_gpu_is_given_out_once_whoever_sees_it(team, other_team, alice, charlie):
    ours = host_of(team, "ours", gpus=[GPU], machine_id=None)
    theirs = host_of(other_team, "theirs", gpus=[GPU | {"index": 3}], machine_id=None)
    first = job_submit(job=make_job(team, alice, ours), by="alice")
    second = job_submit(job=make_job(other_team, charlie, theirs), by="charlie")
    assert (first.state, second.state) == ("preflight", "queued")


def test_a_gpu_that_another_team_claims_later_is_not_taken_from_the_first(
    team, other_team, alice, charlie
):
    for own_id, machine_id, first_waits in [
        (MACHINE, None, False),
        (MACHINE, "b" * 64, False),
        (None, None, False),
        (MACHINE, MACHINE, True),
    ]:
        with undone(own_id, machine_id):
            ours = host_of(team, "ours", gpus=[GPU], machine_id=own_id)
            claiming = host_of(other_team, "claiming", gpus=[GPU], machine_id=machine_id)
            claimed = job_submit(job=make_job(other_team, charlie, claiming), by="charlie")
            job = job_submit(job=make_job(team, alice, ours), by="alice")
            assert claimed.state == "preflight"
            assert job.state == ("queued" if first_waits else "preflight")


def test_another_gpu_of_the_same_machine_is_free(team, other_team, alice, charlie):
    ours = host_of(team, "ours", gpus=[GPU])
    theirs = host_of(other_team, "theirs", user_id=1002, gpus=[GPU | {"uuid": "GPU-two"}])
    first = job_submit(job=make_job(team, alice, ours), by="alice")
    second = job_submit(job=make_job(other_team, charlie, theirs), by="charlie")
    assert (first.state, second.state) == ("preflight", "preflight")


def test_hosts_of_one_user_or_of_no_known_machine_run_side_by_side(ours, team, alice):
    for facts in [{"user_id": 1001}, {"machine_id": None}, {"machine_id": "b"}]:
        with undone(facts):
            beside = host_of(team, "beside", **{"user_id": 1002, **facts})
            jobs = [
                job_submit(job=make_job(team, alice, host), by="alice") for host in (ours, beside)
            ]
            assert [job.state for job in jobs] == ["preflight", "preflight"]


def test_two_jobs_of_one_round_do_not_get_one_machine(team, alice, ours):
    beside = host_of(team, "beside", user_id=1002)
    Host.objects.update(state="draining")
    jobs = [job_submit(job=make_job(team, alice, host), by="alice") for host in (ours, beside)]
    Host.objects.update(state="ready")
    allocate_pool(ours.pool)
    assert sorted(state(job) for job in jobs) == ["preflight", "queued"]


# Turns


def end(attempt: Attempt, capture) -> None:
    with capture(execute=True):
        events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", EXIT_OK)))


def test_the_end_of_their_job_gives_the_machine_to_ours(
    running, waiting, django_capture_on_commit_callbacks
):
    end(running, django_capture_on_commit_callbacks)
    assert state(waiting) == "preflight"


def test_a_team_whose_queue_never_empties_has_every_other_turn(
    running, waiting, other_team, charlie, theirs, django_capture_on_commit_callbacks
):
    next_of_theirs = job_submit(job=make_job(other_team, charlie, theirs), by="charlie")
    end(running, django_capture_on_commit_callbacks)
    assert (state(waiting), state(next_of_theirs)) == ("preflight", "queued")
    claim(Attempt.objects.get(job=waiting))
    end(Attempt.objects.get(job=waiting), django_capture_on_commit_callbacks)
    assert state(next_of_theirs) == "preflight"


def test_a_process_that_was_their_jobs_does_not_keep_the_gpu_from_ours(
    team, other_team, alice, charlie, django_capture_on_commit_callbacks
):
    ours = host_of(team, "ours", gpus=[GPU])
    theirs = host_of(other_team, "theirs", user_id=1002, gpus=[GPU])
    running = job_submit(job=make_job(other_team, charlie, theirs), by="charlie").current_attempt
    claim(running)
    load = {"uuid": "GPU-one", "memory_used_bytes": 0, "utilization": 1.0, "foreign_pids": (7,)}
    host_beat(host=ours, beat=make_beat(gpus=[load]))
    waiting = job_submit(job=make_job(team, alice, ours), by="alice")
    end(running, django_capture_on_commit_callbacks)
    assert state(waiting) == "preflight"


def test_a_stop_before_the_claim_gives_the_machine_to_ours(ours, theirs, team, other_team, alice, charlie):  # fmt: skip
    held = job_submit(job=make_job(other_team, charlie, theirs), by="charlie")
    waiting = job_submit(job=make_job(team, alice, ours), by="alice")
    job_stop(job=held, by="charlie")
    assert state(waiting) == "preflight"


# Silence and reboots


def silent(host: Host) -> None:
    change(host, last_seen_at=now() - timedelta(hours=3))


def test_a_boot_since_their_last_word_frees_the_machine(waiting, ours, theirs):
    silent(theirs)
    host_beat(host=ours, beat=make_beat(boot_id="boot-2"))
    assert state(waiting) == "preflight"


def test_a_boot_that_we_have_not_noticed_frees_nothing(waiting, ours, theirs):
    change(theirs, boot_id="boot-2")
    change(ours, last_seen_at=now() - timedelta(seconds=20))
    assert allocate_all() == []


def test_what_was_given_up_and_still_runs_there_holds_the_machine(running, waiting, theirs):
    status = {"attempt_id": running.pk, "fence": running.fence, "phase": "running"}
    change(theirs, last_seen_at=now() - timedelta(hours=3), last_beat={"attempts": [status]})
    job = Job.objects.get(pk=running.job_id)
    job_abandon(job=job, by="charlie", typed_host_name="theirs")
    assert allocate_all() == []


# An operator's word


def test_hosts_that_an_operator_told_apart_run_side_by_side(waiting, ours, theirs):
    Distinction.objects.create(host=theirs, other=ours, said_by="olga", said_at=now())
    assert allocate_all() == [waiting]


# What people are told


def sentence(job: Job) -> str:
    line = waiting_line(job)
    assert line is not None
    return line.sentence


def test_a_team_is_told_that_others_hold_the_machine_and_no_name(waiting):
    said = sentence(waiting)
    assert "another team's job holds the machine of ours, which several share" in said
    assert "theirs" not in said
    assert "Secret plan" not in said


def test_ones_own_job_on_the_other_host_is_named(team, alice, ours):
    beside = host_of(team, "beside", user_id=1002)
    job_submit(job=make_job(team, alice, beside, name="First"), by="alice")
    waiting = job_submit(job=make_job(team, alice, ours), by="alice")
    assert "the machine of ours is held as beside by “First”" in sentence(waiting)


# Schedulers of two teams at once: one machine is never given to both.


LONG_ENOUGH_SECONDS = 2.0  # for a scheduler that waits for nobody
PATIENCE_SECONDS = 120.0


@pytest.fixture
def rivals(team, other_team, alice, charlie) -> Iterator[list[Host]]:
    """Two teams' hosts on one machine, with a job waiting for each."""
    hosts = [host_of(team, "ours"), host_of(other_team, "theirs", user_id=1002)]
    Host.objects.update(state="draining")
    for host, owner in zip(hosts, (alice, charlie), strict=True):
        job_submit(job=make_job(host.team, owner, host), by=owner.username)
    Host.objects.update(state="ready")
    yield hosts
    if connection.vendor == "postgresql":  # which empties no table of the history at a test's end
        with connection.cursor() as cursor:
            for table in (EVENTS, LINKS, CUTS):
                cursor.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")


def beside(host: Host, given: list[Job]) -> Callable[[], None]:
    """Return what another scheduler does in a connection of its own."""

    def schedule() -> None:
        try:
            given.extend(allocate_pool(host.pool))
        finally:
            connection.close()

    return schedule


@pytest.mark.django_db(transaction=True, databases="__all__")
def test_a_scheduler_waits_for_another_that_gives_the_same_machine_out(rivals):
    given: list[Job] = []
    other = threading.Thread(target=beside(rivals[1], given))
    with transaction.atomic():
        assert len(allocate_pool(rivals[0].pool)) == 1
        other.start()
        other.join(LONG_ENOUGH_SECONDS)  # nothing of ours is committed, so it cannot see it
        has_waited = other.is_alive()
    other.join(PATIENCE_SECONDS)
    assert (has_waited, given) == (True, [])
    assert Allocation.objects.filter(released_at=None).get().device.host == rivals[0]
