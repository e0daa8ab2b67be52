"""The page of the history and its export."""

import csv
import io

import pytest

from tests.webapp.conftest import client_of
from webapp.accounts.models import Role
from webapp.accounts.services import member_add
from webapp.audit.chain import events_seal
from webapp.audit.views import cell
from webapp.core.clock import now
from webapp.jobs.models import Event

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def admin(alice, team):
    member_add(team=team, user=alice, role=Role.ADMIN)
    return client_of(alice)


def happen(team, **changes) -> Event:
    fields = {"kind": "job.state", "subject": "one", "actor": "alice"}
    return Event.objects.create(at=now(), team_id=team.pk, **{**fields, **changes})


def shown(client, query: str = "") -> list[str]:
    return [event.subject for event in client.get(f"/audit/?{query}").context["page"]]


def test_the_newest_comes_first(admin, team):
    happen(team)
    happen(team, subject="two")

    assert shown(admin) == ["two", "one"]


def test_another_teams_history_and_the_administrations_are_not_shown(admin, team, other_team):
    happen(other_team)
    Event.objects.create(at=now(), team_id="", kind="admin.write", actor="root")

    assert shown(admin) == []


@pytest.mark.parametrize(
    "query", ["kind=host.state", "actor=olga", "subject=two", "kind=host.state&from=2000-01-01"]
)
def test_a_filter_keeps_what_matches(admin, team, query):
    happen(team)
    happen(team, kind="host.state", actor="olga", subject="two")

    assert shown(admin, query) == ["two"]


@pytest.mark.parametrize("query", ["from=2999-01-01", "to=2000-01-01"])
def test_a_date_keeps_its_days(admin, team, query):
    happen(team)

    assert shown(admin, query) == []


@pytest.mark.parametrize("query", ["from=never", "to=2026-13-45", "page=x", "page=-1"])
def test_a_query_that_makes_no_sense_is_left_out(admin, team, query):
    happen(team)

    assert shown(admin, query) == ["one"]


def test_a_row_says_whether_it_is_sealed(admin, team):
    happen(team)
    before = admin.get("/audit/").content.decode()
    events_seal()

    assert "in a moment" in before
    assert "in a moment" not in admin.get("/audit/").content.decode()


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "  =1"])
def test_no_cell_of_the_export_begins_a_formula(admin, team, name):
    happen(team, actor=name)

    text = admin.get("/audit/export/").content.decode()
    [row] = list(csv.DictReader(io.StringIO(text, newline="")))
    assert row["actor"] == f"'{name}"


def test_an_ordinary_cell_stays_as_it_is():
    assert cell("alice - the first") == "alice - the first"


def test_markup_in_an_actors_name_is_shown_as_text(admin, team):
    happen(team, actor="<script>alert(1)</script>")

    assert "<script>alert(1)" not in admin.get("/audit/").content.decode()
