"""What people do to jobs, and which devices a job holds meanwhile."""

from datetime import timedelta

import pytest
from django.db import IntegrityError, transaction

from runners.jobspec import BenchmarkSpec, DemoModel
from runners.shared.reasons import Reason
from tests.webapp.conftest import (
    EXIT_OK,
    GIB,
    batch_of,
    claim,
    enrol,
    make_facts,
    make_job,
    new_attempt,
)
from webapp.agents.dispatch import GRACE_BEATS, end_unclaimed, end_unknown_attempts
from webapp.agents.ingest import events_accept
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.hosts.models import Device, Host
from webapp.hosts.pools import devices_sync, pool_ensure
from webapp.jobs.gangs import devices_take
from webapp.jobs.models import Allocation, Attempt, Command, Job
from webapp.jobs.services import (
    job_abandon,
    job_clone,
    job_delete,
    job_stop,
    job_submit,
    queue_expire,
)

pytestmark = pytest.mark.django_db(databases="__all__")


def test_a_new_job_is_a_draft_with_its_spec_which_cannot_be_stopped(draft):
    assert (draft.state, draft.kind, draft.spec["max_steps"]) == ("draft", "train", None)

    with pytest.raises(ConflictProblem, match="so it cannot be stopped"):
        job_stop(job=draft, by="alice")


def test_the_kind_comes_from_the_spec(team, alice, host):
    job = make_job(team, alice, host, spec=BenchmarkSpec(model=DemoModel()))
    assert job.kind == "benchmark"


def test_the_same_idempotency_key_gives_the_same_job(team, alice, host):
    first, second = (make_job(team, alice, host, idempotency_key="k") for _ in range(2))
    assert first.pk == second.pk


def test_another_teams_host_is_refused(other_team, charlie, host):
    with pytest.raises(InvalidProblem, match="another team"):
        make_job(other_team, charlie, host)


def test_a_virtual_host_is_refused(team, alice):
    virtual = Host.objects.create(
        team=team, name="Dream", slug="dream", kind="virtual", pool=pool_ensure(team=team)
    )
    with pytest.raises(InvalidProblem, match="planning-only host"):
        make_job(team, alice, virtual)


def test_a_retired_host_is_refused(team, alice, host):
    host.state = "retired"
    with pytest.raises(InvalidProblem, match="retired"):
        make_job(team, alice, host)


def test_submit_makes_one_attempt_and_its_doorbell_however_often(job):
    attempt = job.current_attempt
    assert (attempt.number, len(attempt.fence)) == (1, 32)
    assert Command.objects.get(attempt=attempt).kind == "start"
    job_submit(job=job, by="alice")
    assert (job.attempts.count(), job.state) == (1, "preflight")


def test_a_job_waits_while_its_host_is_busy_and_gets_it_when_that_job_is_stopped(
    team, alice, host, job
):
    second = job_submit(job=make_job(team, alice, host), by="alice")
    assert second.state == "queued"
    job_stop(job=job, by="alice")
    second.refresh_from_db()
    assert second.state == "preflight"


def test_stopping_before_the_claim_ends_at_once_and_buries_the_doorbell(job):
    stopped = job_stop(job=job, by="alice")
    assert (stopped.state, stopped.reason) == ("stopped", "stopped_by_user")
    assert Command.objects.get(attempt=job.current_attempt).state == "dead"


def test_stopping_a_claimed_job_asks_its_host_once(attempt):
    stopping = job_stop(job=attempt.job, by="olga", reason=Reason.STOPPED_BY_OPERATOR)
    assert stopping.state == "stopping"
    assert Attempt.objects.get(pk=attempt.pk).stop_reason == "stopped_by_operator"
    assert Command.objects.filter(attempt=attempt, kind="stop").count() == 1
    job_stop(job=attempt.job, by="alice")
    assert Command.objects.filter(attempt=attempt, kind="stop").count() == 1


def test_a_clone_is_a_draft_of_the_one_who_clones(job, bob):
    copy = job_clone(job=job, owner=bob)
    assert (copy.state, copy.owner, copy.spec) == ("draft", bob, job.spec)
    assert copy.name == "Train the demo model (copy)"
    assert job_clone(job=copy, owner=bob).name == copy.name


def test_a_live_job_cannot_be_deleted_and_a_deleted_one_keeps_its_row(job):
    with pytest.raises(ConflictProblem, match="stop it first"):
        job_delete(job=job, by="alice")
    job_delete(job=job_stop(job=job, by="alice"), by="alice")
    assert Job.objects.get(pk=job.pk).deleted_at is not None


def silence(host: Host) -> None:
    Host.objects.filter(pk=host.pk).update(last_seen_at=now() - timedelta(minutes=5))
    host.refresh_from_db()


def test_a_job_is_given_up_by_its_silent_hosts_name_alone(attempt):
    with pytest.raises(ConflictProblem, match="stop the job instead"):
        job_abandon(job=attempt.job, by="alice", typed_host_name="Box")
    silence(attempt.job.host)
    with pytest.raises(InvalidProblem, match="Box"):
        job_abandon(job=attempt.job, by="alice", typed_host_name="Bax")
    job = job_abandon(job=attempt.job, by="alice", typed_host_name="Box")
    assert (job.state, job.reason) == ("stopped", "lost_and_abandoned_by_user")


def test_a_job_that_waited_too_long_expires(team, alice):
    quiet, _ = enrol(team, name="Quiet")
    job = job_submit(job=make_job(team, alice, quiet), by="alice")
    assert queue_expire(older_than=timedelta(seconds=-1)) == 1
    job.refresh_from_db()
    assert (job.state, job.reason) == ("expired", "queue_timeout")


# Who holds which devices, from the choice to the end of the attempt.


def held() -> list[str]:
    return sorted(
        Allocation.objects.filter(released_at=None).values_list("device__uuid", flat=True)
    )


def with_gpus(host: Host, count: int) -> Host:
    gpus = [
        {"index": i, "uuid": f"GPU-{i}", "name": "NVIDIA L4", "memory_bytes": 24 * GIB}
        for i in range(count)
    ]
    devices_sync(host, make_facts(gpus=gpus))
    return host


def test_a_queued_job_has_no_attempt_and_holds_nothing(team, alice, host):
    Host.objects.update(state="draining")
    job = job_submit(job=make_job(team, alice, host), by="alice")
    assert (job.current_attempt, job.host, held()) == (None, None, [])


def test_a_job_that_got_its_turn_holds_the_hosts_devices_until_a_stop_before_the_claim(job):
    assert (job.host.name, held()) == ("Box", ["cpu"])
    job_stop(job=job, by="alice")
    assert held() == []


def test_two_jobs_share_a_host_each_on_devices_of_its_own(team, alice, host):
    with_gpus(host, 3)
    first, second = (
        job_submit(job=make_job(team, alice, host, devices_per_host=1), by="alice")
        for _ in range(2)
    )
    assert (first.state, second.state, held()) == ("preflight", "preflight", ["GPU-0", "GPU-1"])


def test_a_claim_says_which_devices_are_the_jobs_own(team, alice, host):
    with_gpus(host, 2)
    job = job_submit(job=make_job(team, alice, host, devices_per_host=2), by="alice")
    request = claim(job.current_attempt)
    assert [(one.kind, one.index, one.uuid) for one in request.devices] == [
        ("gpu", 0, "GPU-0"),
        ("gpu", 1, "GPU-1"),
    ]


def test_the_database_refuses_a_second_holder(job):
    other = new_attempt(job)
    with pytest.raises(IntegrityError), transaction.atomic():
        devices_take(attempt=other, devices=Device.objects.all())


def test_the_exit_of_an_attempt_frees_its_devices(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", EXIT_OK)))
    assert held() == []


def test_a_stop_after_the_claim_waits_for_the_host_to_confirm(attempt):
    job_stop(job=attempt.job, by="alice")
    assert held() == ["cpu"]


def test_silence_frees_nothing_until_a_person_gives_the_job_up(attempt):
    Host.objects.update(last_seen_at=now() - timedelta(hours=3))
    end_unclaimed()
    assert held() == ["cpu"]
    job = Job.objects.get(pk=attempt.job_id)
    job_abandon(job=job, by="alice", typed_host_name="Box")
    assert held() == []


def test_a_start_that_nobody_took_frees_the_devices(job):
    Event.objects.filter(subject=job.pk).update(at=now() - timedelta(seconds=130))
    end_unclaimed()
    assert held() == []


def test_an_attempt_that_its_host_does_not_know_frees_the_devices(attempt):
    for _ in range(GRACE_BEATS + 1):
        end_unknown_attempts({attempt.host_id: []})
    assert held() == []
