"""The history under any query string, and the pages of jobs whose rows are odd."""

import json

import pytest

from tests.webapp.conftest import client_of, make_job
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db(databases="__all__")
FILTERS = ["state", "kind", "host", "owner", "q", "page"]
STRANGE = ["<script>x", "%", "_", "'; --", "x" * 3000, "-1", "9" * 400, "null", "é模"]


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("value", STRANGE)
def test_any_filter_value_is_answered_and_escaped(as_alice, draft, name, value):
    response = as_alice.get("/jobs/", {name: value})

    assert response.status_code == 200
    assert "<script>x" not in response.content.decode()


@pytest.mark.parametrize(
    ("query", "found"),
    [
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
    ],
)
def test_filters_are_taken_together(as_alice, draft, query, found):
    rows = as_alice.get("/jobs/", query).context["rows"]

    assert bool(rows) == found


@pytest.mark.parametrize(("page", "count"), [("1", 50), ("2", 2), ("3", 2), ("x", 50), ("0", 2)])
def test_any_page_number_shows_a_page(as_alice, team, alice, host, page, count):
    for number in range(52):
        make_job(team, alice, host, name=f"job {number}")

    assert len(as_alice.get("/jobs/", {"page": page}).context["rows"]) == count


@pytest.mark.parametrize(
    "changes",
    [
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
    ],
    ids=json.dumps,
)
def test_a_job_with_an_odd_row_has_all_its_pages(as_alice, job, changes):
    Job.objects.filter(pk=job.pk).update(**changes)

    tabs = ["", "metrics/", "logs/", "events/", "config/", "artefacts/"]
    pages = [as_alice.get(f"/jobs/{job.pk}/{tab}") for tab in tabs]

    assert {page.status_code for page in pages} == {200}
    assert all("<img src=x>" not in page.content.decode() for page in pages)


@pytest.mark.parametrize("job_id", ["x", "0" * 26, "..", "x" * 500, "01J<b>"])
def test_a_job_that_is_none_is_not_found(as_alice, job_id):
    assert as_alice.get(f"/jobs/{job_id}/").status_code == 404


@pytest.mark.parametrize("tab", ["nothing", "logs/more", "%2e%2e", "stop", "clone", "delete"])
def test_a_tab_that_is_none_is_no_page(as_alice, draft, tab):
    assert as_alice.get(f"/jobs/{draft.pk}/{tab}/").status_code in {404, 405}


def test_the_list_of_another_team_counts_nothing(charlie, draft):
    response = client_of(charlie).get("/jobs/")

    assert response.context["page"].paginator.count == 0
    assert response.context["owners"] == ["charlie"]  # nobody of another team
