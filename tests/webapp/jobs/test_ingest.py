"""The one door for numbered events, and what a host may say through it."""

import math

import pytest
from django.conf import settings as django_settings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runners.shared.messages import ReceivedBatch, RunEvent
from runners.shared.reasons import Reason
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, enrol, make_job, new_attempt
from tests.webapp.jobs.undone import undone
from webapp.agents import ingest
from webapp.agents.ingest import events_accept, split_batch
from webapp.core.problems import ConflictProblem
from webapp.jobs.models import Artefact, Attempt, AttemptEvent, Job, Measurement
from webapp.jobs.results import store_measurements
from webapp.jobs.services import job_stop
from webapp.metrics.models import MetricBatch
from webapp.metrics.store import read_raw
from webapp.modelhub.models import TeamModel

pytestmark = pytest.mark.django_db(databases="__all__")
LINE = ("log", {"stream": "stdout", "text": "hello"})
POINT = ("metric", {"source": "job", "values": {"loss": 2.5}, "step": 3})


def metrics_database() -> str:
    return django_settings.METRICS_DATABASE


def accept(attempt: Attempt, *events, first: int = 1) -> int:
    batch = batch_of(attempt, *events, first=first)
    return events_accept(host=attempt.host, batch=batch).acked_seq


def fresh(attempt: Attempt) -> Attempt:
    return Attempt.objects.get(pk=attempt.pk)


# Numbers


def test_events_are_stored_once_in_their_order_and_the_others_are_counted(attempt):
    assert accept(attempt, LINE, LINE, first=5) == 0
    assert (AttemptEvent.objects.count(), fresh(attempt).refused_gaps) == (0, 2)
    accept(attempt, LINE, LINE)
    assert accept(attempt, LINE, LINE) == 2
    assert AttemptEvent.objects.count() == 2
    assert fresh(attempt).dropped_duplicates == 2
    assert accept(attempt, LINE, LINE, LINE, first=2) == 4
    assert accept(attempt, LINE, LINE, LINE, first=5) == 7


def test_an_attempt_that_reports_is_missed_by_no_beat(attempt):
    Attempt.objects.update(missed_beats=2)
    accept(attempt, LINE)
    assert fresh(attempt).missed_beats == 0


@given(
    acked=st.integers(0, 20),
    numbers=st.lists(st.integers(1, 40), max_size=40),
)
def test_sifting_never_leaves_a_gap_and_loses_no_count(acked, numbers):
    events = [RunEvent(seq=n, t_ms=0, kind="log", body={}) for n in numbers]
    sifted = split_batch(events, acked)
    expected = list(range(acked + 1, acked + 1 + len(sifted.fresh)))
    assert [event.seq for event in sifted.fresh] == expected
    assert len(sifted.fresh) + sifted.duplicates + sifted.gaps == len(events)


def test_a_wrong_fence_and_another_host_are_refused(attempt, team):
    batch = batch_of(attempt, LINE).model_copy(update={"fence": "0" * 32})
    with pytest.raises(ConflictProblem):
        events_accept(host=attempt.host, batch=batch)
    stranger, _ = enrol(team, name="Stranger")
    with pytest.raises(ConflictProblem):
        events_accept(host=stranger, batch=batch_of(attempt, LINE))


# What events do


def test_start_phase_progress_and_result_stand_on_the_job(attempt):
    accept(attempt, ("started", STARTED))
    assert Job.objects.get(pk=attempt.job_id).state == "running"
    body = {"done": 3, "total": 10, "unit": "steps", "eta_seconds": 7.0}
    accept(attempt, ("phase", {"name": "Training"}), ("progress", body), first=2)
    job = Job.objects.get(pk=attempt.job_id)
    assert (job.phase, job.progress_done, job.eta_seconds) == ("Training", 3, 7.0)
    accept(attempt, ("result", {"measured": {"step_seconds": 0.5}, "notes": {}}), first=4)
    assert Job.objects.get(pk=attempt.job_id).result["measured"] == {"step_seconds": 0.5}


def test_metric_points_go_to_the_metric_store_with_their_step(attempt):
    accept(attempt, POINT)
    assert read_raw(attempt.pk, "job", "loss").value.tolist() == [2.5]
    assert read_raw(attempt.pk, "job", "step").value.tolist() == [3.0]
    assert not AttemptEvent.objects.filter(kind="metric").exists()


def test_the_exit_record_ends_the_job(attempt):
    for reason, state in [
        ("ok", "succeeded"),
        ("oom_host", "failed"),
        ("internal", "error"),
        ("quota", "stopped"),
    ]:
        with undone(reason, state):
            accept(attempt, ("started", STARTED), ("exited", EXIT_OK | {"reason": reason}))
            job = Job.objects.get(pk=attempt.job_id)
            assert (job.state, job.reason) == (state, reason)


def test_an_exit_before_the_start_ends_the_job_too(attempt):
    accept(attempt, ("exited", EXIT_OK | {"reason": "model_or_data_missing", "exit_code": 3}))
    assert Job.objects.get(pk=attempt.job_id).state == "failed"


def test_progress_and_exit_of_a_superseded_attempt_are_kept_and_move_nothing(attempt):
    newer = new_attempt(attempt.job)
    accept(attempt, ("phase", {"name": "Old"}), ("exited", EXIT_OK))
    job = Job.objects.get(pk=attempt.job_id)
    assert (job.state, job.phase, job.current_attempt_id) == ("starting", "", newer.pk)
    assert fresh(attempt).exit_record["reason"] == Reason.OK


def test_started_after_a_stop_order_does_not_revive_the_job(attempt):
    job_stop(job=attempt.job, by="alice")
    accept(attempt, ("started", STARTED))
    assert Job.objects.get(pk=attempt.job_id).state == "stopping"


def test_a_job_that_ended_before_the_stop_reached_it_succeeded(attempt):
    accept(attempt, ("started", STARTED))
    job_stop(job=attempt.job, by="alice")
    accept(attempt, ("exited", EXIT_OK), first=2)
    assert Job.objects.get(pk=attempt.job_id).state == "succeeded"


def test_a_body_that_is_not_its_kind_is_kept_but_not_obeyed(attempt):
    assert accept(attempt, ("started", STARTED), ("progress", {"done": "much"}), LINE) == 3
    assert AttemptEvent.objects.get(attempt=attempt, seq=2).body == {"done": "much"}
    assert Job.objects.get(pk=attempt.job_id).progress_done is None


def test_a_damaged_point_does_not_hold_the_others_up(attempt):
    assert accept(attempt, ("metric", {"values": 1}), POINT) == 2
    assert read_raw(attempt.pk, "job", "loss").seq.tolist() == [2]


# Crashes between the two databases


def test_points_of_a_batch_that_did_not_commit_are_not_doubled(attempt, monkeypatch):
    def crash(*_args):
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(ingest, "update_each", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            accept(attempt, POINT, POINT, LINE)
    is_apart = metrics_database() != "default"
    assert MetricBatch.objects.exists() == is_apart  # what the crash left in the other database
    accept(attempt, POINT, POINT, LINE, POINT)
    assert read_raw(attempt.pk, "job", "loss").seq.tolist() == [1, 2, 4]


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(deliveries=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=12))
def test_any_order_of_deliveries_stores_every_event_once(deliveries, team, alice, host):
    attempt = new_attempt(make_job(team, alice, host))
    for first, last in [*deliveries, (1, 12)]:
        events = [POINT if n % 3 else LINE for n in range(first, last + 1)]
        accept(attempt, *events, first=first)
    lines = AttemptEvent.objects.filter(attempt=attempt).values_list("seq", flat=True)
    points = read_raw(attempt.pk, "job", "loss").seq.tolist()
    assert sorted([*lines, *points]) == list(range(1, 13))


# Results as hosts send them: what is no number, what nobody predicted, what came twice.


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


def test_a_job_with_a_result_that_is_no_number_ends_with_its_page_and_measures_nothing(
    ends, alice, client
):
    client.force_login(alice)
    for value in (math.nan, math.inf, -math.inf):
        for result in (
            {"perplexity": value, "final_loss": 3.0},
            {"perplexity": value, "final_loss": value},
            {"tokens_per_second": value, "final_loss": 3.0},
        ):
            with undone(result):
                job = ends(result)
                assert job.state == "succeeded"
                assert not Measurement.objects.exists()
                assert client.get(f"/jobs/{job.pk}/").status_code == 200


def test_what_nobody_predicted_is_no_measurement(ends):
    for measured in [{}, {"perplexity": 3.0}, {"tokens": 7.0}, {"TOKENS_PER_SECOND": 5.0}]:
        with undone(measured):
            ends(measured)
            assert not Measurement.objects.exists()


def test_a_measurement_is_what_came_over_what_was_said(ends):
    for measured, ratio in [(100.0, 1.0), (50.0, 0.5), (250.0, 2.5), (0, 0)]:
        with undone(measured, ratio):
            ends({"tokens_per_second": measured})
            assert Measurement.objects.get().ratio == ratio


def test_the_last_result_is_measured_once_with_the_interval_of_its_prediction(ends):
    job = ends({"tokens_per_second": 10.0}, {"tokens_per_second": 90.0})
    store_measurements(job, job.current_attempt, job.host)
    row = Measurement.objects.get()
    assert (row.measured, row.unit) == (90.0, "tokens_per_second")
    assert (row.predicted_low, row.predicted, row.predicted_high) == (80.0, 100.0, 120.0)


def test_a_prediction_of_nothing_divides_nothing(ends, attempt):
    said = {"tokens_per_second": {"value": 0.0, "unit": "tokens_per_second"}}
    Job.objects.filter(pk=attempt.job_id).update(prediction=said)
    ends({"tokens_per_second": 90.0})
    assert not Measurement.objects.exists()


def test_a_strange_event_holds_nothing_up(attempt):
    for kind, body in [
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
    ]:
        with undone(kind, body):
            sent = batch_of(attempt, ("started", STARTED), (kind, body), ("phase", {"name": "On"}))
            batch = ReceivedBatch.model_validate(sent.model_dump())

            ack = events_accept(host=attempt.host, batch=batch)

            assert ack.acked_seq == 3
            assert Job.objects.get(pk=attempt.job_id).phase == "On"


def test_a_job_with_strange_progress_has_its_pages(attempt, alice, client):
    for kind, body in [
        ("progress", {"done": 1, "total": math.inf, "unit": "steps"}),
        ("progress", {"done": 1, "total": 5, "unit": "steps", "eta_seconds": math.inf}),
        ("progress", {"done": 1e9, "total": 5, "unit": "steps", "eta_seconds": 1e300}),
        ("progress", {"done": 1, "total": 0, "unit": ""}),
        ("progress", {"done": 9, "total": 5, "unit": "seconds", "eta_seconds": 0}),
    ]:
        with undone(kind, body):
            events_accept(
                host=attempt.host, batch=batch_of(attempt, ("started", STARTED), (kind, body))
            )
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


def test_an_end_that_is_far_beyond_a_life_is_no_estimate(attempt):
    for seconds, is_kept in [(0, True), (86_400, True), (1e12, False)]:
        with undone(seconds, is_kept):
            body = {"done": 1, "total": 5, "unit": "steps", "eta_seconds": seconds}
            events_accept(
                host=attempt.host,
                batch=batch_of(attempt, ("started", STARTED), ("progress", body)),
            )
            assert Job.objects.get(pk=attempt.job_id).eta_seconds == (seconds if is_kept else None)


def test_every_event_that_came_is_kept(attempt):
    batch = batch_of(attempt, ("result", {"measured": {"x": math.nan}}), ("phase", {}))
    events_accept(host=attempt.host, batch=batch)
    assert [row.kind for row in AttemptEvent.objects.all()] == ["result", "phase"]


def test_a_model_with_a_strange_name_joins_the_teams_models(attempt):
    for name in ["x" * 300, "a/b", "", 'quote"d', "line\nbreak"]:
        with undone(name):
            body = {"name": name, "kind": "model", "total_bytes": 0, "files": {}, "sha256": {}}
            events = [("started", STARTED), ("artefact", body), ("exited", EXIT_OK)]
            events_accept(host=attempt.host, batch=batch_of(attempt, *events))
            assert Job.objects.get(pk=attempt.job_id).state == "succeeded"
            assert Artefact.objects.count() == TeamModel.objects.count()


def test_an_artefact_with_a_strange_name_has_a_page(attempt, alice, client):
    for name in ["model", 'quote"d', "line\nbreak", "größe", "a/b", ".."]:
        with undone(name):
            body = {"name": name, "kind": "report", "total_bytes": 0, "files": {}, "sha256": {}}
            events_accept(host=attempt.host, batch=batch_of(attempt, ("artefact", body)))
            client.force_login(alice)
            assert client.get(f"/jobs/{attempt.job_id}/artefacts/").status_code == 200
