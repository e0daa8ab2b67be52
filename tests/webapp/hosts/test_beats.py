"""A beat brings news and takes the desired state home."""

import pytest

from runners.messages import AttemptStatus
from tests.webapp.conftest import (
    EXIT_OK,
    batch_of,
    claim,
    make_beat,
    make_facts,
    make_job,
    make_microbench,
    new_attempt,
)
from webapp.hosts.heartbeats import host_beat
from webapp.hosts.models import Host
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import Job
from webapp.jobs.services import job_stop, job_submit

pytestmark = pytest.mark.django_db(databases="__all__")


def status(attempt, phase: str = "running") -> AttemptStatus:
    return AttemptStatus(
        attempt_id=attempt.pk, fence=attempt.fence, phase=phase, last_seq=3, acked_seq=0
    )


def test_a_host_is_measured_before_it_is_ready(enrolled):
    host, _ = enrolled
    assert host_beat(host=host, beat=make_beat()).run_microbench
    assert host.state == "checking"


def test_its_measurement_makes_a_host_ready(enrolled):
    host, _ = enrolled
    reply = host_beat(host=host, beat=make_beat(microbench=make_microbench()))
    assert (host.state, reply.run_microbench) == ("ready", False)


def test_a_draining_host_stays_draining(host):
    Host.objects.filter(pk=host.pk).update(state="draining")
    host_beat(host=host, beat=make_beat(microbench=make_microbench()))
    assert Host.objects.get(pk=host.pk).state == "draining"


def test_new_facts_replace_the_old(host):
    host_beat(host=host, beat=make_beat(facts=make_facts(cpu_count=64)))
    assert host.facts["cpu_count"] == 64


def test_the_beat_is_kept_without_what_has_its_own_column(host):
    host_beat(host=host, beat=make_beat(problems=("disk",), facts=make_facts()))
    assert host.last_beat["problems"] == ["disk"]
    assert "facts" not in host.last_beat


def test_the_beat_wants_what_is_not_claimed(host, job):
    wanted = host_beat(host=host, beat=make_beat()).wanted
    assert [item.attempt_id for item in wanted] == [job.current_attempt_id]


def test_the_beat_wants_nothing_that_is_claimed(attempt):
    assert host_beat(host=attempt.host, beat=make_beat(attempts=(status(attempt),))).wanted == ()


def test_the_beat_wants_no_superseded_attempt(host, job):
    newer = new_attempt(job)
    wanted = host_beat(host=host, beat=make_beat()).wanted
    assert [item.attempt_id for item in wanted] == [newer.pk]


def test_the_beat_gives_a_free_host_its_next_job(team, alice, host):
    Host.objects.filter(pk=host.pk).update(last_seen_at=None)
    host.refresh_from_db()
    job = job_submit(job=make_job(team, alice, host), by="alice")
    assert job.state == "queued"
    assert len(host_beat(host=host, beat=make_beat()).wanted) == 1


def test_the_beat_orders_the_stop_of_a_stopped_job(attempt):
    job_stop(job=attempt.job, by="alice")
    stop = host_beat(host=attempt.host, beat=make_beat(attempts=(status(attempt),))).stop
    assert [(order.attempt_id, order.reason) for order in stop] == [
        (attempt.pk, "stopped_by_user")
    ]


def test_the_beat_orders_the_stop_of_a_superseded_attempt(attempt):
    new_attempt(attempt.job)
    stop = host_beat(host=attempt.host, beat=make_beat(attempts=(status(attempt),))).stop
    assert [order.reason for order in stop] == ["superseded"]


def test_an_attempt_that_has_exited_is_not_stopped(attempt):
    new_attempt(attempt.job)
    beat = make_beat(attempts=(status(attempt, "exited"),))
    assert host_beat(host=attempt.host, beat=beat).stop == ()


def test_a_folder_of_another_server_is_left_alone(host):
    stranger = AttemptStatus(
        attempt_id="elsewhere", fence="f", phase="running", last_seq=1, acked_seq=0
    )
    assert host_beat(host=host, beat=make_beat(attempts=(stranger,))).stop == ()


def test_the_beat_says_what_is_stored(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, ("phase", {"name": "a"})))
    reply = host_beat(host=attempt.host, beat=make_beat(attempts=(status(attempt),)))
    assert (reply.acked, reply.forget) == ({attempt.pk: 1}, ())


def test_what_has_its_exit_stored_may_be_forgotten(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", EXIT_OK)))
    beat = make_beat(attempts=(status(attempt, "exited"),))
    assert host_beat(host=attempt.host, beat=beat).forget == (attempt.pk,)


# An attempt that its host no longer knows


def beat_without(attempt, times: int) -> Job:
    for _ in range(times):
        host_beat(host=attempt.host, beat=make_beat())
    return Job.objects.get(pk=attempt.job_id)


def test_two_beats_of_grace_pass(attempt):
    assert beat_without(attempt, 2).state == "starting"


def test_the_third_beat_ends_an_attempt_that_never_reported(attempt):
    job = beat_without(attempt, 3)
    assert (job.state, job.reason) == ("error", "never_started")


def test_an_attempt_that_had_reported_lost_its_supervisor(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, ("phase", {"name": "a"})))
    assert beat_without(attempt, 3).reason == "supervisor_lost"


def test_being_seen_again_starts_the_grace_anew(attempt):
    beat_without(attempt, 2)
    host_beat(host=attempt.host, beat=make_beat(attempts=(status(attempt),)))
    assert beat_without(attempt, 2).state == "starting"


def test_an_unclaimed_attempt_cannot_be_lost(host, job):
    for _ in range(5):
        host_beat(host=host, beat=make_beat())
    claim(job.current_attempt)
    assert Job.objects.get(pk=job.pk).state == "starting"
