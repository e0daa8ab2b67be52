"""The one door for numbered events: nothing twice, nothing missing, nothing out of order."""

import pytest
from django.conf import settings as django_settings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runners.messages import RunEvent
from runners.reasons import Reason
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, enrol, make_job, new_attempt
from webapp.core.problems import ConflictProblem
from webapp.jobs import ingest
from webapp.jobs.ingest import events_accept, split_batch
from webapp.jobs.models import Attempt, AttemptEvent, Job
from webapp.jobs.services import job_stop
from webapp.metrics.models import MetricBatch
from webapp.metrics.read import read_raw

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


def test_consecutive_events_are_acknowledged_to_the_last(attempt):
    assert accept(attempt, LINE, LINE, LINE) == 3


def test_an_attempt_that_reports_is_missed_by_no_beat(attempt):
    Attempt.objects.update(missed_beats=2)
    accept(attempt, LINE)
    assert fresh(attempt).missed_beats == 0


def test_a_redelivered_batch_stores_nothing_and_is_counted(attempt):
    accept(attempt, LINE, LINE)
    assert accept(attempt, LINE, LINE) == 2
    assert AttemptEvent.objects.count() == 2
    assert fresh(attempt).dropped_duplicates == 2


def test_an_overlapping_batch_adds_only_its_new_part(attempt):
    accept(attempt, LINE, LINE)
    assert accept(attempt, LINE, LINE, LINE, first=2) == 4


def test_a_batch_beyond_a_gap_is_refused_and_counted(attempt):
    assert accept(attempt, LINE, LINE, first=5) == 0
    assert (AttemptEvent.objects.count(), fresh(attempt).refused_gaps) == (0, 2)


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


def test_a_wrong_fence_is_refused(attempt):
    batch = batch_of(attempt, LINE).model_copy(update={"fence": "0" * 32})
    with pytest.raises(ConflictProblem):
        events_accept(host=attempt.host, batch=batch)


def test_another_host_is_refused(attempt, team):
    stranger, _ = enrol(team, name="Stranger")
    with pytest.raises(ConflictProblem):
        events_accept(host=stranger, batch=batch_of(attempt, LINE))


# What events do


def test_started_makes_the_job_run(attempt):
    accept(attempt, ("started", STARTED))
    assert Job.objects.get(pk=attempt.job_id).state == "running"


def test_progress_and_phase_stand_on_the_job(attempt):
    body = {"done": 3, "total": 10, "unit": "steps", "eta_seconds": 7.0}
    accept(attempt, ("phase", {"name": "Training"}), ("progress", body))
    job = Job.objects.get(pk=attempt.job_id)
    assert (job.phase, job.progress_done, job.eta_seconds) == ("Training", 3, 7.0)


def test_the_result_stands_on_the_job(attempt):
    accept(attempt, ("result", {"measured": {"step_seconds": 0.5}, "notes": {}}))
    assert Job.objects.get(pk=attempt.job_id).result["measured"] == {"step_seconds": 0.5}


def test_metric_points_go_to_the_metric_store_with_their_step(attempt):
    accept(attempt, POINT)
    assert read_raw(attempt.pk, "job", "loss").value.tolist() == [2.5]
    assert read_raw(attempt.pk, "job", "step").value.tolist() == [3.0]
    assert not AttemptEvent.objects.filter(kind="metric").exists()


@pytest.mark.parametrize(
    ("reason", "state"),
    [("ok", "succeeded"), ("oom_host", "failed"), ("internal", "error"), ("quota", "stopped")],
)
def test_the_exit_record_ends_the_job(attempt, reason, state):
    accept(attempt, ("started", STARTED), ("exited", EXIT_OK | {"reason": reason}))
    job = Job.objects.get(pk=attempt.job_id)
    assert (job.state, job.reason) == (state, reason)


def test_an_exit_before_the_start_ends_the_job_too(attempt):
    accept(attempt, ("exited", EXIT_OK | {"reason": "model_or_data_missing", "exit_code": 3}))
    assert Job.objects.get(pk=attempt.job_id).state == "failed"


def test_the_exit_of_a_superseded_attempt_is_kept_and_moves_nothing(attempt):
    newer = new_attempt(attempt.job)
    accept(attempt, ("exited", EXIT_OK))
    job = Job.objects.get(pk=attempt.job_id)
    assert (job.state, job.current_attempt_id) == ("starting", newer.pk)
    assert fresh(attempt).exit_record["reason"] == Reason.OK


def test_progress_of_a_superseded_attempt_moves_nothing(attempt):
    new_attempt(attempt.job)
    accept(attempt, ("phase", {"name": "Old"}))
    assert Job.objects.get(pk=attempt.job_id).phase == ""


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
        patch.setattr(ingest, "apply_event", crash)
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
