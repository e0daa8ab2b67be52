"""A plan's targets are judged by their percentile: named, met or missed, with the chance."""

import pytest

from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, client_of
from tests.webapp.jobs_pages.test_load_page import REPORT, SPEC
from webapp.jobs.ingest import events_accept
from webapp.jobs.measured_figures import figures_of
from webapp.jobs.models import Job
from webapp.jobs.targets import targets_of

pytestmark = pytest.mark.django_db(databases="__all__")
ASKED = {"kind": "serve", "ttft_slo_seconds": 1.0, "tpot_slo_seconds": 0.05}


def plain(text: object) -> str:
    return " ".join(str(text).split())


@pytest.fixture
def endpoint(attempt, report):
    """Let an endpoint report its requests; more changes may be made to its job."""

    def make(points: list[dict], **fields) -> Job:
        changes = {"kind": "serve", "spec": {"kind": "serve"}} | fields
        request = {"plan_request": {"workload": ASKED}}
        Job.objects.filter(pk=attempt.job_id).update(**{**request, **changes})
        report(("started", STARTED))
        for values in points:
            report(("metric", {"source": "job", "values": values}))
        return Job.objects.get(pk=attempt.job_id)

    return make


def point(answered: float, mean: float, p95: float) -> dict:
    return {
        "answered_requests": answered,
        "ttft_mean_seconds": mean,
        "ttft_p95_seconds": p95,
        "tpot_p95_seconds": 0.02,
    }


def states(job: Job) -> dict[str, tuple[str, str]]:
    return {one.name: (one.state, plain(one.words)) for one in targets_of(job, figures_of(job))}


def test_a_target_is_missed_by_its_percentile_however_good_the_mean_is(endpoint):
    found = states(endpoint([point(100, 0.333, 1.3)]))

    assert found["ttft"] == ("missed", "Time to first token, p95: 1.3 s so far")


def test_a_target_that_is_met_is_said_to_be_met(endpoint, as_alice):
    job = endpoint([point(100, 0.333, 0.8)])

    page = plain(as_alice.get(f"/jobs/{job.pk}/").content.decode())

    assert states(job)["ttft"][0] == "met"
    assert "First token within 1.0 s" in page
    assert "Each further token within 50 ms" in page
    assert page.count("Met</span>") == 2


def test_a_few_requests_judge_no_target(endpoint):
    state, words = states(endpoint([point(3, 0.3, 1.3)]))["ttft"]

    assert state == "unjudged"
    assert "not compared yet: warm-up, 3 of 20 requests" in words


def test_without_a_target_nothing_is_judged(endpoint):
    job = endpoint([point(100, 0.3, 0.3)], plan_request={"workload": {"kind": "serve"}})

    assert targets_of(job, figures_of(job)) == []


def test_one_batch_has_no_percentile_and_says_so(endpoint):
    found = states(endpoint([], kind="benchmark", spec={"kind": "benchmark"}))

    assert found["ttft"][0] == "unjudged"
    assert "measure the plan under load" in found["ttft"][1]


@pytest.fixture
def under_load(attempt):
    """Let a benchmark leave rows whose p95 has the given value and interval."""

    def leave(value: float, interval: tuple[float, float] | None, limit: float) -> Job:
        rows = [row.model_dump(mode="json") for row in REPORT.rows]
        rows[-1]["measured"]["ttft_p95_seconds"] = value
        rows[-1]["interval"] = {} if interval is None else {"ttft_p95_seconds": interval}
        facts = REPORT.model_dump(mode="json") | {"rows": rows}
        workload = {"kind": "serve", "ttft_slo_seconds": limit}
        Job.objects.filter(pk=attempt.job_id).update(
            kind="benchmark", spec=SPEC, plan_request={"workload": workload}
        )
        body = {"name": "load", "kind": "report", "total_bytes": 2, "facts": facts}
        files = {"files": {"load.json": 2}, "sha256": {"load.json": "a" * 64}}
        events = (("started", STARTED), ("artefact", body | files), ("exited", EXIT_OK))
        events_accept(host=attempt.host, batch=batch_of(attempt, *events))
        return Job.objects.get(pk=attempt.job_id)

    return leave


@pytest.mark.parametrize(
    ("value", "interval", "limit", "state", "words"),
    [
        (0.9, (0.8, 1.0), 1.0, "met", "chance 90 %"),
        (1.1, (1.0, 1.2), 1.0, "missed", "chance 10 %"),
        (1.0, (0.9, 1.1), 1.0, "met", "chance 50 %"),
        (0.5, (0.49, 0.51), 1.0, "met", "chance above 99 %"),
        (2.0, (1.9, 2.1), 1.0, "missed", "chance below 1 %"),
        (0.9, None, 1.0, "met", ""),
    ],
)
def test_the_chance_follows_from_the_interval_of_the_percentile(
    under_load, value, interval, limit, state, words
):
    job = under_load(value, interval, limit)

    (target,) = targets_of(job, figures_of(job))

    assert target.state == state
    assert plain(target.chance_words).startswith(words)
    assert bool(target.chance_words) == bool(words)


def test_the_api_has_the_target_as_the_page_has_it(under_load, alice):
    job = under_load(0.9, (0.8, 1.0), 1.0)
    client = client_of(alice)

    (told,) = client.get(f"/api/v1/jobs/{job.pk}/figures").json()["targets"]
    page = plain(client.get(f"/jobs/{job.pk}/").content.decode())

    assert (told["figure"], told["state"], told["percentile"]) == ("ttft_p95_seconds", "met", 95)
    assert told["chance"] == pytest.approx(0.9)
    assert "Time to first token, p95: 900 ms" in page
