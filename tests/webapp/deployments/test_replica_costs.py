"""What deployments cost, and who is said to have used it."""

import csv
import io
from datetime import UTC, date, datetime, timedelta
from importlib import import_module

import pytest
from django.apps import apps
from hypothesis import given
from hypothesis import strategies as st

from tests.webapp.conftest import client_of, make_job
from webapp.accounts.models import Membership
from webapp.deployments import replica_costs
from webapp.deployments.keys import KeyOptions, key_make
from webapp.deployments.models import Deployment, DeploymentCost, Replica, Usage
from webapp.deployments.replica_costs import Held, costs_add, day_shares
from webapp.deployments.usage import month_span, usage_of
from webapp.hosts.models import Host
from webapp.jobs.models import Allocation, Attempt
from webapp.pages.deployments import _lines
from webapp.plans.models import Plan

BEGIN = datetime(2026, 11, 29, 12, tzinfo=UTC)
minutes = st.integers(0, 4000)
spans = st.tuples(minutes, minutes).map(
    lambda pair: Held(*(BEGIN + timedelta(minutes=each) for each in sorted(pair)))
)


@given(held=st.lists(spans, min_size=1, max_size=6))
def test_what_holds_a_device_shares_its_time_without_rest_by_day(held):
    taken: dict[date, float] = {}
    for number, each in enumerate(held):
        for day, seconds in day_shares(each, held[:number] + held[number + 1 :]).items():
            assert 0 <= seconds <= 86_400
            taken[day] = taken.get(day, 0.0) + seconds
    busy: dict[date, float] = {}
    for minute in range(4000):
        instant = BEGIN + timedelta(minutes=minute)
        if any(each.begin <= instant < each.end for each in held):
            busy[instant.date()] = busy.get(instant.date(), 0.0) + 60
    assert {day: seconds for day, seconds in taken.items() if seconds} == pytest.approx(busy)


@pytest.fixture
def small(team, alice) -> Deployment:
    plan = Plan.objects.create(team=team, owner=alice)
    return Deployment.objects.create(team=team, owner=alice, name="small", plan=plan)


@pytest.fixture
def held(team, alice, host, small) -> Allocation:
    """A device that a replica has held for two hours, from noon of a day."""
    job = make_job(team, alice, host)
    Replica.objects.create(
        deployment=small, job=job, plan=small.plan, created_at=BEGIN, ended_at=BEGIN
    )
    attempt = Attempt.objects.create(job=job, host=host, number=7, fence="f")
    return Allocation.objects.create(
        device=host.devices.get(), attempt=attempt, taken_at=BEGIN,
        released_at=BEGIN + timedelta(hours=2),
    )  # fmt: skip


def counted(monkeypatch, hours: float) -> None:
    monkeypatch.setattr(replica_costs, "now", lambda: BEGIN + timedelta(hours=hours))
    costs_add()


@pytest.mark.django_db(databases="__all__")
def test_device_time_is_counted_once_at_the_cost_that_the_host_states_then(
    held, host, monkeypatch
):
    Host.objects.update(labels={"usd_per_hour": "3"})
    Replica.objects.update(ended_at=None)
    for hours in (0.5, 0.5, 0.4, 1.0):  # also again, and with a clock that was set back
        counted(monkeypatch, hours)
    row = DeploymentCost.objects.get()
    assert (row.usd, row.device_seconds, row.unpriced_seconds) == (pytest.approx(3.0), 3600, 0)
    Host.objects.update(labels={"usd_per_hour": "1"})
    Replica.objects.update(ended_at=BEGIN + timedelta(hours=2))
    for hours in (3, 4):
        counted(monkeypatch, hours)
    row.refresh_from_db()
    assert (row.usd, row.device_seconds) == (pytest.approx(4.0), 7200)


@pytest.mark.django_db(databases="__all__")
def test_what_ran_before_costs_were_counted_stays_without_a_cost(held, host, monkeypatch):
    Host.objects.update(labels={"usd_per_hour": "3"})
    migration = import_module("webapp.deployments.migrations.0008_costs")
    monkeypatch.setattr(migration, "now", lambda: BEGIN + timedelta(hours=1.5))
    migration.count_from_now(apps, None)
    counted(monkeypatch, 3)
    assert not DeploymentCost.objects.exists()  # its replica had ended
    Replica.objects.update(ended_at=None)
    counted(monkeypatch, 3)
    assert DeploymentCost.objects.get().device_seconds == 1800


@pytest.mark.django_db(databases="__all__")
def test_a_days_cost_is_shared_by_tokens_and_unknown_where_a_host_states_none(
    held, small, team, alice, bob, olga, other_team, monkeypatch
):
    today = BEGIN.date()
    for person, name, tokens in ((alice, "laptop", 300), (bob, "desk", 100)):
        key, _ = key_make(team=team, by=person, options=KeyOptions(name=name))
        Usage.objects.create(
            key=key, deployment=small, day=today, requests=2, prompt_tokens=tokens - 60,
            completion_tokens=60,
        )  # fmt: skip
        Usage.objects.create(key=key, deployment=small, day=today - timedelta(days=30), requests=1)
    counted(monkeypatch, 3)
    client = client_of(olga)
    query = f"/api/v1/usage?month={today.isoformat()[:7]}"
    assert [each["usd"] for each in client.get(query).json()["items"]] == [None, None]
    assert "Cost" not in client.get("/deployments/usage/?month=2026-11").content.decode()
    DeploymentCost.objects.all().delete()
    Replica.objects.update(costed_until=None)
    Host.objects.update(labels={"usd_per_hour": "2"})
    counted(monkeypatch, 3)
    found = {each["owner"]: each for each in client.get(query).json()["items"]}
    assert {name: each["usd"] for name, each in found.items()} == {
        "alice": pytest.approx(3.0), "bob": pytest.approx(1.0),
    }  # fmt: skip
    assert {each["team"] for each in found.values()} == {team.pk}
    html = client.get("/deployments/usage/?month=2026-11").content.decode().replace("\xa0", " ")
    for words in (
        "By person",
        "for $4.00",
        "$1.50",
        "usd_per_hour",
    ):  # of alice's two answers each
        assert words in html, words
    assert "By team" not in html
    Membership.objects.create(user=olga, team=other_team, role="viewer")
    assert "By team" in client.get("/deployments/usage/?month=2026-11").content.decode()
    rows = usage_of(Membership.objects.get(user=olga, team=team), month_span("2026-11"))
    file = b"".join(_lines(rows))
    lines = list(csv.DictReader(io.StringIO(file.decode())))
    assert {(each["owner"], each["team"], each["usd"]) for each in lines} == {
        ("alice", team.name, "3"), ("bob", team.name, "1"),
    }  # fmt: skip
    assert client.get("/api/v1/usage?month=2026-13").status_code == 422
