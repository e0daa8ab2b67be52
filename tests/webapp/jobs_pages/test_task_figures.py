"""Metrics of tasks as a job's page shows them, beside the original's, and in a comparison."""

import pytest

from tests.webapp.conftest import client_of, make_job
from webapp.jobs.measured_figures import metrics_of, task_rows
from webapp.jobs.models import Job, JobState

MEASURED = {
    "perplexity": 60.0,
    "capitals/acc": 0.625,
    "capitals/acc_stderr": 0.0321,
    "original_capitals/acc": 0.75,
    "original_capitals/acc_stderr": 0.03,
    "capitals/acc_difference": -0.125,
    "capitals/acc_difference_low": -0.2,
    "capitals/acc_difference_high": -0.05,
    "capitals/f1": 0.5,
}
NOTES = {
    "capitals/acc": "200 documents; standard error over documents; higher is better",
    "capitals/acc_difference": "worse than the original beyond chance: -0.2 to -0.05; pairs",
    "tasks": "lm-evaluation-harness 0.4.13; long texts lose their beginning.",
}
RESULT = {"measured": MEASURED, "notes": NOTES}


def test_a_metric_has_its_error_its_original_and_whether_the_change_is_one():
    accuracy, f1 = task_rows(Job(kind="evaluate", spec={}, result=RESULT))

    assert (accuracy.task, accuracy.metric) == ("capitals", "acc")
    assert (accuracy.value, accuracy.before) == ("0.6250 ± 0.032", "0.7500 ± 0.030")
    assert accuracy.verdict == "worse than the original beyond chance"
    assert "95 % interval" in accuracy.change
    assert (f1.value, f1.before, f1.change) == ("0.5000", "", "")


def test_only_whole_metrics_count_as_one():
    assert list(metrics_of(MEASURED)) == ["capitals/acc", "capitals/f1"]
    assert list(metrics_of({"original_x/acc": 1.0})) == ["original_x/acc"]
    assert list(metrics_of({"/acc": 1.0, "capitals/": 1.0, "perplexity": 1.0})) == []


@pytest.mark.django_db(databases="__all__")
def test_the_page_shows_the_tasks_and_what_ran_them(team, alice, host):
    job = make_job(team, alice, host)
    Job.objects.filter(pk=job.pk).update(
        kind="evaluate", state=JobState.SUCCEEDED, reason="ok", result=RESULT
    )

    page = client_of(alice).get(f"/jobs/{job.pk}/").content.decode()

    assert "0.6250 ± 0.032" in page
    assert "worse than the original beyond chance" in page
    assert "lm-evaluation-harness 0.4.13" in page
