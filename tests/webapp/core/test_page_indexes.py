"""Which index answers which page's question: in its order and without a wide row, on SQLite and
on PostgreSQL (``tests/system/faults/test_history_on_postgres.py`` runs this there).
"""

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from tests.webapp.conftest import client_of, make_job
from webapp.accounts.models import Membership, Team, team_ids_of
from webapp.core.clock import now
from webapp.core.queries import NewestFirst
from webapp.home.attention import attention_for
from webapp.home.views import accuracy_for
from webapp.jobs.listing import latest_at
from webapp.jobs.models import Job, JobState
from webapp.plans.models import Plan, PlanState
from webapp.plans.views import num_jobs_of
from webapp.queue.pool_state import first_waiting, num_before, num_by_team

pytestmark = pytest.mark.django_db(databases="__all__")
FILTERS = [
    {},
    {"state": "failed"},
    {"kind": "train"},
    {"owner_id": 1},
    {"host_id": "x"},
    {"name__icontains": "a"},
    {"state": "failed", "kind": "train", "owner_id": 1},
]


def explained(sql: str) -> str:
    """Return how the database answers; PostgreSQL reads no small table from end to end here."""
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute(f"EXPLAIN QUERY PLAN {sql}")
            return "; ".join(row[3] for row in cursor.fetchall())
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute("SET LOCAL enable_bitmapscan = off")
        cursor.execute(f"EXPLAIN {sql}")
        return "; ".join(row[0].strip() for row in cursor.fetchall())


def is_only(told: str, index: str) -> bool:
    """Return whether an index alone answers, in its order.

    To PostgreSQL one index of a few rows is as good as another: there some index has to answer.
    """
    if connection.vendor == "sqlite":
        return f"COVERING INDEX {index}" in told and "TEMP B-TREE" not in told
    return "Index" in told and "Seq Scan" not in told


def num_uses(told: str, index: str) -> int:
    """Return how often an index is used; of PostgreSQL how often any is."""
    if connection.vendor == "sqlite":
        return told.count(index)
    return 0 if "Seq Scan" in told else told.count("Index")


def asked_by(act) -> list[str]:
    with CaptureQueriesContext(connection) as captured:
        act()
    return [each["sql"] for each in captured.captured_queries]


def of_table(questions: list[str], table: str) -> list[str]:
    return [each for each in questions if f'FROM "{table}"' in each]


@pytest.fixture
def two_teams(team, alice) -> list[str]:
    Membership.objects.create(user=alice, team=Team.objects.create(name="Second"))
    return team_ids_of(alice)


@pytest.fixture
def waiting(team, alice, host) -> list[Job]:
    """Three jobs in a queue, the last one moved to the front by hand."""
    jobs = [make_job(team, alice, host, name=f"job {i}") for i in range(3)]
    for number, job in enumerate(jobs):
        job.state, job.queued_at = JobState.QUEUED, job.created_at
        job.queue_rank = None if number < 2 else 1
        job.save()
    return jobs


@pytest.mark.parametrize("asked", FILTERS, ids=lambda asked: " ".join(asked) or "all")
def test_every_filter_of_the_list_of_jobs(team, asked):
    keys = NewestFirst(
        Job.objects.filter(deleted_at=None, team__in=[team.pk], **asked), "created_at", [team.pk]
    )

    for question in asked_by(lambda: (keys.count(), keys[0:4])):
        assert is_only(explained(question), "jobs_"), explained(question)


@pytest.mark.parametrize("query", ["", "?q=a", "?page=9"])
def test_the_list_of_plans(team, alice, query):
    Plan.objects.create(team=team, owner=alice, name="a", state=PlanState.COMPUTED, verdict="fits")

    questions = asked_by(lambda: client_of(alice).get(f"/plans/{query}"))

    asked = [each for each in of_table(questions, "plans_plan") if '"revision" = 0' in each]
    assert len(asked) == 2
    for question in asked:
        assert is_only(explained(question), "plans_listed"), explained(question)


def test_the_list_of_plans_reads_no_document(team, alice):
    document = {"plans": []}
    Plan.objects.create(
        team=team, owner=alice, state=PlanState.COMPUTED, answer=document, verdict="fits"
    )

    questions = asked_by(lambda: client_of(alice).get("/plans/"))

    assert not any('"plans_plan"."answer"' in each for each in questions)


def test_the_numbers_of_jobs_of_plans(team, alice, host):
    plan = Plan.objects.create(team=team, owner=alice, state=PlanState.COMPUTED)
    make_job(team, alice, host, plan=plan)

    (question,) = asked_by(lambda: num_jobs_of([plan]))

    assert num_jobs_of([plan]) == {plan.series: 1}
    told = explained(question)
    assert num_uses(told, "jobs_of_plan"), told


def test_the_latest_measurements_of_several_teams(alice, two_teams):
    questions = asked_by(lambda: accuracy_for(alice))

    (question,) = of_table(questions, "jobs_measurement")
    told = explained(question)
    assert num_uses(told, "measurements_latest") >= 2, told
    assert num_uses(told, "jobs_deleted"), told


def test_what_failed_last(alice):
    questions = asked_by(lambda: attention_for(alice))

    (question,) = [each for each in questions if "UNION ALL" in each]
    assert num_uses(explained(question), "jobs_ended") >= 2, explained(question)


def test_each_teams_first_jobs_of_a_queue(waiting, team):
    pool = waiting[0].pool

    questions = asked_by(lambda: first_waiting(pool, 1))

    counted, first, *_ = of_table(questions, "jobs_job")
    for question in (counted, first):
        assert is_only(explained(question), "jobs_waiting"), explained(question)


def test_how_many_are_before_one(waiting):
    questions = asked_by(lambda: num_before(waiting[1]))

    assert is_only(explained(questions[-1]), "jobs_waiting"), explained(questions[-1])
    assert [num_before(job) for job in waiting] == [1, 2, 0]


def test_the_index_of_a_queue_is_found_with_its_values_bound(waiting, team):
    """A condition's value is no part of the statement until it is run."""
    pool = waiting[0].pool
    rows = Job.objects.filter(pool=pool, team=team, state=JobState.QUEUED, deleted_at=None)

    assert num_by_team(pool) == {team.pk: 3}
    if connection.vendor == "sqlite":
        told = rows.order_by().values_list("team").explain()
        assert "COVERING INDEX jobs_waiting" in told, told


def test_the_newest_jobs_of_a_host(alice, host, rf):
    request = rf.get("/")
    request.user = alice

    questions = of_table(asked_by(lambda: latest_at(request, host, 3)), "jobs_job")

    for question in questions[:2]:  # its own, and those that wait for it
        assert is_only(explained(question), "jobs_"), explained(question)
    assert not any('"jobs_job"."estimate"' in each for each in questions)


def test_what_waits_too_long(alice, waiting):
    Job.objects.update(queued_at=now() - timedelta(hours=1))

    found = attention_for(alice)
    questions = of_table(asked_by(lambda: attention_for(alice)), "jobs_job")

    assert [item.title.split()[1] for item in found] == ["0", "1", "2"]
    (question,) = [each for each in questions if '"queued_at" <' in each]
    assert num_uses(explained(question), "jobs_waiting"), explained(question)
