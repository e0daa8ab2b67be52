"""What people do to jobs."""

from datetime import timedelta

import pytest

from runners.jobspec import BenchmarkSpec, DemoModel
from runners.reasons import Reason
from tests.webapp.conftest import enrol, make_job
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.hosts.models import Host
from webapp.hosts.pools import pool_ensure
from webapp.jobs.models import Attempt, Command, Job
from webapp.jobs.services import (
    job_abandon,
    job_clone,
    job_delete,
    job_stop,
    job_submit,
    queue_expire,
)

pytestmark = pytest.mark.django_db(databases="__all__")


def test_a_new_job_is_a_draft_with_its_spec(draft):
    assert (draft.state, draft.kind, draft.spec["max_steps"]) == ("draft", "train", None)


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
    with pytest.raises(InvalidProblem, match="only planned for"):
        make_job(team, alice, virtual)


def test_a_retired_host_is_refused(team, alice, host):
    host.state = "retired"
    with pytest.raises(InvalidProblem, match="retired"):
        make_job(team, alice, host)


def test_submit_makes_the_first_attempt_and_its_doorbell(job):
    attempt = job.current_attempt
    assert (attempt.number, len(attempt.fence)) == (1, 32)
    assert Command.objects.get(attempt=attempt).kind == "start"


def test_submitting_twice_makes_one_attempt(job):
    job_submit(job=job, by="alice")
    assert (job.attempts.count(), job.state) == (1, "preflight")


def test_a_job_waits_while_its_host_is_busy(team, alice, host, job):
    second = job_submit(job=make_job(team, alice, host), by="alice")
    assert second.state == "queued"


def test_stopping_before_the_claim_ends_at_once(job):
    stopped = job_stop(job=job, by="alice")
    assert (stopped.state, stopped.reason) == ("stopped", "stopped_by_user")


def test_stopping_before_the_claim_buries_the_doorbell(job):
    job_stop(job=job, by="alice")
    assert Command.objects.get(attempt=job.current_attempt).state == "dead"


def test_stopping_a_claimed_job_asks_its_host(attempt):
    stopping = job_stop(job=attempt.job, by="olga", reason=Reason.STOPPED_BY_OPERATOR)
    assert stopping.state == "stopping"
    assert Attempt.objects.get(pk=attempt.pk).stop_reason == "stopped_by_operator"
    assert Command.objects.filter(attempt=attempt, kind="stop").count() == 1


def test_stopping_twice_orders_once(attempt):
    job_stop(job=attempt.job, by="alice")
    job_stop(job=attempt.job, by="alice")
    assert Command.objects.filter(attempt=attempt, kind="stop").count() == 1


def test_a_draft_cannot_be_stopped(draft):
    with pytest.raises(ConflictProblem, match="nothing runs"):
        job_stop(job=draft, by="alice")


def test_stopping_frees_the_host_for_the_next_job(team, alice, host, job):
    second = job_submit(job=make_job(team, alice, host), by="alice")
    job_stop(job=job, by="alice")
    second.refresh_from_db()
    assert second.state == "preflight"


def test_a_clone_is_a_draft_of_the_one_who_clones(job, bob):
    copy = job_clone(job=job, owner=bob)
    assert (copy.state, copy.owner, copy.spec) == ("draft", bob, job.spec)
    assert copy.name == "Train the demo model (copy)"


def test_a_clone_of_a_clone_is_not_named_copy_copy(job, bob):
    copy = job_clone(job=job_clone(job=job, owner=bob), owner=bob)
    assert copy.name == "Train the demo model (copy)"


def test_a_live_job_cannot_be_deleted(job):
    with pytest.raises(ConflictProblem, match="stop it first"):
        job_delete(job=job)


def test_a_deleted_job_keeps_its_row(job):
    job_delete(job=job_stop(job=job, by="alice"))
    assert Job.objects.get(pk=job.pk).deleted_at is not None


def silence(host: Host) -> None:
    Host.objects.filter(pk=host.pk).update(last_seen_at=now() - timedelta(minutes=5))
    host.refresh_from_db()


def test_a_job_on_a_silent_host_is_given_up_by_typing_its_name(attempt):
    silence(attempt.job.host)
    job = job_abandon(job=attempt.job, by="alice", typed_host_name="Box")
    assert (job.state, job.reason) == ("stopped", "lost_and_abandoned_by_user")


def test_a_job_is_not_given_up_while_its_host_answers(attempt):
    with pytest.raises(ConflictProblem, match="stop the job instead"):
        job_abandon(job=attempt.job, by="alice", typed_host_name="Box")


def test_a_job_is_not_given_up_under_a_wrong_name(attempt):
    silence(attempt.job.host)
    with pytest.raises(InvalidProblem, match="Box"):
        job_abandon(job=attempt.job, by="alice", typed_host_name="Bax")


def test_a_job_that_waited_too_long_expires(team, alice):
    quiet, _ = enrol(team, name="Quiet")
    job = job_submit(job=make_job(team, alice, quiet), by="alice")
    assert queue_expire(older_than=timedelta(seconds=-1)) == 1
    job.refresh_from_db()
    assert (job.state, job.reason) == ("expired", "queue_timeout")
