"""The queue of a pool on real rows, and a long one decided from its first turns."""

from datetime import timedelta

import pytest
import time_machine

from tests.webapp.conftest import EXIT_OK, GIB, batch_of, claim, make_beat, make_job
from tests.webapp.jobs.undone import undone
from tests.webapp.queue.conftest import gpu_host
from webapp.agents import event_effects
from webapp.agents.heartbeats import host_beat
from webapp.agents.ingest import events_accept
from webapp.core.clock import now
from webapp.hosts.models import Device, Host
from webapp.jobs import allocation, pool_state, waiting
from webapp.jobs.allocation import allocate_pool, may_take
from webapp.jobs.models import Allocation, Attempt, Command, Job
from webapp.jobs.pool_state import first_waiting, pool_state_of, used_by_team, waiting_jobs
from webapp.jobs.queue_decisions import decide
from webapp.jobs.queue_order import is_sealed, order_digest
from webapp.jobs.quotas import Rules
from webapp.jobs.services import job_abandon, job_submit
from webapp.jobs.waiting import lines_of, waiting_line, waiting_sentence

pytestmark = pytest.mark.django_db(databases="__all__")


def held(job: Job) -> list[str]:
    rows = Allocation.objects.filter(attempt__job=job, released_at=None)
    return sorted(rows.values_list("device__uuid", flat=True))


def end(attempt: Attempt) -> None:
    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", EXIT_OK)))


def test_jobs_of_one_device_share_a_host(submit, node_a):
    first, second = submit(node_a), submit(node_a)
    assert (held(first), held(second)) == (["node-a-0"], ["node-a-1"])


def test_a_gang_over_two_hosts_gets_an_attempt_on_each(submit, node_a, node_b):
    job = submit(node_a, num_hosts=2, devices_per_host=4)
    members = Attempt.objects.filter(job=job)
    assert [(one.node_rank, one.leader_id) for one in members] == [
        (0, None),
        (1, job.current_attempt_id),
    ]
    assert len({one.fence for one in members}) == 2
    assert (job.host, len(held(job))) == (members[0].host, 8)
    assert Command.objects.filter(kind="start").count() == 2


def test_a_gang_gets_nothing_while_one_host_lacks_a_device(submit, node_a, node_b):
    submit(node_b)
    job = submit(node_a, num_hosts=2, devices_per_host=4)
    assert (job.state, held(job), Attempt.objects.filter(job=job).count()) == ("queued", [], 0)


def test_a_cordoned_device_and_a_draining_host_are_never_given(submit, node_a, node_b):
    Device.objects.filter(uuid="node-a-0").update(cordoned_at=now())
    assert held(submit(node_a)) == ["node-a-1"]

    Host.objects.filter(pk=node_a.pk).update(state="draining")
    assert submit(node_a).host == node_b


def test_a_degraded_host_takes_a_single_and_a_silent_one_nothing(submit, node_a):
    for seconds, state in [(40, "preflight"), (100, "queued")]:
        with undone(seconds, state):
            Host.objects.update(last_seen_at=now() - timedelta(seconds=seconds))
            assert submit(node_a).state == state


def test_a_degraded_host_takes_no_gang(submit, node_a):
    with time_machine.travel(now(), tick=False):
        Host.objects.update(last_seen_at=now() - timedelta(seconds=40))
        job = submit(node_a, devices_per_host=2)
        assert "node-a has sent no heartbeat for 40 s" in waiting_line(job).sentence


def test_a_job_goes_to_a_device_with_enough_memory(submit, team):
    gpu_host(team, "small", 1, gib=8)
    large = gpu_host(team, "large", 1, gib=80)
    Host.objects.update(last_beat=make_beat(memory_available_bytes=200 * GIB).model_dump())
    peak = {"peak_memory_bytes": {"value": 60 * GIB, "low": 50 * GIB, "high": 70 * GIB}}
    assert submit(large, prediction=peak).host == large


def test_a_job_given_up_keeps_its_devices_while_the_host_still_runs_it(submit, node_a):
    job = submit(node_a, devices_per_host=4)
    claim(job.current_attempt)
    status = {"attempt_id": job.current_attempt_id, "fence": job.current_attempt.fence}
    status |= {"phase": "running", "last_seq": 1, "acked_seq": 1}
    host_beat(host=node_a, beat=make_beat(attempts=(status,)))
    Host.objects.update(last_seen_at=now() - timedelta(hours=1))
    job_abandon(job=job, by="alice", typed_host_name="node-a")
    host_beat(host=node_a, beat=make_beat(attempts=(status,)))

    assert submit(node_a).state == "queued"

    host_beat(host=node_a, beat=make_beat())
    assert [one.state for one in Job.objects.filter(state="preflight")] == ["preflight"]


def test_the_next_job_gets_what_an_ended_one_held(
    submit, node_a, django_capture_on_commit_callbacks
):
    first, second = submit(node_a, devices_per_host=4), submit(node_a, devices_per_host=3)
    claim(first.current_attempt)
    with django_capture_on_commit_callbacks(execute=True):
        end(Attempt.objects.get(job=first))
    assert held(second) == ["node-a-0", "node-a-1", "node-a-2"]


def test_what_teams_used_is_counted_in_device_seconds(submit, node_a, team):
    job = submit(node_a, devices_per_host=2)
    Allocation.objects.update(taken_at=now() - timedelta(seconds=100))
    Allocation.objects.filter(device__index=0).update(released_at=now() - timedelta(seconds=40))
    used = used_by_team(node_a.pool, {})
    assert used == {job.team_id: pytest.approx(160, abs=5)}


def test_what_was_used_before_the_last_week_is_forgotten(submit, node_a, team):
    submit(node_a)
    Allocation.objects.update(taken_at=now() - timedelta(days=30))
    week = 7 * 86_400
    assert used_by_team(node_a.pool, {}) == {team.pk: pytest.approx(week, abs=5)}


def test_the_team_that_used_less_is_served_first(submit, node_a, other_team, charlie, team, alice):
    submit(node_a, devices_per_host=4)
    Allocation.objects.update(taken_at=now() - timedelta(hours=3))
    node_a.pool.shared_with.add(other_team)
    mine = submit(node_a)
    theirs = make_job(other_team, charlie, None, pool=node_a.pool, devices_per_host=1)
    theirs = job_submit(job=theirs, by="charlie")
    assert [line.job for line in lines_of(node_a.pool)] == [theirs, mine]


# What the decision says


def test_the_sentence_names_need_what_is_free_when_and_after_whom(submit, node_a):
    submit(node_a, devices_per_host=3, name="Long one", max_duration_seconds=3600)
    peak = {"peak_memory_bytes": {"value": 12 * GIB, "low": 11 * GIB, "high": 13 * GIB}}
    job = submit(node_a, devices_per_host=2, prediction=peak)
    line = waiting_line(job)
    said = line.sentence.replace("\xa0", " ")
    assert said.startswith("It needs 2 × ≥ 11.0 GiB on one host; node-a has 1 of 4 free; next")  # noqa: RUF001 -- a multiplication sign
    assert line.sentence.endswith(" when “Long one” ends (predicted, with a margin).")
    assert line.start_at > now()


def test_a_job_that_would_delay_a_gang_is_told_whom(submit, node_a):
    submit(node_a, devices_per_host=3)
    submit(node_a, devices_per_host=4, name="The gang")
    behind = submit(node_a)
    assert "kept for “The gang”, which is before it" in waiting_line(behind).sentence


def test_a_gang_of_hosts_is_told_how_many_are_ready(submit, node_a, node_b):
    submit(node_b)
    job = submit(node_a, num_hosts=2, devices_per_host=4)
    assert (
        "It needs 4 devices on each of 2 hosts; 1 of 2 hosts have that free"
        in waiting_line(job).sentence
    )


def test_what_no_host_has_is_said_to_be_impossible(submit, node_a):
    job = submit(node_a, devices_per_host=16)
    assert "the pool default has too few of them" in waiting_line(job).sentence


def test_another_teams_job_stays_unnamed(submit, node_a, other_team, charlie):
    submit(node_a, devices_per_host=4, name="Secret")
    node_a.pool.shared_with.add(other_team)
    job = make_job(other_team, charlie, None, pool=node_a.pool, devices_per_host=1)
    line = waiting_line(job_submit(job=job, by="charlie"))
    assert "when another job ends" in line.sentence


def test_allocating_once_too_often_changes_nothing(submit, node_a):
    job = submit(node_a)
    assert allocate_pool(node_a.pool) == []
    assert Attempt.objects.filter(job=job).count() == 1


def test_a_job_that_was_stopped_after_it_was_read_gets_nothing(submit, node_a):
    Device.objects.update(cordoned_at=now())
    job = submit(node_a)
    jobs = waiting_jobs(node_a.pool)
    Job.objects.filter(pk=job.pk).update(state="stopped")
    assert not may_take(Rules(jobs), jobs[0], [(node_a, list(node_a.devices.all()))])


# What the last beat says of each device


def beat_with(*loads: dict):
    return make_beat(gpus=[{"memory_used_bytes": 0, "utilization": 0.0, **load} for load in loads])


def test_a_gpu_that_a_stranger_uses_is_not_given(submit, node_a):
    host_beat(host=node_a, beat=beat_with({"uuid": "node-a-0", "foreign_pids": (4321,)}))
    assert held(submit(node_a)) == ["node-a-1"]


def test_a_gang_waits_while_a_stranger_is_on_one_of_its_gpus(submit, node_a):
    host_beat(host=node_a, beat=beat_with({"uuid": "node-a-0", "foreign_pids": (4321,)}))
    job = submit(node_a, devices_per_host=4)
    assert "node-a has 3 of 4 free" in waiting_line(job).sentence
    host_beat(host=node_a, beat=beat_with({"uuid": "node-a-0"}))
    assert len(held(job)) == 4


def test_a_gpu_with_too_little_free_memory_fails_the_preflight_by_its_number(submit, node_a):
    load = {"uuid": "node-a-0", "memory_used_bytes": 20 * GIB}
    host_beat(host=node_a, beat=beat_with(load))
    peak = {"peak_memory_bytes": {"value": 12 * GIB, "low": 11 * GIB, "high": 13 * GIB}}
    job = submit(node_a, prediction=peak)
    assert "4.00 GiB of GPU 0 are free; the job is predicted to need at least 11.00" in (
        waiting_line(job).sentence
    )


def test_memory_of_the_host_is_not_asked_of_a_job_on_a_gpu(submit, node_a):
    host_beat(host=node_a, beat=make_beat(memory_available_bytes=8 * GIB))
    peak = {"peak_memory_bytes": {"value": 12 * GIB, "low": 11 * GIB, "high": 13 * GIB}}
    assert submit(node_a, prediction=peak).state == "preflight"


# A long queue: its first turns are decided from the first jobs of each team alone.


@pytest.fixture
def mixed(submit, node_a, other_team, charlie) -> list[Job]:
    """Fourteen jobs of two teams in a full pool, of unlike lengths, priorities and ranks."""
    submit(node_a, devices_per_host=4, name="running", max_duration_seconds=3600)
    node_a.pool.shared_with.add(other_team)
    for number in range(7):
        submit(node_a, name=f"ours {number}", max_duration_seconds=600 * (1 + number % 3))
        job = make_job(
            other_team,
            charlie,
            None,
            pool=node_a.pool,
            devices_per_host=1 + number % 2,
            name=f"theirs {number}",
        )
        job_submit(job=job, by="charlie")
    Job.objects.filter(name="ours 5").update(priority=1)
    Job.objects.filter(name__in=["theirs 4", "ours 3"]).update(queue_rank=1)
    return waiting_jobs(node_a.pool)


def decided(pool, jobs, turns):
    """Return the first turns, and why each of them waits."""
    snapshot = pool_state_of(pool, jobs, Rules(jobs)).snapshot
    decision = decide(snapshot, lambda turn, _job: turn >= turns)
    waits = [(one.job, one.why, one.num_free, one.after, one.behind) for one in decision.waits]
    return decision.order[:turns], waits


def test_the_first_turns_and_every_jobs_place_are_those_of_the_whole_queue(mixed, node_a):
    for turns in [1, 2, 5, 9, 13, 14, 20]:
        found = first_waiting(node_a.pool, turns)
        assert found.num_waiting == 14, turns
        assert len(found.jobs) <= min(2 * turns, 14), turns
        assert decided(node_a.pool, found.jobs, turns) == decided(node_a.pool, mixed, turns), turns
    lines = lines_of(node_a.pool)
    assert [waiting_line(line.job).position for line in lines] == list(range(1, 15))


@pytest.mark.parametrize(
    ("is_reserved", "seconds", "started", "num_read"),
    [(False, 20, ["job 0"], [2]), (True, 20, ["job 0"], [2]), (True, 3600, [], [2, 10])],
)
def test_a_freed_device_reads_the_first_jobs_alone_unless_it_is_kept(
    submit, node_a, monkeypatch, is_reserved, seconds, started, num_read
):
    monkeypatch.setattr(pool_state, "SPARE_TURNS", 0)
    running = [submit(node_a, name=f"running {n}", max_duration_seconds=900) for n in range(4)]
    if is_reserved:
        submit(node_a, name="whole", devices_per_host=4)
    for number in range(9):
        submit(node_a, name=f"job {number}", max_duration_seconds=seconds)
    read: list[int] = []
    monkeypatch.setattr(
        allocation,
        "pool_state_of",
        lambda pool, jobs, *rest: (read.append(len(jobs)), pool_state_of(pool, jobs, *rest))[1],
    )
    assert allocate_pool(node_a.pool) == []
    assert read == []  # no device is free
    with monkeypatch.context() as first:
        first.setattr(event_effects, "allocate_after", str)
        end(running[0].attempts.get())
    jobs = waiting_jobs(node_a.pool)
    whole = decide(pool_state_of(node_a.pool, jobs, Rules(jobs)).snapshot)
    granted = allocate_pool(node_a.pool)
    assert [job.pk for job in granted] == [grant.job for grant in whole.grants]
    assert ([job.name for job in granted], read) == (started, num_read)


def test_far_behind_a_job_is_told_its_place_and_no_forecast(submit, node_a, monkeypatch):
    monkeypatch.setattr(waiting, "FORESEEN_TURNS", 2)
    submit(node_a, devices_per_host=4, name="running")
    *_, last = [submit(node_a, name=f"job {number}") for number in range(5)]

    assert waiting_sentence(last) == (
        "It needs 1 device on one host; 4 jobs are ahead in the queue, and a start is forecast "
        "only for the first 2. It is number 5 in the queue."
    )


def test_behind_jobs_of_several_teams_no_place_is_told(mixed, node_a, monkeypatch):
    monkeypatch.setattr(waiting, "FORESEEN_TURNS", 2)
    last = lines_of(node_a.pool)[-1].job
    told = waiting_sentence(last)
    assert "more than 2 jobs are ahead in the queue" in told
    assert "number" not in told


def test_what_nobody_before_it_changes_is_told_however_far_behind(submit, node_a, monkeypatch):
    submit(node_a, devices_per_host=4, name="running")
    for number in range(4):
        submit(node_a, name=f"job {number}")
    large = submit(node_a, name="large", devices_per_host=9)
    near = waiting_sentence(large)
    monkeypatch.setattr(waiting, "FORESEEN_TURNS", 2)
    assert "the pool default has too few of them" in near
    assert waiting_sentence(large) == near


def test_a_seal_is_of_the_turns_that_a_page_showed():
    seen = order_digest(["a", "b"])
    assert is_sealed(["a", "b", "new"], seen)
    assert not is_sealed(["b", "a", "new"], seen)
    assert not is_sealed(["a"], seen)
    for odd in ("", "0123456789abcdef", "2", "999999999999_x", "\u0662_x"):
        assert not is_sealed(["a", "b"], odd)
