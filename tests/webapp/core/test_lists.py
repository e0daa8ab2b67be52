"""Lists: their pages, the indexes that answer them, and their rows."""

from datetime import timedelta
from functools import partial

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from tests.webapp.conftest import client_of, make_job
from webapp.accounts.models import Membership, Team, team_ids_of
from webapp.core.clock import now
from webapp.core.queries import NewestFirst, RowChange, page_by_key, update_each
from webapp.hosts.models import Host
from webapp.jobs.accuracy import accuracy_for
from webapp.jobs.listing import latest_at
from webapp.jobs.models import Attempt, Job, JobState
from webapp.jobs.pool_state import first_waiting, num_before, num_by_team
from webapp.jobs.stored_files import kept_on_host, stored_on_host
from webapp.pages.home import attention_for
from webapp.pages.plans import num_jobs_of
from webapp.plans.models import Plan, PlanState

# Which index answers which page's question: in its order and without a wide row, on SQLite and
# on PostgreSQL (``tests/system/faults/test_history_on_postgres.py`` runs this there).


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


def test_every_filter_of_the_list_of_jobs(team):
    for asked in FILTERS:
        jobs = Job.objects.filter(deleted_at=None, team__in=[team.pk], **asked)
        keys = NewestFirst(jobs, "created_at", [team.pk])
        for question in [*asked_by(keys.count), *asked_by(partial(keys.__getitem__, slice(0, 4)))]:
            assert is_only(explained(question), "jobs_"), explained(question)


@pytest.mark.parametrize("query", ["", "?q=a", "?page=9"])
def test_the_list_of_plans(team, alice, query):
    Plan.objects.create(team=team, owner=alice, name="a", state=PlanState.COMPUTED, verdict="fits")
    questions = asked_by(lambda: client_of(alice).get(f"/plans/{query}"))
    asked = [each for each in of_table(questions, "plans_plan") if '"revision" = 0' in each]
    assert len(asked) == 2
    for question in asked:
        assert is_only(explained(question), "plans_listed"), explained(question)


def test_the_list_of_plans_reads_no_document(team, alice, host):
    document = {"plans": []}
    Plan.objects.create(
        team=team, owner=alice, state=PlanState.COMPUTED, answer=document, verdict="fits"
    )
    questions = asked_by(lambda: client_of(alice).get("/plans/"))
    assert not any('"plans_plan"."answer"' in each for each in questions)
    plan = Plan.objects.create(team=team, owner=alice, state=PlanState.COMPUTED)
    make_job(team, alice, host, plan=plan)
    (question,) = asked_by(lambda: num_jobs_of([plan]))
    assert num_jobs_of([plan]) == {plan.series: 1}
    told = explained(question)
    assert num_uses(told, "jobs_of_plan"), told


def test_the_latest_measurements_of_several_teams(alice, two_teams):
    questions = asked_by(lambda: attention_for(alice))
    (question,) = [each for each in questions if "UNION ALL" in each]
    assert num_uses(explained(question), "jobs_ended") >= 2, explained(question)
    questions = asked_by(lambda: accuracy_for(alice))
    (question,) = of_table(questions, "jobs_measurement")
    told = explained(question)
    assert num_uses(told, "measurements_latest") >= 2, told


def test_the_jobs_of_a_queue_are_counted_and_read_from_its_index(waiting, team):
    pool = waiting[0].pool
    questions = asked_by(lambda: first_waiting(pool, 1))
    counted, first, *_ = of_table(questions, "jobs_job")
    for question in (counted, first):
        assert is_only(explained(question), "jobs_waiting"), explained(question)
    questions = asked_by(lambda: num_before(waiting[1]))
    assert is_only(explained(questions[-1]), "jobs_waiting"), explained(questions[-1])
    assert [num_before(job) for job in waiting] == [1, 2, 0]
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


def test_what_a_host_keeps_is_found_by_the_host_and_summed_in_sql(team, alice, host):
    small, large, nothing = (make_job(team, alice, host, name=f"job {i}") for i in range(3))
    for job, sizes in ((small, (1, None)), (large, (2, 5)), (nothing, (0, None))):
        Attempt.objects.create(
            job=job, number=1, host=host, checkpoint_bytes=sizes[0], output_bytes=sizes[1]
        )
    found: list[object] = []
    teams = team_ids_of(alice)
    for act in (
        lambda: found.extend(each.attempt.job for each in stored_on_host(host, teams)),
        lambda: found.extend(each.attempt.job for each in stored_on_host(host, teams, at_most=1)),
        lambda: found.append(kept_on_host(host, teams)),
    ):
        (question,) = of_table(asked_by(act), "jobs_attempt")
        told = explained(question)
        assert "SCAN" not in told.upper().replace("INDEX SCAN", ""), told
        assert "(SELECT" not in question.partition("WHERE")[2], question
    assert found == [large, small, large, (2, 8)]
    assert kept_on_host(host, []) == (0, 0)


def test_what_waits_too_long(alice, waiting):
    Job.objects.update(queued_at=now() - timedelta(hours=1))
    found = attention_for(alice)
    questions = of_table(asked_by(lambda: attention_for(alice)), "jobs_job")
    assert [item.title.split()[1] for item in found] == ["0", "1", "2"]
    (question,) = [each for each in questions if '"queued_at" <' in each]
    assert num_uses(explained(question), "jobs_waiting"), explained(question)


# Pages of wide tables: the rows and the order of one plain question, from an index alone.


NUMBERS = [1, 2, 3, 99]


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


def test_a_page_is_that_of_one_plain_question(several, alice):
    for num_teams in (1, 2):
        teams = team_ids_of(alice)[:num_teams]
        mine = several.filter(team__in=teams)
        plain = list(mine.order_by("-created_at", "-pk"))
        for number in NUMBERS:
            keys = NewestFirst(mine, "created_at", teams)
            page = page_by_key(keys, Job.objects.all(), number, 4)
            first = (page.number - 1) * 4
            assert page.paginator.count == len(plain), (num_teams, number)
            assert list(page) == plain[first : first + 4], (num_teams, number)


def test_filters_stay_where_the_rows_of_teams_are_merged(several, alice):
    teams = team_ids_of(alice)
    keys = NewestFirst(several.filter(state=JobState.FAILED), "created_at", teams)
    assert keys[0:9] == list(
        several.filter(state=JobState.FAILED).order_by("-pk").values_list("pk", flat=True)
    )
    page = page_by_key(
        NewestFirst(several.filter(team__in=[]), "created_at", []), Job.objects.all(), 7, 4
    )
    assert list(page) == []


@pytest.mark.skipif(connection.vendor != "sqlite", reason="the words of SQLite's EXPLAIN")
def test_teams_are_merged_without_sorting_their_rows(several, alice):
    told = NewestFirst(several, "created_at", team_ids_of(alice)).sorted.explain()
    assert told.count("COVERING INDEX jobs_listed") == 2, told
    assert "TEMP B-TREE FOR ORDER BY" not in told, told


# Many rows, each with its own values, in one statement a set of fields.


def test_each_row_gets_its_own_values(host, other_host):
    instant = now()
    changes = {
        host.pk: {"last_beat": {"gpus": [1, "ü"]}, "last_seen_at": instant},
        other_host.pk: {"last_beat": {}, "last_seen_at": None},
    }
    update_each(Host, [RowChange(pk, values) for pk, values in changes.items()])
    rows = Host.objects.in_bulk(changes)
    assert {
        pk: {"last_beat": row.last_beat, "last_seen_at": row.last_seen_at}
        for pk, row in rows.items()
    } == changes
    with CaptureQueriesContext(connection) as asked:
        update_each(Host, [])
    assert len(asked) == 0


def test_rows_with_other_fields_keep_the_rest_and_the_later_value_stays(host, other_host):
    update_each(
        Host, [RowChange(host.pk, {"boot_id": "b"}), RowChange(other_host.pk, {"name": "n"})]
    )
    host.refresh_from_db()
    assert (host.boot_id, host.name != "n") == ("b", True)
    assert Host.objects.get(pk=other_host.pk).name == "n"
    update_each(Host, [RowChange(host.pk, {"boot_id": text}) for text in ("first", "later")])
    assert Host.objects.get(pk=host.pk).boot_id == "later"
