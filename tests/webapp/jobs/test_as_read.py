"""What a training's rows turned out to be: the plan for them, and what they say of the host."""

import math

import pytest

from runners.jobspec import FileData, FolderModel, SampleOptions, TrainSpec
from tests.webapp.conftest import client_of
from tests.webapp.jobs.test_finish import finish, submitted
from webapp.jobs.calibration import (
    RowsRead,
    as_read,
    attributed_measurements,
    questions_of,
    recalibrate,
    rows_read,
)
from webapp.jobs.models import Job, Measurement

pytestmark = pytest.mark.django_db(databases="__all__")
PADDED = TrainSpec(data=FileData(path="chats.jsonl"), samples=SampleOptions(rows="padded"))
PACKED = PADDED.model_copy(update={"samples": SampleOptions(rows="packed")})
ROWS = PADDED.micro_batch_size * PADDED.gradient_accumulation_steps
# 10 steps of rows of 64 positions, of which 16 are padding
MEASURED = {"step_seconds": 2.0, "peak_memory_bytes": 1.5e9, "parameters": 7e6, "steps": 10.0}
MEASURED |= {"tokens": 10.0 * ROWS * 48, "padding_share": 0.25, "tokens_per_second": 500.0}
ODD_STEPS = {"steps": 0.0}


@pytest.fixture
def ended(team, alice, host, django_capture_on_commit_callbacks):
    """A training on a file that has ended, by its spec and what it measured."""

    def end(spec: TrainSpec, **changes: float) -> Job:
        job = submitted(team, alice, host, spec=spec)
        with django_capture_on_commit_callbacks(execute=True):
            finish(job, MEASURED | changes)
        return Job.objects.get(pk=job.pk)

    return end


def ratio_of(learned) -> float:
    return learned.measurement.measured / learned.measurement.predicted


def test_rows_are_what_the_steps_read_on_the_average():
    assert rows_read(PADDED, MEASURED) == RowsRead(64, 0.25)
    assert rows_read(PADDED, MEASURED | {"padding_share": 0.0}) == RowsRead(48, 0.0)
    assert rows_read(TrainSpec(), MEASURED) is None  # of the host's own text every row is full
    classifier = TrainSpec(model=FolderModel(path="bert"), objective="classification")
    assert rows_read(classifier, MEASURED) == RowsRead(64, 0.25)
    growing = PADDED.model_copy(update={"length_schedule": ((64, 0.5), (256, 0.5))})
    assert rows_read(growing, MEASURED) is None
    for odd in (ODD_STEPS, {"padding_share": 1.0}, {"padding_share": math.nan}, {"tokens": 0.0}):
        assert rows_read(PADDED, MEASURED | odd) is None


def test_a_training_on_padded_rows_calibrates_its_host_by_the_rows_it_read(ended, host):
    job = ended(PADDED)
    (question,) = questions_of(job)
    assert question.request.workload.sequence_length == 64
    assert question.request.workload.padding_ratio == 0.25
    assert "peak_memory_bytes" not in question.metrics  # the longest row's, and nobody knows it

    (slow,) = attributed_measurements(job, host)
    longer = MEASURED | {"tokens": 10.0 * ROWS * 192}
    Job.objects.update(result={"measured": longer})
    (less,) = attributed_measurements(Job.objects.get(pk=job.pk), host)

    assert ratio_of(slow) > 1  # 2 s are long for rows of 64 positions
    assert ratio_of(less) < ratio_of(slow)  # and less so for rows of 256


def test_packed_rows_calibrate_memory_too(ended, host):
    full = ended(PACKED, tokens=10.0 * ROWS * 256 * 0.99, padding_share=0.01)

    (question,) = questions_of(full)

    assert question.request.workload.sequence_length == 256
    assert "memory" in recalibrate(host).factors
    assert as_read(full) == ""  # as good as the plan's


def test_a_job_that_does_not_say_what_it_read_calibrates_nothing(ended, host):
    job = ended(PADDED)
    for lacking in ("steps", "tokens", "padding_share"):
        measured = {name: value for name, value in MEASURED.items() if name != lacking}
        Job.objects.filter(pk=job.pk).update(result={"measured": measured})
        job.refresh_from_db()
        assert list(questions_of(job)) == []
        assert as_read(job) == ""
    assert recalibrate(host).factors == {}


def test_the_page_says_what_the_plan_is_for_such_rows(ended, alice):
    job = ended(PADDED)
    predicted = Measurement.objects.get(job=job, metric="step_seconds").predicted

    page = client_of(alice).get(f"/jobs/{job.pk}/").content.decode()

    said = as_read(job)
    assert said.startswith(
        "The plan takes every row for 256 tokens of text; those of this data had 64 positions on "
        "the average, 25\N{NO-BREAK SPACE}% of them padding. For such rows it says "
    )
    assert " a step (" in said
    assert said in page
    assert predicted == 1.0  # what was launched with stays as it was


@pytest.mark.parametrize(
    "changes",
    [
        {"estimate": {"strategy": {"tensor_parallel_size": 4096}}},
        {"estimate": {"strategy": {"of_an_older_version": 1}}},
        {"plan_request": {"of_an_older_version": 1}},
    ],
)
def test_a_plan_that_cannot_be_asked_again_says_nothing_and_the_page_stands(ended, alice, changes):
    job = ended(PADDED)
    Job.objects.filter(pk=job.pk).update(**changes)
    job.refresh_from_db()

    assert as_read(job) == ""
    assert client_of(alice).get(f"/jobs/{job.pk}/").status_code == 200
