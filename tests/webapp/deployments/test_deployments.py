"""Deployments: woken, put to sleep, rolled to another version, and what stands in their way."""

from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection
from django.db.models import F
from django.test.utils import CaptureQueriesContext

from runners.plans.launch import Launch
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, claim, client_of
from tests.webapp.plans.conftest import demo_plan, serve_plan, trained, with_model  # noqa: F401
from webapp.accounts.models import Membership
from webapp.agents.dispatch import allocate_all
from webapp.agents.ingest import events_accept
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.deployments import services
from webapp.deployments.models import Deployment, Replica
from webapp.deployments.services import (
    advance_all,
    deployment_change,
    deployment_create,
    deployment_delete,
    deployment_sleep,
    deployment_wake,
)
from webapp.deployments.states import LEAVE_SECONDS, STAY_SECONDS, view_of
from webapp.gateway.routes import load_snapshot
from webapp.hosts.models import Device, Host
from webapp.jobs.models import Allocation, Attempt, Job, JobState
from webapp.jobs.pool_state import USABLE_RATIO
from webapp.jobs.quotas import MARGIN
from webapp.jobs.services import job_stop
from webapp.plans.models import Plan
from webapp.plans.saving import draft_begun_from

pytestmark = pytest.mark.django_db(databases="__all__")
ENDPOINT = {"host": "127.0.0.1", "port": 4711, "model": "small", "has_keys": True}


@pytest.fixture
def plan(serve_plan, trained):  # noqa: F811
    plan = with_model(serve_plan, trained, "serve")
    plan.draft["workload"] |= {"concurrency": 4, "input_tokens": 64, "output_tokens": 32}
    plan.save()
    return plan


@pytest.fixture
def small(team, alice, plan) -> Deployment:
    return make(team, alice, plan)


def make(team, alice, plan, **fields) -> Deployment:
    fields = {"name": "small", "launch": Launch(), "idle_seconds": 60.0} | fields
    return deployment_create(team=team, by=alice, plan=plan, **fields)


def begin(replica: Replica) -> Attempt:
    """Let the replica's job start on its host."""
    allocate_all()
    replica.job.refresh_from_db()
    attempt = Attempt.objects.get(pk=replica.job.current_attempt_id)
    claim(attempt)
    attempt.refresh_from_db()
    events_accept(host=attempt.host, batch=batch_of(attempt, ("started", STARTED)))
    return attempt


def answer(replica: Replica, **said) -> None:
    """Let the replica's job start on its host and its endpoint answer there."""
    attempt = begin(replica)
    batch = batch_of(attempt, ("endpoint", ENDPOINT | said), first=2)
    events_accept(host=attempt.host, batch=batch)
    advance_all()


def end(replica: Replica, reason: str = "ok") -> None:
    """Let the replica's job end."""
    attempt = Attempt.objects.get(pk=Job.objects.get(pk=replica.job_id).current_attempt_id)
    record = EXIT_OK | {"reason": reason, "exit_code": 0 if reason == "ok" else 1}
    batch = batch_of(attempt, ("exited", record), first=attempt.acked_seq + 1)
    events_accept(host=attempt.host, batch=batch)
    advance_all()


def state(deployment: Deployment) -> str:
    deployment.refresh_from_db()
    return view_of(deployment).state


def test_a_wake_starts_one_job_under_the_lasting_name_and_its_end_is_sleep(small):
    assert state(small) == "asleep"
    replica = deployment_wake(small)
    assert deployment_wake(small) == replica
    job = Job.objects.get()
    assert (job.spec["served_name"], job.spec["idle_stop_seconds"]) == ("small", 60.0)
    assert (len(job.spec["key_hashes"]), state(small)) == (2, "loading")
    answer(replica)
    assert state(small) == "ready"
    view = view_of(small)
    assert view.serving == (replica,)
    assert view.load_seconds is not None
    end(replica)  # idle
    assert (state(small), small.problem) == ("asleep", "")
    assert deployment_wake(small) != replica


def test_a_failed_start_is_told_and_waits_longer_each_time_but_for_a_person(small, alice):
    rests = []
    for _ in range(3):
        replica = deployment_wake(small)
        begin(replica)
        end(replica, reason="engine_start_failed")
        assert state(small) == "failing"
        assert "engine" in small.problem
        assert deployment_wake(small) is None
        rests.append((view_of(small).next_try_at - small.failed_at).total_seconds())
        Deployment.objects.update(failed_at=now() - timedelta(seconds=rests[-1] + 1))
    assert rests == [5.0, 10.0, 20.0]
    Deployment.objects.update(failed_at=now())
    replica = deployment_wake(small, by=alice)
    answer(replica)
    assert (state(small), small.problem, small.failures) == ("ready", "", 0)


def test_another_version_takes_over_once_it_is_ready_and_the_old_one_ends(small, alice, plan):
    old = deployment_wake(small)
    answer(old)
    draft = draft_begun_from(small.plan, alice)
    draft.draft["workload"]["concurrency"] = 2
    draft.save()
    deployment_change(deployment=small, by=alice, plan=draft)
    new = Replica.objects.exclude(pk=old.pk).get()
    assert (new.plan.version, new.job.state) == (2, JobState.PREFLIGHT)  # beside the old one
    advance_all()
    assert view_of(small).serving == (old,)  # until the new one answers
    Replica.objects.filter(pk=new.pk).update(ready_at=now())
    advance_all()
    old.refresh_from_db()
    assert old.is_leaving
    assert Job.objects.get(pk=old.job_id).state == JobState.RUNNING  # gateways hear of it first
    left = now() - services.LEAVING
    Replica.objects.filter(pk=old.pk).update(left_at=left, last_used_at=now())
    advance_all()
    assert Job.objects.get(pk=old.job_id).state == JobState.RUNNING  # it has open requests
    Replica.objects.filter(pk=old.pk).update(last_used_at=now() - timedelta(seconds=3))
    advance_all()
    assert Job.objects.get(pk=old.job_id).state == JobState.STOPPING


def test_without_room_for_both_the_old_version_leaves_before(team, alice, plan):
    small = make(team, alice, plan, launch=Launch(shared=False))
    old = deployment_wake(small)
    answer(old)
    deployment_change(deployment=small, by=alice, idle_seconds=120.0)
    assert Replica.objects.get() == old  # counts from the next start on
    later = Launch(shared=False, priority="low")
    deployment_change(deployment=small, by=alice, launch=later)
    new = Replica.objects.exclude(pk=old.pk).get()
    assert new.job.state == JobState.QUEUED  # the host has one device
    Replica.objects.update(created_at=F("created_at") - services.ROOM)
    advance_all()
    old.refresh_from_db()
    assert old.is_leaving


def test_kept_awake_it_is_started_again_and_paused_nothing_wakes_it(team, alice, plan):
    kept = make(team, alice, plan, is_kept_awake=True)
    advance_all()
    first = Replica.objects.get()
    assert first.job.spec["idle_stop_seconds"] is None
    answer(first)
    job_stop(job=first.job, by="alice")
    end(first)
    advance_all()
    second = Replica.objects.exclude(pk=first.pk).get()
    answer(second)
    with pytest.raises(ConflictProblem, match="kept awake"):
        deployment_sleep(deployment=kept, by=alice)
    deployment_change(deployment=kept, by=alice, is_paused=True)
    Replica.objects.filter(pk=second.pk).update(left_at=now() - services.LEAVING)
    advance_all()
    end(second)
    assert (state(kept), deployment_wake(kept)) == ("paused", None)
    assert deployment_wake(kept, by=alice) is not None
    assert state(kept) == "loading"


def test_what_is_deleted_or_asleep_stops_its_jobs_and_frees_its_name(team, alice, plan, small):
    with pytest.raises(ConflictProblem, match="answers to small already"):
        make(team, alice, plan)
    replica = deployment_wake(small)
    deployment_sleep(deployment=small, by=alice)
    advance_all()
    assert (Job.objects.get().state, state(small)) == (JobState.STOPPED, "asleep")
    with pytest.raises(ConflictProblem, match="asleep already"):
        deployment_sleep(deployment=small, by=alice)
    replica = deployment_wake(small)
    deployment_delete(deployment=small, by=alice)
    assert Job.objects.get(pk=replica.job_id).state == JobState.STOPPED
    advance_all()
    assert make(team, alice, plan).pk != small.pk
    kinds = Event.objects.filter(subject=small.pk).order_by("pk").values_list("kind", flat=True)
    assert list(kinds) == ["deployment.created", "deployment.slept", "deployment.deleted"]


def test_what_cannot_be_deployed_is_refused_by_its_field(team, alice, plan, demo_plan):  # noqa: F811
    cases = {
        "name": {"name": "a b"},
        "idle_seconds": {"idle_seconds": 1.0},
        "plan": {"plan": demo_plan},
    }
    for code, fields in cases.items():
        with pytest.raises(InvalidProblem) as raised:
            make(team, alice, **({"plan": plan} | fields))
        assert raised.value.code == code
    assert not Deployment.objects.exists()


def test_a_deployment_answers_to_further_names_that_no_other_one_has(small, team, alice, plan):
    given = {"aliases": ["gpt-4o", " openai/gpt-4o", "small", "gpt-4o"]}
    deployment_change(deployment=small, by=alice, **given)
    small.refresh_from_db()
    assert small.aliases == ["gpt-4o", "openai/gpt-4o"]
    assert load_snapshot({}).routes[team.pk, "openai/gpt-4o"].id == small.pk
    for fields in ({"name": "gpt-4o"}, {"name": "other", "aliases": ["small"]}):
        with pytest.raises(ConflictProblem, match="answers to"):
            make(team, alice, plan, **fields)
    for wrong in (["a b"], [f"a{number}" for number in range(21)]):
        with pytest.raises(InvalidProblem):
            deployment_change(deployment=small, by=alice, aliases=wrong)


def test_a_plan_of_another_team_is_refused(small, alice, other_team):
    foreign = Plan.objects.create(team=other_team, draft=small.plan.draft, state="computed")
    with pytest.raises(InvalidProblem, match="not of Alice's team"):
        deployment_change(deployment=small, by=alice, plan=foreign)


def test_what_is_deleted_or_paused_while_it_starts_is_stopped(small, alice, monkeypatch):
    started = services.plan_launch

    def and_then(**change):
        def launch(**fields):
            job = started(**fields)
            Deployment.objects.update(**change)
            return job

        return launch

    for change in ({"is_paused": True}, {"deleted_at": now()}):
        monkeypatch.setattr(services, "plan_launch", and_then(**change))
        assert deployment_wake(small) is None
        assert Job.objects.latest("created_at").state == JobState.STOPPED
        Deployment.objects.update(is_paused=False)


def test_a_retried_job_is_loading_again(small):
    replica = deployment_wake(small)
    answer(replica)
    Attempt.objects.update(created_at=now() + timedelta(seconds=1))  # as a later attempt is
    assert state(small) == "loading"


def test_two_wakes_at_once_start_one_job(small, monkeypatch):
    started = services.plan_launch

    def launch(**fields):
        monkeypatch.setattr(services, "plan_launch", started)
        deployment_wake(small)  # another gateway's, while this one plans
        return started(**fields)

    monkeypatch.setattr(services, "plan_launch", launch)
    deployment_wake(small)
    assert (Job.objects.count(), Replica.objects.count()) == (1, 1)


def test_without_its_owner_in_the_team_a_deployment_says_so(small, alice):
    Membership.objects.filter(user=alice).update(role="viewer")
    assert deployment_wake(small) is None
    assert "no longer a practitioner" in Deployment.objects.get().problem
    assert not Job.objects.exists()


def test_the_pages_deploy_a_plan_show_it_and_make_a_key_that_is_shown_once(plan, alice):
    client = client_of(alice)
    posted = {"run": "deployment", "deploy_name": "a b", "deploy_idle": "15", "key": "k1"}
    refused = client.post(f"/plans/{plan.pk}/launch/", posted)
    assert (refused.status_code, "begin with a letter" in refused.content.decode()) == (422, True)
    posted["deploy_name"] = "tiny"
    page = client.post(f"/plans/{plan.pk}/launch/", posted, follow=True).content.decode()
    row = Deployment.objects.get()
    assert (row.name, row.idle_seconds, row.plan.state) == ("tiny", 900.0, "computed")
    assert "http://testserver/v1" in page
    assert "tiny" in client.get("/deployments/").content.decode()
    client.post(f"/deployments/{row.pk}/wake/")
    assert state(row) == "loading"
    changed = {"plan": row.plan_id, "idle_minutes": "", "is_kept_awake": "on"}
    refused = client.post(f"/deployments/{row.pk}/change/", changed | {"warm_hours": "ever"})
    page = refused.content.decode()
    assert 'id="id_warm_hours_error">The hours to keep it awake cannot be read' in page
    assert "data-live-topics" not in page  # it has no address to be loaded again from
    refused = client.post("/deployments/keys/make/", {"name": "a", "hold_seconds": "1e5"})
    assert "It must be at least 0 and at most 1,800." in refused.content.decode()
    client.post(f"/deployments/{row.pk}/change/", changed)
    row.refresh_from_db()
    assert (row.idle_seconds, row.is_kept_awake) == (None, True)
    made = client.post("/deployments/keys/make/", {"name": "laptop", "hold_seconds": "60"})
    shown = client.get(made["Location"]).content.decode()
    key = shown.partition('id="new-key">')[2].partition("<")[0]
    assert key.startswith("sk-slipway-")
    assert key not in client.get("/deployments/keys/").content.decode()


# Turns on a device


@dataclass
class Turn:
    """A device that one deployment holds and another one waits for, by seconds ago."""

    used: float | None = 10.0
    ready: float = 60.0
    loaded_in: float = 5.0
    waited: float = 1.0
    held: dict[str, Any] = field(default_factory=dict)
    waits: dict[str, Any] = field(default_factory=dict)
    queued: dict[str, Any] = field(default_factory=dict)

    def apply(self, holder: Replica, waiter: Replica) -> None:
        def ago(seconds: float):
            return now() - timedelta(seconds=seconds)

        Replica.objects.update(left_at=None, gives_way_to=None)
        Replica.objects.filter(pk=holder.pk).update(ready_at=ago(self.ready))
        Replica.objects.filter(pk=waiter.pk).update(created_at=ago(self.waited), **self.queued)
        Attempt.objects.filter(job=holder.job).update(created_at=ago(self.ready + self.loaded_in))
        used = None if self.used is None else ago(self.used)
        Deployment.objects.filter(pk=holder.deployment_id).update(
            **{"last_used_at": used, "is_kept_awake": False, **self.held}
        )
        Deployment.objects.filter(pk=waiter.deployment_id).update(
            **{"asked_at": now(), "is_kept_awake": False, **self.waits}
        )


TURNS = {
    "idle": (Turn(), True),
    "used a second ago": (Turn(used=1.0), False),
    "just ready, and its requests are coming": (Turn(used=None, ready=3.0), False),
    "just ready after an earlier use": (Turn(used=10.0, ready=3.0), False),
    "ready for a turn, and nobody came": (Turn(used=None, ready=25.0), True),
    "busy for a turn, with a wait of one": (Turn(used=0.0, waited=25.0), True),
    "busy for less than a turn": (Turn(used=0.0, ready=15.0, waited=25.0), False),
    "busy for less than its load took": (Turn(used=0.0, loaded_in=90.0, waited=25.0), False),
    "kept awake": (Turn(held={"is_kept_awake": True}), False),
    "nobody asked": (Turn(waits={"asked_at": None}), False),
    "asked for by being kept awake": (
        Turn(waits={"asked_at": None, "is_kept_awake": True}), True,
    ),
    "what waits leaves itself": (Turn(queued={"left_at": now()}), False),
}  # fmt: skip


ALONE = Launch(shared=False)


def test_who_holds_a_device_leaves_when_it_is_idle_or_has_had_its_turn(team, alice, plan):
    holder = deployment_wake(make(team, alice, plan, launch=ALONE))
    answer(holder)
    waiter = deployment_wake(make(team, alice, plan, name="other", launch=ALONE))
    assert waiter.job.state == JobState.QUEUED
    for name, (turn, leaves) in TURNS.items():
        turn.apply(holder, waiter)
        advance_all()
        holder.refresh_from_db()
        assert (holder.is_leaving, holder.gives_way_to == waiter) == (leaves, leaves), name
        if leaves:
            busy = Deployment.objects.get(pk=holder.deployment_id).busy_seconds
            assert busy == (20.0 if "busy" in name else None), name


def test_of_those_that_share_a_device_as_many_leave_as_make_room(team, alice, plan, host):
    rows = [make(team, alice, plan, name=f"d{number}") for number in range(4)]
    holders = [deployment_wake(row) for row in rows[:3]]
    for number, holder in enumerate(holders):
        answer(holder)
        Turn(used=10.0 + number).apply(holder, holder)
    Deployment.objects.update(asked_at=None)
    total = int(USABLE_RATIO * Device.objects.get(host=host).memory_bytes)
    Allocation.objects.update(shared_bytes=total // 3)
    waiter = deployment_wake(rows[3])
    assert waiter.job.state == JobState.QUEUED
    Job.objects.filter(pk=waiter.job_id).update(shared_bytes=total // 2)
    for _ in range(4):
        advance_all()
    leaving = Replica.objects.filter(left_at__isnull=False)
    assert {each.deployment.name for each in leaving} == {"d1", "d2"}  # the least recently used


def slots(host: Host, number: int) -> None:
    """Let a host take so many jobs at once."""
    Device.objects.filter(host=host).update(kind="slot")
    for index in range(1, number):
        Device.objects.create(
            host=host, index=index, kind="slot", uuid=f"s{index}", name="slot", memory_bytes=0
        )


def test_of_several_the_least_recently_used_leaves_and_one_for_each_that_waits(
    team, alice, charlie, plan, host, other_host
):
    slots(host, 3)
    rows = [make(team, alice, plan, name=f"d{number}") for number in range(5)]
    holders = [deployment_wake(row) for row in rows[:3]]
    for number, holder in enumerate(holders):
        answer(holder)
        Turn(used=10.0 + (number - 1) ** 2).apply(holder, holder)
    Deployment.objects.update(asked_at=None)
    waiter = deployment_wake(rows[3])
    Job.objects.filter(pk=waiter.job_id).update(requested_host=other_host)
    advance_all()
    assert not Replica.objects.filter(left_at__isnull=False).exists()  # it could not run there
    Job.objects.filter(pk=waiter.job_id).update(requested_host=host)
    for _ in range(3):
        advance_all()
    assert [each.deployment.name for each in Replica.objects.filter(left_at__isnull=False)] == [
        "d0"
    ]
    assert (
        "gives way to d3" in client_of(alice).get(f"/deployments/{rows[0].pk}/").content.decode()
    )
    deployment_wake(rows[4])
    for _ in range(3):
        advance_all()
    leaving = Replica.objects.filter(left_at__isnull=False).order_by("pk")
    assert [each.deployment.name for each in leaving] == ["d0", "d2"]
    told = Event.objects.filter(kind="deployment.gave_way").values_list("subject", "detail")
    assert list(told) == [(rows[0].pk, {"to": "d3"}), (rows[2].pk, {"to": "d4"})]


def test_what_gave_way_is_queued_behind_what_it_gave_way_to_unless_put_to_sleep(team, alice, plan):
    small = make(team, alice, plan, launch=ALONE)
    holder = deployment_wake(small)
    answer(holder)
    waiter = deployment_wake(make(team, alice, plan, name="other", launch=ALONE))
    Turn().apply(holder, waiter)
    advance_all()
    for _ in range(2):
        assert deployment_wake(small, by=alice) is None
        assert state(small) == "loading"
        Replica.objects.filter(pk=holder.pk).update(left_at=now() - services.LEAVING)
        advance_all()  # it is stopped
    deployment_sleep(deployment=small, by=alice)
    advance_all()
    assert state(small) == "asleep"
    assert deployment_wake(small) is None
    end(holder)
    answer(waiter)
    advance_all()
    again = Replica.objects.filter(deployment=small).first()
    assert again is not None
    assert (again == holder, again.job.state) == (False, JobState.QUEUED)
    assert (
        "gave way to other" in client_of(alice).get(f"/deployments/{small.pk}/").content.decode()
    )


def test_the_forecast_is_what_is_before_it_in_the_queue_and_its_own_load(
    team, alice, plan, time_machine
):
    time_machine.move_to(now(), tick=False)
    names = ("small", "second", "third")
    small, *_ = rows = [make(team, alice, plan, name=name, launch=ALONE) for name in names]
    first, *_ = [(deployment_wake(row), time_machine.shift(0.01))[0] for row in rows]
    assert view_of(small).seconds_to_go is None  # never loaded
    begin(first)

    def forecasts() -> list[float | None]:
        Deployment.objects.update(loads=[9.0, 60.0, 10.0])
        return [view_of(Deployment.objects.get(pk=row.pk)).seconds_to_go for row in rows]

    turn = STAY_SECONDS + LEAVE_SECONDS
    near = partial(pytest.approx, abs=2.0)
    assert forecasts() == [near(10), near(10 + turn + 10), near(10 + 2 * (turn + 10))]
    Attempt.objects.update(created_at=now() - timedelta(seconds=7))
    assert forecasts() == [near(3), near(3 + turn + 10), near(3 + 2 * (turn + 10))]
    events_accept(
        host=first.job.host or Host.objects.get(),
        batch=batch_of(Attempt.objects.get(), ("endpoint", ENDPOINT), first=2),
    )
    advance_all()
    small.refresh_from_db()
    assert small.loads[-1] == near(7)  # from its devices on
    assert forecasts() == [None, near(turn + 10), near(turn + 10 + turn + 10)]
    long_ago = now() - timedelta(seconds=STAY_SECONDS + 1)
    Replica.objects.filter(pk=first.pk).update(ready_at=long_ago)
    assert forecasts()[1] == near(LEAVE_SECONDS + 10)
    Deployment.objects.filter(pk=small.pk).update(last_used_at=now())
    assert forecasts()[1] == near(
        20 + LEAVE_SECONDS + 10
    )  # it has requests: when its turn is over
    Deployment.objects.update(busy_seconds=30.0)
    assert forecasts()[2] == near(20 + LEAVE_SECONDS + 10 + 30 + LEAVE_SECONDS + 10)
    Deployment.objects.update(busy_seconds=None)
    Replica.objects.filter(pk=first.pk).update(left_at=now())
    Deployment.objects.filter(pk=small.pk).update(asked_at=now())
    again = LEAVE_SECONDS + 2 * (turn + 10) + 10  # behind both
    assert forecasts() == [near(again), near(LEAVE_SECONDS + 10), near(again - 10 - turn)]


def test_a_clock_that_is_set_puts_nothing_to_sleep_before_its_use_is_reported_again(
    team, alice, plan, host, time_machine
):
    slots(host, 2)
    used, unused = [make(team, alice, plan, name=name) for name in ("used", "unused")]
    for each in (used, unused):
        answer(deployment_wake(each))
    instants = iter([0.0, 1.0, 2.0, 2.0 + services.LEAP_REST_SECONDS])
    duty = services.Advance(clock=lambda: next(instants))
    time_machine.move_to(now(), tick=False)
    for seconds in (0, 3601):  # more than the idle time
        time_machine.shift(seconds)
        duty.step()
    Deployment.objects.filter(pk=used.pk).update(last_used_at=now())  # by a gateway
    for seconds in (1, services.LEAP_REST_SECONDS):
        assert [state(each) for each in (used, unused)] == ["ready", "ready"]
        time_machine.shift(seconds)
        duty.step()
    assert [len(services.live_replicas(each)) for each in (used, unused)] == [1, 0]


def test_behind_other_jobs_the_forecast_is_theirs_and_unknown_where_they_have_none(
    team, alice, plan, host, time_machine
):
    time_machine.move_to(now(), tick=False)
    other = deployment_wake(make(team, alice, plan, name="other", launch=ALONE))
    begin(other)
    job = other.job
    Deployment.objects.all().delete()  # from here on it is a job like any other
    small = make(team, alice, plan, launch=ALONE)
    deployment_wake(small)
    Deployment.objects.update(loads=[10.0])
    for left in (None, 300.0, 240.0):
        Job.objects.filter(pk=job.pk).update(eta_seconds=left, progress_at=now())
        advance_all()
        found = view_of(Deployment.objects.get(pk=small.pk)).seconds_to_go
        assert found == (left and pytest.approx(MARGIN * left + 10, abs=2))
    time_machine.shift(100)
    found = view_of(Deployment.objects.get(pk=small.pk)).seconds_to_go
    assert found == pytest.approx(MARGIN * 240 + 10 - 100, abs=2)


def test_what_serves_or_waits_in_the_queue_costs_the_duty_no_queries_each(team, alice, plan, host):
    slots(host, 4)
    rows = [make(team, alice, plan, name=f"d{number}") for number in range(7)]

    def queries_of_waking(first: int, end: int, *, is_given: bool) -> tuple[int, int]:
        """Wake some; return the queries of a round of the duty and of a gateway's look."""
        woken = [deployment_wake(row).pk for row in rows[first:end]]
        if is_given:
            allocate_all()
            Job.objects.filter(replica__in=woken).update(state=JobState.RUNNING)
            Replica.objects.filter(pk__in=woken).update(ready_at=now() + timedelta(minutes=1))
            Deployment.objects.update(asked_at=None, last_used_at=now() + timedelta(minutes=1))
        found = []
        for step in (advance_all, lambda: load_snapshot({})):
            step()
            with CaptureQueriesContext(connection) as queries:
                step()
            found.append(len(queries))
        return found[0], found[1]

    one, four = queries_of_waking(0, 1, is_given=True), queries_of_waking(1, 4, is_given=True)
    assert one == four
    assert len(load_snapshot({}).routes[team.pk, "d3"].targets) == 1
    first, more = queries_of_waking(4, 5, is_given=False), queries_of_waking(5, 7, is_given=False)
    assert first == more
    assert [view_of(row).state for row in rows] == ["ready"] * 4 + ["loading"] * 3
