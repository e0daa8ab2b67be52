"""Results as hosts send them: what is no number, what nobody predicted, what came twice."""

import math

import pytest

from tests.webapp.conftest import EXIT_OK, STARTED, batch_of
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import Artefact, AttemptEvent, Job, Measurement
from webapp.jobs.results import store_measurements
from webapp.modelhub.models import TeamModel

pytestmark = pytest.mark.django_db(databases="__all__")
SAID = {"value": 100.0, "low": 80.0, "high": 120.0, "unit": "tokens_per_second"}


@pytest.fixture
def ends(attempt):
    """Let the attempt start, report a result and end well."""
    Job.objects.filter(pk=attempt.job_id).update(prediction={"tokens_per_second": SAID})

    def end(*results: dict) -> Job:
        attempt.refresh_from_db()
        found = [("result", {"measured": result}) for result in results]
        events = [("started", STARTED), *found, ("exited", EXIT_OK)]
        events_accept(host=attempt.host, batch=batch_of(attempt, *events))
        return Job.objects.get(pk=attempt.job_id)

    return end


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("metric", ["perplexity", "tokens_per_second"])
def test_a_result_that_is_no_number_does_not_hold_the_end_up(ends, metric, value):
    assert ends({metric: value, "final_loss": 3.0}).state == "succeeded"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_result_that_is_no_number_measures_nothing(ends, value):
    ends({"tokens_per_second": value})

    assert not Measurement.objects.exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_job_with_a_result_that_is_no_number_has_its_page(ends, alice, client, value):
    job = ends({"perplexity": value, "final_loss": value})
    client.force_login(alice)

    assert client.get(f"/jobs/{job.pk}/").status_code == 200


@pytest.mark.parametrize(
    "measured",
    [{}, {"perplexity": 3.0}, {"tokens": 7.0}, {"TOKENS_PER_SECOND": 5.0}],
)
def test_what_nobody_predicted_is_no_measurement(ends, measured):
    ends(measured)

    assert not Measurement.objects.exists()


@pytest.mark.parametrize(("measured", "ratio"), [(100.0, 1.0), (50.0, 0.5), (250.0, 2.5), (0, 0)])
def test_a_measurement_is_what_came_over_what_was_said(ends, measured, ratio):
    ends({"tokens_per_second": measured})

    assert Measurement.objects.get().ratio == ratio


def test_a_measurement_keeps_the_interval_of_its_prediction(ends):
    ends({"tokens_per_second": 90.0})

    row = Measurement.objects.get()
    assert (row.predicted_low, row.predicted, row.predicted_high) == (80.0, 100.0, 120.0)
    assert row.unit == "tokens_per_second"


def test_a_prediction_of_nothing_divides_nothing(ends, attempt):
    said = {"tokens_per_second": {"value": 0.0, "unit": "tokens_per_second"}}
    Job.objects.filter(pk=attempt.job_id).update(prediction=said)

    ends({"tokens_per_second": 90.0})

    assert not Measurement.objects.exists()


def test_storing_twice_measures_once(ends):
    job = ends({"tokens_per_second": 90.0})

    store_measurements(job, job.current_attempt, job.host)

    assert Measurement.objects.count() == 1


def test_the_last_result_is_the_one_that_counts(ends):
    ends({"tokens_per_second": 10.0}, {"tokens_per_second": 90.0})

    assert Measurement.objects.get().measured == 90.0


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("result", {"measured": {"loss": "much"}}),
        ("result", {}),
        ("progress", {"done": -1, "total": 5, "unit": "steps"}),
        ("progress", {"done": math.nan, "total": 5, "unit": "steps"}),
        ("progress", {"done": 1, "total": math.inf, "unit": "steps"}),
        ("progress", {"done": 1, "total": 5, "unit": "steps", "eta_seconds": math.inf}),
        ("phase", {}),
        ("artefact", {"name": "m", "kind": "poem", "total_bytes": 1, "files": {}, "sha256": {}}),
        ("log", {"stream": "telepathy", "text": "x"}),
        ("log", {"stream": "stdout", "text": "\x00"}),
        ("log", {"stream": "stdout", "text": "\ud800"}),
        ("phase", {"name": "x" * 500}),
        ("exited", {"exit_code": 0}),
    ],
)
def test_a_strange_event_holds_nothing_up(attempt, kind, body):
    batch = batch_of(attempt, ("started", STARTED), (kind, body), ("phase", {"name": "On"}))

    ack = events_accept(host=attempt.host, batch=batch)

    assert ack.acked_seq == 3
    assert Job.objects.get(pk=attempt.job_id).phase == "On"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("progress", {"done": 1, "total": math.inf, "unit": "steps"}),
        ("progress", {"done": 1, "total": 5, "unit": "steps", "eta_seconds": math.inf}),
        ("progress", {"done": 1e9, "total": 5, "unit": "steps", "eta_seconds": 1e300}),
        ("progress", {"done": 1, "total": 0, "unit": ""}),
        ("progress", {"done": 9, "total": 5, "unit": "seconds", "eta_seconds": 0}),
    ],
)
def test_a_job_with_strange_progress_has_its_pages(attempt, alice, client, kind, body):
    events_accept(host=attempt.host, batch=batch_of(attempt, ("started", STARTED), (kind, body)))
    client.force_login(alice)

    pages = ["/", "/jobs/", f"/jobs/{attempt.job_id}/"]

    assert [client.get(page).status_code for page in pages] == [200, 200, 200]


def test_a_null_among_the_results_is_left_out(attempt):
    body = {"measured": {"perplexity": None, "final_loss": 2.0}}

    events_accept(
        host=attempt.host, batch=batch_of(attempt, ("started", STARTED), ("result", body))
    )

    assert Job.objects.get(pk=attempt.job_id).result["measured"] == {"final_loss": 2.0}


def test_a_log_line_with_a_nul_is_kept_with_a_mark(attempt):
    line = ("log", {"stream": "stdout", "text": "a\x00b\n"})

    events_accept(host=attempt.host, batch=batch_of(attempt, line))

    assert AttemptEvent.objects.get().body["text"] == "a\ufffdb\n"


@pytest.mark.parametrize(("seconds", "is_kept"), [(0, True), (86_400, True), (1e12, False)])
def test_an_end_that_is_far_beyond_a_life_is_no_estimate(attempt, seconds, is_kept):
    body = {"done": 1, "total": 5, "unit": "steps", "eta_seconds": seconds}

    events_accept(
        host=attempt.host, batch=batch_of(attempt, ("started", STARTED), ("progress", body))
    )

    assert Job.objects.get(pk=attempt.job_id).eta_seconds == (seconds if is_kept else None)


def test_every_event_that_came_is_kept(attempt):
    batch = batch_of(attempt, ("result", {"measured": {"x": math.nan}}), ("phase", {}))

    events_accept(host=attempt.host, batch=batch)

    assert [row.kind for row in AttemptEvent.objects.all()] == ["result", "phase"]


@pytest.mark.parametrize("name", ["x" * 300, "a/b", "", 'quote"d', "line\nbreak"])
def test_a_model_with_a_strange_name_joins_the_teams_models(attempt, name):
    body = {"name": name, "kind": "model", "total_bytes": 0, "files": {}, "sha256": {}}
    events = [("started", STARTED), ("artefact", body), ("exited", EXIT_OK)]

    events_accept(host=attempt.host, batch=batch_of(attempt, *events))

    assert Job.objects.get(pk=attempt.job_id).state == "succeeded"
    assert Artefact.objects.count() == TeamModel.objects.count()


@pytest.mark.parametrize("name", ["model", 'quote"d', "line\nbreak", "größe", "a/b", ".."])
def test_an_artefact_with_a_strange_name_has_a_page(attempt, alice, client, name):
    body = {"name": name, "kind": "report", "total_bytes": 0, "files": {}, "sha256": {}}
    events_accept(host=attempt.host, batch=batch_of(attempt, ("artefact", body)))
    client.force_login(alice)

    assert client.get(f"/jobs/{attempt.job_id}/artefacts/").status_code == 200
