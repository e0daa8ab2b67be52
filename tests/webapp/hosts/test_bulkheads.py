"""What one host, one pool or one job does wrong stays with it."""

import threading

import pytest

from tests.webapp.conftest import (
    enrol,
    make_beat,
    make_job,
    make_microbench,
)
from tests.webapp.hosts.conftest import another_attempt
from webapp.agents import dispatch, heartbeats
from webapp.agents.heartbeats import HostHeartbeat, ReceivedHeartbeat, host_beat, host_beats
from webapp.core.clock import now
from webapp.hosts.models import Host
from webapp.jobs.models import Attempt, Job
from webapp.jobs.services import job_submit
from webapp.operations.management.commands import ticker as ticker_command
from webapp.operations.ticker import GROUPS, Duty, Stopper, all_duties

pytestmark = pytest.mark.django_db(databases="__all__")


# Heartbeats and what they set off


def sizes_of_batches(monkeypatch, poisoned: str) -> list[int]:
    """Have heartbeats of a boot fail; return a list that grows by the size of each batch."""
    sizes: list[int] = []

    def raise_for_one_host(spoken):
        sizes.append(len(spoken))
        if any(each.beat.boot_id == poisoned for each in spoken):
            raise ValueError
        return host_beats(spoken)

    monkeypatch.setattr(heartbeats, "host_beats", raise_for_one_host)
    monkeypatch.setattr(heartbeats, "_alone_until", {})
    return sizes


def test_a_host_whose_heartbeat_fails_is_stored_alone_from_then_on(team, monkeypatch):
    sizes = sizes_of_batches(monkeypatch, "poison")
    keys = [enrol(team, name=name)[1] for name in ("Bad", "Good", "Good 2")]
    boots = ("poison", "a", "b")
    batch = [
        ReceivedHeartbeat(key, make_beat(boot_id=boot))
        for key, boot in zip(keys, boots, strict=True)
    ]
    for expected in ([3, 1, 1, 1], [2, 1]):
        sizes.clear()
        first, *others = heartbeats.answers_to(batch)
        assert sizes == expected
        assert first.status == 422
        assert all(other.server_time_ms for other in others)


def test_a_pool_that_cannot_be_allocated_costs_no_answer_and_no_other_pool(
    draft, host, other_team, charlie, monkeypatch
):
    other, _ = enrol(other_team, name="Other")
    Host.objects.update(last_seen_at=None)
    host_beat(host=other, beat=make_beat(microbench=make_microbench()))
    Host.objects.update(last_seen_at=None)
    jobs = [job_submit(job=each, by="x") for each in (draft, make_job(other_team, charlie, other))]
    Host.objects.update(last_seen_at=now())
    whole = dispatch.allocate_pool

    def raise_for_one_host(pool):
        if pool.pk == draft.pool_id:
            raise LookupError
        return whole(pool)

    monkeypatch.setattr(dispatch, "allocate_pool", raise_for_one_host)
    assert {job.pk for job in dispatch.allocate_all()} == {jobs[1].pk}
    assert host_beat(host=host, beat=make_beat()).server_time_ms


def test_an_attempt_that_cannot_be_described_is_left_out_of_the_answer_alone(job, team, alice):
    other = another_attempt(team, alice, "Good")
    Attempt.objects.filter(pk=other.pk).update(claimed_at=None)
    Job.objects.filter(pk=job.pk).update(spec={"model": "a text"})
    hosts = (job.current_attempt.host_id, other.host_id)
    replies = host_beats([HostHeartbeat(host, make_beat()) for host in hosts])
    assert [[each.attempt_id for each in reply.wanted] for reply in replies] == [[], [other.pk]]


def test_one_lost_attempt_that_cannot_be_ended_keeps_no_other_from_its_end(
    attempt, team, alice, monkeypatch
):
    other = another_attempt(team, alice, "Good")
    whole = dispatch.transition

    def raise_for_one_host(job, *args, **changes):
        if job.pk == attempt.job_id:
            raise LookupError
        return whole(job, *args, **changes)

    monkeypatch.setattr(dispatch, "transition", raise_for_one_host)
    for _ in range(3):
        beats = [HostHeartbeat(each.host_id, make_beat()) for each in (attempt, other)]
        replies = host_beats(beats)
    assert len(replies) == 2
    assert Job.objects.get(pk=other.job_id).reason == "never_started"


# The ticker: sealing the points of one host keeps neither contact nor the audit waiting.


def test_a_group_of_duties_that_takes_long_keeps_no_other_group_waiting(monkeypatch):
    groups = {duty.name: duty.group for duty in all_duties()}
    assert set(groups.values()) == set(GROUPS)
    begun, ends = threading.Semaphore(0), threading.Event()

    def lasts() -> None:
        begun.release()
        ends.wait(30)

    names = ("contact", "metric chunks", "audit chain")
    duties = [Duty(name, 3600.0, lasts, groups[name]) for name in names]
    monkeypatch.setattr(ticker_command, "all_duties", lambda: duties)
    stop = Stopper()
    monkeypatch.setattr(stop, "listen", lambda: None)
    monkeypatch.setattr(ticker_command, "Stopper", lambda: stop)
    running = threading.Thread(target=ticker_command.Command().handle)
    running.start()
    num_begun = sum(begun.acquire(timeout=5) for _ in names)
    stop.event.set()
    ends.set()
    running.join(15)
    assert num_begun == len(names)
