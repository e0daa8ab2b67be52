"""Several replicas of a deployment, and the hours in which it is kept awake."""

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from runners.plans.launch import Launch
from tests.webapp.conftest import client_of
from tests.webapp.deployments.test_deployments import answer, end, make, plan  # noqa: F401
from tests.webapp.plans.conftest import demo_plan, serve_plan, trained  # noqa: F401
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.deployments import services
from webapp.deployments.models import Deployment, GatewayLoad, Replica
from webapp.deployments.services import (
    advance_all,
    deployment_change,
    deployment_sleep,
    deployment_wake,
)
from webapp.deployments.warm_hours import WarmHours, warm_hours
from webapp.gateway.application import Gateway, _request_of
from webapp.gateway.routes import Routes, Target, load_snapshot
from webapp.jobs.models import Job, JobState

pytestmark = pytest.mark.django_db(databases="__all__")
MONDAY = datetime(2026, 11, 30, tzinfo=UTC)


def live(row: Deployment) -> list[Replica]:
    rows = Replica.objects.filter(deployment=row, ended_at=None, left_at=None)
    return list(rows.select_related("job"))


def advance(seconds: float, time_machine) -> None:
    for _ in range(2):
        advance_all()
        time_machine.shift(seconds / 2)
    advance_all()


def report(row: Deployment, *requests: int) -> None:
    """Let gateways say how many requests they have."""
    for number, each in enumerate(requests):
        GatewayLoad.objects.update_or_create(
            gateway=f"g{number}", deployment=row, defaults={"requests": each, "at": now()}
        )


def test_replicas_are_added_by_load_and_leave_when_there_is_none(
    team, alice, plan, time_machine  # noqa: F811
):  # fmt: skip
    time_machine.move_to(now(), tick=False)
    row = make(team, alice, plan, min_replicas=2, max_replicas=3, idle_seconds=900.0)
    answer(deployment_wake(row))
    assert len(live(row)) == 2  # the least
    assert {each.job.spec.get("idle_stop_seconds") for each in live(row)} == {None}
    answer(live(row)[0])
    report(row, 5, 4)  # of 4 at once for each, filled to 80 %: three replicas
    advance_all()
    assert len(live(row)) == 2  # not yet: a moment is no load
    for _ in range(2):
        time_machine.shift(6.0)
        report(row, 5, 90)
        advance_all()
    assert len(live(row)) == 3
    answer(live(row)[0])
    time_machine.shift(10.5)  # the gateways are silent: they count no more
    advance(299.0, time_machine)
    assert len(live(row)) == 3
    used = live(row)[1:]
    Replica.objects.filter(pk__in=[each.pk for each in used]).update(last_used_at=now())
    advance(3.0, time_machine)
    assert live(row) == used  # the least recently used leaves
    Deployment.objects.update(last_used_at=now())
    advance(890.0, time_machine)
    assert len(live(row)) == 2
    advance(20.0, time_machine)
    assert live(row) == []
    assert Job.objects.filter(state=JobState.RUNNING).count() == 0


def test_another_version_replaces_several_one_by_one(team, alice, plan):  # noqa: F811
    row = make(team, alice, plan, min_replicas=2, max_replicas=2)
    answer(deployment_wake(row))
    answer(live(row)[0])
    old = live(row)
    deployment_change(deployment=row, by=alice, launch=Launch(priority="low"))
    for number in (1, 2):
        newest = live(row)[0]
        assert newest.revision == 1
        assert len([each for each in live(row) if each.revision == 0]) == 3 - number
        answer(newest)
        serving = [each for each in live(row) if each.ready_at]
        assert len(serving) == 2  # at no time fewer
    assert {each.revision for each in live(row)} == {1}
    assert not {each.pk for each in live(row)} & {each.pk for each in old}


def test_a_version_that_fails_leaves_the_old_replicas_alone(team, alice, plan):  # noqa: F811
    row = make(team, alice, plan, min_replicas=2, max_replicas=2)
    answer(deployment_wake(row))
    answer(live(row)[0])
    deployment_change(deployment=row, by=alice, launch=Launch(priority="low"))
    new = live(row)[0]
    answer_of = Replica.objects.filter(pk=new.pk)
    assert answer_of.get().revision == 1
    Job.objects.filter(pk=new.job_id).update(state=JobState.ERROR, ended_at=now())
    for _ in range(3):
        advance_all()
    row.refresh_from_db()
    assert [each.revision for each in live(row)] == [0, 0]
    assert row.problem
    Deployment.objects.update(failed_at=now() - timedelta(seconds=6))
    advance_all()
    assert [each.revision for each in live(row)] == [1, 0, 0]  # tried again, after a rest


def test_no_replica_leaves_for_one_that_cannot_be_started(
    team, alice, plan, monkeypatch  # noqa: F811
):  # fmt: skip
    row = make(team, alice, plan, min_replicas=2, max_replicas=2)
    answer(deployment_wake(row))
    answer(live(row)[0])
    deployment_change(deployment=row, by=alice, launch=Launch(priority="low"))
    monkeypatch.setattr(services, "_start", lambda *_: None)
    answer(live(row)[0])
    advance_all()
    assert len(live(row)) == 3


def test_what_was_given_away_is_not_asked_back(team, alice, plan):  # noqa: F811
    row, other = (make(team, alice, plan, name=n, min_replicas=2, max_replicas=2) for n in "ab")
    answer(deployment_wake(row))
    answer(live(row)[0])
    waiter = deployment_wake(other)
    Job.objects.filter(pk=waiter.job_id).update(state=JobState.QUEUED)
    Replica.objects.filter(pk=live(row)[1].pk).update(left_at=now(), gives_way_to=waiter)
    services.deployment_advance(row)
    assert len(live(row)) == 1
    Job.objects.filter(pk=waiter.job_id).update(state=JobState.RUNNING)
    services.deployment_advance(row)
    assert len(live(row)) == 2


def test_one_that_is_no_longer_scaled_still_sleeps(
    team, alice, plan, time_machine  # noqa: F811
):  # fmt: skip
    time_machine.move_to(now(), tick=False)
    row = make(team, alice, plan, warm_hours="mon-sun 00:00-24:00", idle_seconds=60.0)
    advance_all()
    answer(live(row)[0])
    page = client_of(alice).get(f"/deployments/{row.pk}/").content.decode()
    assert "kept awake" in page
    deployment_change(deployment=row, by=alice, warm_hours="")
    advance(65.0, time_machine)
    assert len(live(row)) == 1  # an endpoint that stops by itself has had its time
    advance(8.0, time_machine)
    assert live(row) == []


def test_it_is_awake_in_its_hours_and_may_sleep_after_them(
    team, alice, plan, host, time_machine  # noqa: F811
):  # fmt: skip
    morning = MONDAY + timedelta(hours=6, minutes=59)
    time_machine.move_to(morning, tick=False)
    type(host).objects.update(last_seen_at=now())
    hours = "Mon-Fri  08:00-18:00 Europe/Berlin"
    row = make(team, alice, plan, warm_hours=hours, idle_seconds=60.0)
    assert row.warm_hours == "Mon-Fri 08:00-18:00 Europe/Berlin"
    advance_all()
    assert live(row) == []
    time_machine.shift(61.0)
    type(host).objects.update(last_seen_at=now())
    advance_all()
    answer(live(row)[0])
    page = client_of(alice).get(f"/deployments/{row.pk}/").content.decode()
    assert "kept awake until 30 Nov, 17:00" in page
    with pytest.raises(ConflictProblem, match="in its hours, Mon-Fri"):
        deployment_sleep(deployment=row, by=alice)
    time_machine.move_to(MONDAY + timedelta(hours=17), tick=False)
    advance_all()
    assert live(row) == []
    deployment_change(deployment=row, by=alice, warm_hours="")
    row.refresh_from_db()
    assert not row.is_scaled


@pytest.mark.parametrize(
    ("text", "hour", "is_covered"),
    [
        ("", 12, False),
        ("mon 00:00-24:00", 23.99, True),
        ("mon 00:00-24:00", 24, False),
        ("mon-fri 08:00-18:00", 18, False),
        ("mon-fri 8:00-18:00", 17.98, True),
        ("sat-mon 22:00-06:00", 29, True),  # Tuesday's early morning
        ("sat-mon 22:00-06:00", 30, False),
        ("sun 22:00-06:00", 5, True),  # of Sunday
        ("fri 8:00-9:00, mon 1:00-2:00 America/New_York", 6.5, True),
        ("MON 01:00-02:00 America/New_York", 1.5, False),
    ],
)
def test_hours_cover(text, hour, is_covered):
    assert warm_hours(text).cover(MONDAY + timedelta(hours=hour)) is is_covered


def test_hours_go_with_the_clocks_of_their_zone():
    hours = warm_hours("sun 02:30-03:30 Europe/Berlin")
    assert hours.end_after(datetime(2026, 10, 25, 0, 45, tzinfo=UTC)) == datetime(
        2026, 10, 25, 1, 0, tzinfo=UTC
    )  # 03:00 CEST is 02:00 CET
    assert hours.cover(datetime(2026, 10, 25, 2, 15, tzinfo=UTC))
    assert warm_hours("mon-sun 00:00-24:00").end_after(MONDAY) is None
    assert isinstance(hours, WarmHours)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"warm_hours": "always"}, "'always' is no window such as “mon-fri 08:00-18:00”"),
        ({"warm_hours": "mon 8-18"}, "is no window"),
        ({"warm_hours": "moo 08:00-18:00"}, "'moo' is no day; they are mon, tue"),
        ({"warm_hours": "mon 08:00-24:30"}, "24:30 is no time between 00:00 and 24:00"),
        ({"warm_hours": "mon 08:60-18:00"}, "08:60 is no time"),
        ({"warm_hours": "mon 08:00-18:00 Mars/Base"}, "'Mars/Base' is no time zone"),
        ({"warm_hours": "mon 08:00-18:00 ../../etc/passwd"}, "is no"),
        ({"min_replicas": 0}, "at least 0 replicas; that can be 1 to 64"),
        ({"min_replicas": 3, "max_replicas": 2}, "the most can be 3 to 64"),
        ({"max_replicas": 65}, "1 to 64"),
    ],
)
def test_what_cannot_be_kept_is_said(team, alice, plan, fields, words):  # noqa: F811
    with pytest.raises(InvalidProblem, match=words):
        make(team, alice, plan, **fields)


def test_a_gateway_reports_its_requests_of_deployments_that_are_scaled(
    team, alice, plan  # noqa: F811
):  # fmt: skip
    rows = [
        make(team, alice, plan, name="one"),
        make(team, alice, plan, name="two", max_replicas=2),
    ]
    found = {each.name: each for each in load_snapshot({}).routes.values()}
    routes = Routes()
    with routes.count(found["one"]), routes.count(found["two"]), routes.count(found["two"]):
        routes.report()
        assert list(GatewayLoad.objects.values_list("deployment", "requests")) == [(rows[1].pk, 2)]
    routes.report()
    routes.report()
    assert not GatewayLoad.objects.exists()


def test_a_conversation_stays_at_its_replica_unless_that_is_busy(tmp_path):
    gateway = Gateway(tmp_path)
    targets = [Target(f"replica {number}", "h", "a", "k") for number in range(4)]

    def beginning(number: int, *more: str) -> bytes:
        messages = [{"role": "system", "content": "You help."}]
        messages += [{"role": "user", "content": f"question {number}"}]
        messages += [{"role": "assistant", "content": text} for text in more]
        body = str({"model": "m", "messages": messages}).replace("'", '"').encode()
        return _request_of(body).conversation

    chosen = [gateway._chosen(targets, beginning(number)) for number in range(400)]
    again = [gateway._chosen(targets[::-1], beginning(number, "x")) for number in range(400)]
    assert chosen == again
    assert all(60 < number < 140 for number in Counter(chosen).values())
    left = [gateway._chosen(targets[:3], beginning(number)) for number in range(400)]
    moved = [was for was, new in zip(chosen, left, strict=True) if was != new]
    assert set(moved) == {targets[3]}  # the others stay
    gateway._running[chosen[0].replica_id] = 3
    assert gateway._chosen(targets, beginning(0)) != chosen[0]
    for each in targets:
        gateway._running[each.replica_id] = 2
    assert gateway._chosen(targets, beginning(0)) == chosen[0]
