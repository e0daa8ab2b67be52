"""The list of jobs: what it shows, how it filters by any query, what it costs."""

import html
import re
from datetime import timedelta
from itertools import product
from urllib.parse import parse_qsl, quote

import pytest
from django.utils.timezone import localtime

from tests.webapp.conftest import client_of, enrol, make_job
from tests.webapp.jobs.undone import undone
from webapp.core.clock import now
from webapp.jobs.models import Job, JobState, Measurement

pytestmark = pytest.mark.django_db(databases="__all__")


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


def test_a_page_holds_fifty_jobs_the_newest_first_and_the_last_is_never_empty(as_alice, many):
    assert rows(as_alice)[0] == "job number 59"
    for number, count in (("1", 50), ("2", 10), ("3", 10), ("99", 10), ("", 50)):
        assert len(rows(as_alice, page=number)) == count, number
    assert len(rows(as_alice)) == 50
    assert 'data-live-topics="jobs"' in as_alice.get("/jobs/").content.decode()


def test_filters_narrow_the_list_and_a_page_without_a_match_says_so(as_alice, many):
    for query, count in [
        ({"state": "failed"}, 20),
        ({"owner": "bob"}, 30),
        ({"kind": "compress"}, 0),
        ({"host": "box"}, 50),
        ({"host": "elsewhere"}, 0),
        ({"q": "MODEL-3"}, 12),
        ({"q": "number 12"}, 1),
        ({"state": "failed", "owner": "bob"}, 10),
    ]:
        assert len(rows(as_alice, **query)) == count, (query, count)

    assert rows(as_alice, state="'; drop table") == []

    assert "No job matches" in as_alice.get("/jobs/", {"q": "zebra"}).content.decode()


def test_the_next_page_keeps_the_filters(as_alice, many):
    Job.objects.update(state=JobState.FAILED)
    page = as_alice.get("/jobs/", {"state": "failed"}).content.decode()
    assert "?state=failed&amp;page=2" in page


def test_the_list_is_sorted_by_a_column_with_filters_and_pages_kept(as_alice, many):
    jobs = list(Job.objects.order_by("created_at"))
    for at, job in enumerate(jobs[:4]):  # begun at different times, for different times
        began = now() - timedelta(hours=at + 1)
        ended = began + timedelta(minutes=(7, 3, 9, 1)[at])
        Job.objects.filter(pk=job.pk).update(started_at=began, ended_at=ended)
    for sort, first in [
        ("created", [0, 1, 2]), ("-created", [59, 58]), ("-started", [0, 1, 2, 3]),
        ("started", [3, 2, 1, 0]), ("-duration", [2, 0, 1, 3]), ("duration", [3, 1, 0, 2]),
        ("name", [0, 1, 10, 11]), ("-name", [9, 8, 7]),
    ]:  # fmt: skip
        expected = [f"job number {number}" for number in first]
        assert rows(as_alice, sort=sort)[: len(first)] == expected, sort
    page = as_alice.get("/jobs/", {"sort": "-started", "owner": "alice"}).content.decode()
    assert 'aria-sort="descending"><a class="sort" href="?sort=started&amp;owner=alice">' in page
    assert '<input type="hidden" name="sort" value="-started">' in page
    assert 'title="' + f"{localtime(now() - timedelta(hours=2)):%-d %b %Y}" in page
    assert as_alice.get("/jobs/", {"sort": "owner"}).status_code == 400
    assert len(rows(as_alice, sort="name", page=2)) == 10


def test_the_usual_views_are_one_press_away(as_alice, many):
    page = as_alice.get("/jobs/").content.decode()
    views = re.findall(r'class="chip" href="/jobs/(?:\?([^"]*))?"', page)
    found = [len(rows(as_alice, **dict(parse_qsl(html.unescape(query))))) for query in views]
    assert found == [50, 30, 20, 20, 10]  # all, mine, live, failed, my failed
    failed = as_alice.get("/jobs/", {"state": "failed,error", "q": "job"}).content.decode()
    assert '<option value="failed,error" selected>Failed or error</option>' in failed
    assert f"state={quote('queued,preflight,starting,running,stopping', safe='')}" in page


def test_a_finished_job_shows_measured_over_predicted_by_its_speed(as_alice, finished):
    assert "5\xa0% faster" in as_alice.get("/jobs/").content.decode()
    by_metric = {row.metric: row.ratio for row in Measurement.objects.filter(job=finished)}
    assert by_metric["tokens_per_second"] == pytest.approx(1.05)


def test_a_running_job_shows_its_progress_and_what_is_left(as_alice, running):
    page = as_alice.get("/jobs/").content.decode()
    assert 'aria-label="Progress: 33.3 %"' in page
    assert "about 1 min" in page


def test_deleted_jobs_are_gone(as_alice, finished):
    as_alice.post(f"/jobs/{finished.pk}/delete/")
    assert rows(as_alice) == []


def test_another_teams_jobs_are_not_there_and_its_hosts_no_filter(
    many, charlie, as_alice, other_team
):
    assert rows(client_of(charlie)) == []
    enrol(other_team, name="Secret box")
    assert "Secret box" not in as_alice.get("/jobs/").content.decode()


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


# The history under any query string, and the pages of jobs whose rows are odd.


FILTERS = ["state", "kind", "host", "owner", "q"]
STRANGE = ["<script>x", "%", "_", "'; --", "x" * 3000, "-1", "9" * 400, "null", "é模"]


def test_any_filter_value_is_answered_and_escaped(as_alice, draft):
    wrong = []
    for name, value in product(FILTERS, STRANGE):
        response = as_alice.get("/jobs/", {name: value})
        if response.status_code != 200 or "<script>x" in response.content.decode():
            wrong.append((name, value, response.status_code))
    assert not wrong, wrong


def test_a_filter_that_names_nothing_says_what_there_is(as_alice, draft):
    for query, sentence in [
        ("state=bogus", "There is no state “bogus”; there are draft, queued"),
        ("state=running,bogus", "There is no state “bogus”"),
        ("kind=bogus", "There is no kind “bogus”; there are train"),
        ("host=bogus", "There is no host “bogus”"),
        ("owner=bogus", "There is no owner “bogus”"),
    ]:
        assert sentence in as_alice.get(f"/jobs/?{query}").content.decode(), query


def test_filters_are_taken_together(as_alice, draft):
    for query, found in [
        ({"q": "DEMO"}, True),
        ({"q": "  demo  "}, True),
        ({"q": "nothing"}, False),
        ({"state": "draft"}, True),
        ({"state": "running"}, False),
        ({"kind": "train"}, True),
        ({"kind": "train", "state": "draft", "q": "demo"}, True),
        ({"kind": "compress"}, False),
        ({"owner": "alice"}, True),
        ({"owner": "bob"}, False),
        ({"host": "box"}, True),
        ({"q": "%"}, False),
    ]:
        rows = as_alice.get("/jobs/", query).context["rows"]

        assert bool(rows) == found, (query, found)


def test_a_job_with_an_odd_row_has_all_its_pages(as_alice, job):
    for changes in [
        {"prediction": {}},
        {"prediction": {"tokens_per_second": {"value": 0}}},
        {"prediction": {"x": "y"}},
        {"result": {"measured": {"perplexity": 0}}},
        {"result": {"measured": {"disk_bytes": 1, "original_disk_bytes": 0}}},
        {"owner": None},
        {"plan": None, "model_name": ""},
        {"reason": "oom_gpu", "state": "failed"},
        {"state": "expired", "reason": "queue_timeout"},
        {"phase": "<img src=x>", "state": "running"},
        {"progress_done": 5, "progress_total": 0, "state": "running"},
        {"spec": {"kind": "train"}},
    ]:
        with undone(changes):
            Job.objects.filter(pk=job.pk).update(**changes)

            tabs = ["", "metrics/", "logs/", "events/", "config/", "artefacts/"]
            pages = [as_alice.get(f"/jobs/{job.pk}/{tab}") for tab in tabs]

            assert {page.status_code for page in pages} == {200}
            assert all("<img src=x>" not in page.content.decode() for page in pages)


def test_a_job_that_is_none_is_not_found(as_alice):
    for job_id in ["x", "0" * 26, "..", "x" * 500, "01J<b>"]:
        assert as_alice.get(f"/jobs/{job_id}/").status_code == 404, job_id


def test_a_tab_that_is_none_is_no_page(as_alice, draft):
    for tab in ["nothing", "logs/more", "%2e%2e", "stop", "clone", "delete"]:
        assert as_alice.get(f"/jobs/{draft.pk}/{tab}/").status_code in {404, 405}, tab


def test_the_list_of_another_team_counts_nothing(charlie, draft):
    response = client_of(charlie).get("/jobs/")
    assert response.context["page"].paginator.count == 0
    assert response.context["owners"] == ["charlie"]  # nobody of another team
