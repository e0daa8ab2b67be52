"""Charts of a job from what is stored: gaps, diverged losses, spans, earlier attempts."""

import json
import math
import re
from datetime import timedelta
from itertools import pairwise

import numpy as np
import pytest

from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, claim, new_attempt
from webapp.agents.ingest import events_accept
from webapp.charts.plots import SECTIONS
from webapp.core.clock import now
from webapp.jobs.comparing import sides_of
from webapp.jobs.job_charts import Drawn, draw, span_ms
from webapp.jobs.measured_figures import figures_of
from webapp.jobs.models import Job
from webapp.jobs.overlay_charts import overlays
from webapp.jobs.points import BREAK_MS, GAP_MS, series_of
from webapp.metrics.store import Series as Stored
from webapp.operations.ticker import seal_due

pytestmark = pytest.mark.django_db(databases="__all__")
NAN = math.nan


def stored(values, step_ms=1000, times=None) -> Stored:
    t_ms = np.array(times or [n * step_ms for n in range(len(values))], np.int64)
    value = np.array(values, np.float64)
    return Stored("job", "loss", t_ms, value, value, value)


def test_what_is_no_number_is_not_drawn_and_a_long_silence_alone_lifts_the_pen():
    for values, kept in [
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
    ]:
        assert series_of(stored(values)).known == kept, (values, kept)

    series = series_of(stored([1.0, NAN, 2.0], times=[0, GAP_MS // 2, GAP_MS]))

    assert series.values == (1.0, None, 2.0)

    series = series_of(stored([1.0, NAN, 2.0], times=[0, GAP_MS // 4, GAP_MS // 2]))

    assert series.values == (1.0, 2.0)

    series = series_of(stored([1.0, NAN, 2.0, NAN], step_ms=1000))

    assert (series.t_ms, series.values) == ((0, 2000), (1.0, 2.0))


@pytest.fixture
def diverged(running, report) -> Job:
    """A training whose loss is no number from its last step on."""
    report(("metric", {"source": "job", "values": {"loss": NAN}, "step": 9}))
    return running


def test_a_diverged_job_has_its_pages_and_figures_that_browsers_read(as_alice, diverged):
    for tab in ["", "metrics/", "logs/", "events/", "config/", "artefacts/"]:
        assert as_alice.get(f"/jobs/{diverged.pk}/{tab}").status_code == 200, tab
    for one in draw(diverged, is_complete=True):
        assert json.dumps(one.figure, allow_nan=False)


def test_a_loss_that_was_never_a_number_has_a_chart_without_a_line(report, attempt):
    report(("metric", {"source": "job", "values": {"loss": NAN}, "step": 1}))
    loss = next(one for one in draw(attempt.job) if one.chart.key == "loss")
    assert loss.words.startswith("No points")


def test_the_latest_values_leave_out_what_is_no_number(attempt, report):
    Job.objects.filter(pk=attempt.job_id).update(
        prediction={"step_seconds": {"value": 1.0, "low": 0.5, "high": 2.0, "unit": "seconds"}}
    )
    report(("metric", {"source": "job", "values": {"step_seconds": NAN}, "step": 1}))
    job = Job.objects.get(pk=attempt.job_id)
    assert figures_of(job)["step_seconds"].measured is None


def test_the_speed_so_far_is_the_median_without_two_steps_and_its_rows_begin_at_the_start(running):
    assert figures_of(running)["tokens_per_second"].measured == 3003.0
    speed = next(one for one in draw(running) if one.chart.key == "tokens_per_second")
    assert speed.rows[0] == ("0:00", "3\u202f000\u00a0tok/s")


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


def test_the_loss_is_one_of_what_the_training_learns(running):
    for objective, unit in [("classification", "nats per text"), ("language", "nats per token")]:
        running.spec = {**running.spec, "objective": objective}
        loss = next(one for one in draw(running) if one.chart.key == "loss")
        assert (loss.chart.unit, loss.chart.axis) == (unit, unit), (objective, unit)


def test_the_time_axis_of_a_finished_job_ends_with_it(finished):
    start, end = span_ms(finished)
    assert end == int(finished.ended_at.timestamp() * 1000)
    assert start <= end


def test_the_time_axis_begins_with_the_first_point_and_reaches_to_the_expected_end(running):
    series = [one.series for one in draw(running)]
    assert span_ms(running, series)[0] == min(s.t_ms[0] for s in series if s.t_ms)
    running.eta_seconds = 600
    before = span_ms(running)[1]
    running.eta_seconds = 0
    assert before - span_ms(running)[1] == pytest.approx(600_000, abs=5000)


def test_a_job_without_attempt_has_a_span_and_no_charts(draft):
    assert draw(draft) == []
    draft.created_at = now() - timedelta(seconds=10)
    assert span_ms(draft)[1] > span_ms(draft)[0]


def test_the_table_of_a_chart_has_a_readable_number_of_rows(attempt, report):
    losses = [{"values": {"loss": 8.0 - step / 100}, "step": step} for step in range(300)]
    report(*(("metric", {"source": "job", **each}) for each in losses))
    loss = next(one for one in draw(attempt.job) if one.chart.key == "loss")
    assert 20 <= len(loss.rows) <= 50


def test_the_metrics_tab_draws_what_no_other_tab_does(running, report):
    report(("metric", {"source": "job", "values": {"learning_rate": 3e-4}, "step": 9}))
    keys = [one.chart.key for one in draw(running, is_complete=True)]
    assert "learning_rate" in keys
    assert "learning_rate" not in [one.chart.key for one in draw(running)]


def test_a_metric_with_a_hostile_name_is_drawn_as_text(as_alice, running, report):
    name = "<script>alert(1)</script>"
    report(("metric", {"source": "job", "values": {name: 1.0}, "step": 9}))
    assert name not in as_alice.get(f"/jobs/{running.pk}/metrics/").content.decode()


# The curves of a job that was tried again run on from what its first attempt measured.


HOUR_MS = 3_600_000


def points(attempt, losses, *, first=1, later_ms=0):
    """Report losses, one a second, as the host's clock has them."""
    events = [("metric", {"source": "job", "values": {"loss": loss}}) for loss in losses]
    batch = batch_of(attempt, ("started", STARTED), *events, first=first)
    moved = [event.model_copy(update={"t_ms": event.t_ms + later_ms}) for event in batch.events]
    events_accept(host=attempt.host, batch=batch.model_copy(update={"events": tuple(moved)}))


def loss_of(job: Job) -> Drawn:
    return next(one for one in draw(job) if one.chart.key == "loss")


def line_of(drawn: Drawn) -> list[float | None]:
    return drawn.figure["data"][-1]["y"]


@pytest.fixture
def interrupted(attempt) -> Job:
    """A job whose host was restarted in its third second, and which waits for its next try."""
    Job.objects.filter(pk=attempt.job_id).update(max_retries=2)
    points(attempt, [8.0, 7.0, 6.0])
    record = {**EXIT_OK, "exit_code": 1, "reason": "host_rebooted"}
    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", record), first=5))
    return Job.objects.get(pk=attempt.job_id)


@pytest.fixture
def continued(interrupted) -> Job:
    """The same job an hour later, two steps into its second attempt."""
    again = new_attempt(interrupted)
    Job.objects.filter(pk=interrupted.pk).update(state="preflight")
    claim(again)
    points(again, [5.0, 4.0], later_ms=HOUR_MS)
    return Job.objects.get(pk=interrupted.pk)


def test_a_job_that_waits_for_its_next_try_shows_what_the_last_one_measured(interrupted):
    loss = loss_of(interrupted)
    assert interrupted.current_attempt is None
    assert line_of(loss) == [8.0, 7.0, 6.0]
    assert loss.words == "No points. In front of it attempt 1, without the wait in between."
    assert figures_of(interrupted).get("final_loss") is None


def test_the_curve_runs_on_after_a_retry_with_a_gap_and_without_the_hour_between(
    continued, as_alice
):
    loss = loss_of(continued)
    x = loss.figure["data"][-1]["x"]

    assert line_of(loss) == [8.0, 7.0, 6.0, None, 5.0, 4.0]
    assert [b - a for a, b in pairwise(x)] == [
        1000, 1000, BREAK_MS // 2, BREAK_MS // 2, 1000
    ]  # fmt: skip
    assert loss.words.endswith("In front of it attempt 1, without the wait in between.")
    assert loss.words.startswith("Loss at the last step 4.00\u00a0nats per token")
    assert next(value for _, value in loss.rows).startswith("8")

    assert loss.series.known == (5.0, 4.0)
    assert loss.line.known == (8.0, 7.0, 6.0, 5.0, 4.0)

    page = as_alice.get(f"/jobs/{continued.pk}/").content.decode()

    assert "In front of it attempt 1" in page
    assert '"y": [8.0, 7.0, 6.0, null, 5.0, 4.0]' in page

    (loss,) = overlays(sides_of([continued, continued]), [draw(continued)] * 2)[:1]

    assert loss.chart.key == "loss"
    assert [trace["y"] for trace in loss.figure["data"]] == [[8.0, 7.0, 6.0, None, 5.0, 4.0]] * 2
    assert "loss at the last step 4.00\u00a0nats per token" in loss.words


def test_the_first_attempt_alone_says_nothing_of_others(attempt):
    points(attempt, [8.0, 7.0])
    loss = loss_of(Job.objects.get(pk=attempt.job_id))
    assert line_of(loss) == [8.0, 7.0]
    assert "attempt" not in loss.words


def test_three_attempts_stand_one_after_the_other(continued):
    third = new_attempt(continued)
    Job.objects.filter(pk=continued.pk).update(state="preflight", current_attempt=third)
    claim(third)
    points(third, [3.0], later_ms=5 * HOUR_MS)
    loss = loss_of(Job.objects.get(pk=continued.pk))
    assert line_of(loss) == [8.0, 7.0, 6.0, None, 5.0, 4.0, None, 3.0]
    assert "In front of it attempts 1, 2," in loss.words


def test_an_attempt_that_measured_nothing_leaves_no_gap(continued):
    third = new_attempt(continued)
    fourth = new_attempt(Job.objects.get(pk=continued.pk))
    Job.objects.filter(pk=continued.pk).update(state="preflight", current_attempt=fourth)
    claim(fourth)
    points(fourth, [3.0], later_ms=5 * HOUR_MS)

    loss = loss_of(Job.objects.get(pk=continued.pk))

    assert (third.number, fourth.number) == (3, 4)
    assert line_of(loss).count(None) == 2
    assert "attempts 1, 2," in loss.words


# A finished job keeps its points: the store's roll-ups are for long runs.


def test_a_short_run_is_still_drawn_point_by_point_after_it_was_rolled_up(as_alice, finished):
    assert seal_due() > 0
    page = as_alice.get(f"/jobs/{finished.pk}/").content.decode()
    figure = re.search(r'<script id="figure-loss" type="application/json">(.*?)</script>', page)
    assert json.loads(figure[1])["data"][-1]["y"] == [8.0, 7.0, 6.0, 5.0, 4.0]


def test_metrics_stand_in_sections_with_single_points_as_figures_and_steps_for_the_axis(
    as_alice, running, report
):
    report(("metric", {"source": "job", "values": {"checkpoint_seconds": 2.5}, "step": 4}))
    address = f"/jobs/{running.pk}/metrics/"
    live = as_alice.get(address)
    names = [section.name for section in live.context["sections"]]
    assert names == [name for name in SECTIONS if name in names]
    assert {"Quality", "Speed", "Memory", "Checkpoints", "System"} <= set(names)
    drawn = re.findall(r'data-chart="(\w+)"', live.content.decode())
    assert "step" not in drawn
    assert "checkpoint_seconds" in drawn  # more points may come
    steps = [step for _, step in live.context["steps"]]
    assert steps == [0.0, 1.0, 2.0, 3.0, 4.0, 4.0]
    assert "data-chart-tools hidden" in live.content.decode()  # until its script shows it

    report(("exited", EXIT_OK))
    over = as_alice.get(address)
    assert "checkpoint_seconds" not in re.findall(r'data-chart="(\w+)"', over.content.decode())
    (section,) = [each for each in over.context["sections"] if each.name == "Checkpoints"]
    assert [value.replace("\xa0", " ") for _, value in section.figures] == ["2.5 s"]
