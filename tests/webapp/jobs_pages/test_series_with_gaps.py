"""Charts of a job from what is stored: gaps, diverged losses, spans, latest values."""

import json
import math
from datetime import timedelta

import numpy as np
import pytest

from webapp.core.clock import now
from webapp.jobs.measured_figures import figures_of
from webapp.jobs.models import Job
from webapp.jobs.plots import draw, span_ms
from webapp.jobs.points import GAP_MS, series_of
from webapp.metrics.read import Series as Stored

pytestmark = pytest.mark.django_db(databases="__all__")
NAN = math.nan


def stored(values, step_ms=1000, times=None) -> Stored:
    t_ms = np.array(times or [n * step_ms for n in range(len(values))], np.int64)
    value = np.array(values, np.float64)
    return Stored("job", "loss", t_ms, value, value, value)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([], ()),
        ([1.0], (1.0,)),
        ([NAN], ()),
        ([1.0, NAN], (1.0,)),
        ([NAN, 1.0], (1.0,)),
        ([1.0, NAN, 2.0], (1.0, 2.0)),
        ([NAN, NAN, NAN], ()),
        ([3.0, 2.0, NAN, NAN], (3.0, 2.0)),
        ([1.0, math.inf, 2.0], (1.0, 2.0)),
        ([-math.inf, 1.0], (1.0,)),
    ],
)
def test_what_is_no_number_is_not_drawn_wherever_it_stands(values, kept):
    assert series_of(stored(values)).known == kept


def test_a_long_silence_lifts_the_pen():
    series = series_of(stored([1.0, NAN, 2.0], times=[0, GAP_MS // 2, GAP_MS]))

    assert series.values == (1.0, None, 2.0)


def test_a_short_silence_is_the_jobs_own_pace():
    series = series_of(stored([1.0, NAN, 2.0], times=[0, GAP_MS // 4, GAP_MS // 2]))

    assert series.values == (1.0, 2.0)


def test_instants_and_values_stay_side_by_side():
    series = series_of(stored([1.0, NAN, 2.0, NAN], step_ms=1000))

    assert (series.t_ms, series.values) == ((0, 2000), (1.0, 2.0))


@pytest.fixture
def diverged(running, report) -> Job:
    """A training whose loss is no number from its last step on."""
    report(("metric", {"source": "job", "values": {"loss": NAN}, "step": 9}))
    return running


@pytest.mark.parametrize("tab", ["", "metrics/", "logs/", "events/", "config/", "artefacts/"])
def test_a_job_that_diverged_has_its_pages(as_alice, diverged, tab):
    assert as_alice.get(f"/jobs/{diverged.pk}/{tab}").status_code == 200


def test_a_loss_that_was_never_a_number_has_a_chart_without_a_line(report, attempt):
    report(("metric", {"source": "job", "values": {"loss": NAN}, "step": 1}))

    loss = next(one for one in draw(attempt.job) if one.chart.key == "loss")

    assert loss.words.startswith("No points yet")


def test_the_figures_of_a_diverged_job_are_json_that_browsers_read(diverged):
    for one in draw(diverged, is_complete=True):
        assert json.dumps(one.figure, allow_nan=False)


def test_the_latest_values_leave_out_what_is_no_number(attempt, report):
    Job.objects.filter(pk=attempt.job_id).update(
        prediction={"step_seconds": {"value": 1.0, "low": 0.5, "high": 2.0, "unit": "seconds"}}
    )
    report(("metric", {"source": "job", "values": {"step_seconds": NAN}, "step": 1}))
    job = Job.objects.get(pk=attempt.job_id)

    assert figures_of(job)["step_seconds"].measured is None


def test_the_speed_so_far_is_the_median_without_the_first_two_steps(running):
    assert figures_of(running)["tokens_per_second"].measured == 3003.0


def test_the_peak_so_far_is_the_jobs_own_and_no_sum_of_processes(running, report):
    report(("metric", {"source": "job", "values": {"peak_memory_bytes": 6e8}, "step": 6}))
    for size in (5e8, 9e8, 6e8):
        report(("metric", {"source": "host", "values": {"rss_bytes": size}}))
    found = figures_of(running)

    assert found["peak_memory_bytes"].measured == 6e8
    assert found["host_memory_bytes"].measured == 9e8


@pytest.fixture
def on_two_ranks(running, report) -> Job:
    """The running job as one of two processes of its host, whose memory is measured as a sum."""
    running.spec = {**running.spec, "parallel": {"processes_per_host": 2}}
    running.save()
    report(("metric", {"source": "supervisor", "values": {"rss_bytes": 1.6e9}}))
    return running


def test_the_memory_of_several_ranks_has_no_prediction_of_one_beside_it(on_two_ranks):
    memory = next(one for one in draw(on_two_ranks) if one.chart.key == "memory")

    assert memory.chart.title == "Host memory of the job, all ranks"
    assert memory.prediction is None
    assert [each["name"] for each in memory.figure["data"]] == ["measured"]
    assert "predicted" not in memory.words.lower()
    assert figures_of(on_two_ranks)["peak_memory_bytes"].measured is None


def test_the_memory_of_one_rank_stands_beside_its_prediction(running, report):
    report(
        ("metric", {"source": "job", "values": {"peak_memory_bytes": 8e8}, "step": 40}),
        ("metric", {"source": "host", "values": {"rss_bytes": 9e8}}),
    )

    memory = next(one for one in draw(running) if one.chart.key == "memory")

    assert memory.prediction.value == 800e6
    assert memory.words.startswith("Peak memory 763\u00a0MiB so far, equal to the predicted")
    assert "Host memory, highest sample 858\u00a0MiB so far." in memory.words


@pytest.mark.parametrize(
    ("objective", "unit"), [("classification", "nats per text"), ("language", "nats per token")]
)
def test_the_loss_is_one_of_what_the_training_learns(running, objective, unit):
    running.spec = {**running.spec, "objective": objective}

    loss = next(one for one in draw(running) if one.chart.key == "loss")

    assert (loss.chart.unit, loss.chart.axis) == (unit, unit)


def test_the_time_axis_of_a_finished_job_ends_with_it(finished):
    start, end = span_ms(finished)

    assert end == int(finished.ended_at.timestamp() * 1000)
    assert start <= end


def test_the_time_axis_of_a_running_job_reaches_to_its_expected_end(running):
    running.eta_seconds = 600
    before = span_ms(running)[1]
    running.eta_seconds = 0

    assert before - span_ms(running)[1] == pytest.approx(600_000, abs=5000)


def test_the_time_axis_begins_with_the_first_point(running):
    series = [one.series for one in draw(running)]

    assert span_ms(running, series)[0] == min(s.t_ms[0] for s in series if s.t_ms)


def test_a_job_that_never_ran_has_a_span(draft):
    draft.created_at = now() - timedelta(seconds=10)

    assert span_ms(draft)[1] > span_ms(draft)[0]


def test_a_job_without_attempt_has_no_charts(draft):
    assert draw(draft) == []


def test_the_table_of_a_chart_has_a_readable_number_of_rows(attempt, report):
    for step in range(300):
        report(("metric", {"source": "job", "values": {"loss": 8.0 - step / 100}, "step": step}))

    loss = next(one for one in draw(attempt.job) if one.chart.key == "loss")

    assert 20 <= len(loss.rows) <= 50


def test_the_rows_of_the_table_begin_at_the_jobs_start(running):
    speed = next(one for one in draw(running) if one.chart.key == "tokens_per_second")

    assert speed.rows[0] == ("0:00", "3\u202f000\u00a0tok/s")


def test_the_metrics_tab_draws_what_no_other_tab_does(running, report):
    report(("metric", {"source": "job", "values": {"learning_rate": 3e-4}, "step": 9}))

    keys = [one.chart.key for one in draw(running, is_complete=True)]

    assert "learning_rate" in keys
    assert "learning_rate" not in [one.chart.key for one in draw(running)]


def test_a_metric_with_a_hostile_name_is_drawn_as_text(as_alice, running, report):
    name = "<script>alert(1)</script>"
    report(("metric", {"source": "job", "values": {name: 1.0}, "step": 9}))

    assert name not in as_alice.get(f"/jobs/{running.pk}/metrics/").content.decode()
