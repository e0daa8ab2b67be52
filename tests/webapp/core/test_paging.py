"""Pages of wide tables: the rows and the order of one plain question, from an index alone."""

import pytest
from django.db import connection

from tests.webapp.conftest import make_job
from webapp.accounts.models import Membership, Team, team_ids_of
from webapp.core.queries import NewestFirst, page_by_key
from webapp.jobs.models import Job, JobState

pytestmark = pytest.mark.django_db(databases=["default", "metrics"])
NUMBERS = [None, "", "1", "2", "3", "99", "-1", "nothing"]


@pytest.fixture
def several(team, alice, host):
    """Nine jobs of two teams in turn, of which alice is in both; three have one instant."""
    second = Team.objects.create(name="Second")
    Membership.objects.create(user=alice, team=second)
    for i in range(9):
        job = Job.objects.filter(pk=make_job(team, alice, host, name=f"job {i}").pk)
        if i % 2:
            job.update(team=second)
        if i % 3 == 0:
            first = Job.objects.order_by("created_at")[0].created_at
            job.update(created_at=first, state=JobState.FAILED)
    return Job.objects.filter(deleted_at=None)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("num_teams", [1, 2])
def test_a_page_is_that_of_one_plain_question(several, alice, num_teams, number):
    teams = team_ids_of(alice)[:num_teams]
    mine = several.filter(team__in=teams)

    page = page_by_key(NewestFirst(mine, "created_at", teams), Job.objects.all(), number, 4)

    plain = list(mine.order_by("-created_at", "-pk"))
    first = (page.number - 1) * 4
    assert page.paginator.count == len(plain)
    assert list(page) == plain[first : first + 4]


def test_filters_stay_where_the_rows_of_teams_are_merged(several, alice):
    teams = team_ids_of(alice)
    keys = NewestFirst(several.filter(state=JobState.FAILED), "created_at", teams)

    assert keys[0:9] == list(
        several.filter(state=JobState.FAILED).order_by("-pk").values_list("pk", flat=True)
    )


def test_who_is_in_no_team_sees_an_empty_page(several):
    page = page_by_key(
        NewestFirst(several.filter(team__in=[]), "created_at", []), Job.objects.all(), "7", 4
    )

    assert list(page) == []


@pytest.mark.skipif(connection.vendor != "sqlite", reason="the words of SQLite's EXPLAIN")
def test_teams_are_merged_without_sorting_their_rows(several, alice):
    told = NewestFirst(several, "created_at", team_ids_of(alice)).sorted.explain()

    assert told.count("COVERING INDEX jobs_listed") == 2, told
    assert "TEMP B-TREE FOR ORDER BY" not in told, told
