"""The list of jobs: what it shows, how it filters, what it costs."""

import re

import pytest

from tests.webapp.conftest import client_of, enrol, make_job
from webapp.jobs.models import Job, JobState, Measurement

pytestmark = pytest.mark.django_db(databases=["default", "metrics"])


@pytest.fixture
def many(team, alice, bob, host):
    """Sixty jobs of two owners, in turn queued, succeeded and failed."""
    states = [JobState.QUEUED, JobState.SUCCEEDED, JobState.FAILED]
    for i in range(60):
        owner = alice if i % 2 else bob
        job = make_job(team, owner, host, name=f"job number {i}", model_name=f"model-{i % 5}")
        Job.objects.filter(pk=job.pk).update(state=states[i % 3])
    return Job.objects.all()


def rows(client, **query):
    page = client.get("/jobs/", query).content.decode()
    return re.findall(r'<a class="name" href="/jobs/\w+/">(.*?)</a>', page)


def test_without_jobs_the_page_offers_the_demo(as_alice):
    page = as_alice.get("/jobs/").content.decode()
    assert "Nothing has been launched yet" in page
    assert "preset=demo" in page


def test_the_newest_job_comes_first(as_alice, many):
    assert rows(as_alice)[0] == "job number 59"


def test_a_page_holds_fifty_jobs_and_leads_to_the_older_ones(as_alice, many):
    assert len(rows(as_alice)) == 50
    assert len(rows(as_alice, page=2)) == 10


def test_a_page_number_beyond_the_end_shows_the_last_page(as_alice, many):
    assert len(rows(as_alice, page=99)) == 10


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ({"state": "failed"}, 20),
        ({"owner": "bob"}, 30),
        ({"kind": "compress"}, 0),
        ({"host": "box"}, 50),
        ({"host": "elsewhere"}, 0),
        ({"q": "MODEL-3"}, 12),
        ({"q": "number 12"}, 1),
        ({"state": "failed", "owner": "bob"}, 10),
    ],
)
def test_filters_narrow_the_list(as_alice, many, query, count):
    assert len(rows(as_alice, **query)) == count


def test_an_unknown_filter_value_is_no_error(as_alice, many):
    assert rows(as_alice, state="'; drop table") == []


def test_the_next_page_keeps_the_filters(as_alice, many):
    Job.objects.update(state=JobState.FAILED)
    page = as_alice.get("/jobs/", {"state": "failed"}).content.decode()
    assert "?state=failed&amp;page=2" in page


def test_when_nothing_matches_the_page_says_so(as_alice, many):
    assert "No job matches" in as_alice.get("/jobs/", {"q": "zebra"}).content.decode()


def test_a_finished_job_shows_measured_over_predicted(as_alice, finished):
    assert "1.05" in as_alice.get("/jobs/").content.decode()


def test_the_speed_stands_for_the_job_before_the_memory(finished):
    by_metric = {row.metric: row.ratio for row in Measurement.objects.filter(job=finished)}
    assert by_metric["tokens_per_second"] == pytest.approx(1.05)


def test_a_running_job_shows_its_progress_and_what_is_left(as_alice, running):
    page = as_alice.get("/jobs/").content.decode()
    assert 'aria-label="Progress: 33.3 %"' in page
    assert "about 1 min" in page


def test_deleted_jobs_are_gone(as_alice, finished):
    as_alice.post(f"/jobs/{finished.pk}/delete/")
    assert rows(as_alice) == []


def test_another_teams_jobs_are_not_there(many, charlie):
    assert rows(client_of(charlie)) == []


def test_another_teams_hosts_are_no_filter(as_alice, many, other_team):
    enrol(other_team, name="Secret box")
    assert "Secret box" not in as_alice.get("/jobs/").content.decode()


def test_one_topic_serves_the_whole_list(as_alice, many):
    assert 'data-live-topics="jobs"' in as_alice.get("/jobs/").content.decode()


def test_the_number_of_queries_does_not_depend_on_the_rows(
    as_alice, many, django_assert_num_queries, django_assert_max_num_queries
):
    with django_assert_max_num_queries(20) as few:
        as_alice.get("/jobs/", {"q": "number 12"})
    with django_assert_num_queries(len(few.captured_queries)):
        as_alice.get("/jobs/")


def test_a_hidden_row_menu_offers_what_the_person_may_do(as_alice, bob, finished):
    page = as_alice.get("/jobs/").content.decode()
    assert f"/jobs/{finished.pk}/delete/" in page
    assert f"/jobs/{finished.pk}/delete/" not in client_of(bob).get("/jobs/").content.decode()
