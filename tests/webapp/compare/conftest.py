"""Two trainings that were launched with different settings and measured what they did."""

import pytest

from runners.jobspec import TrainSpec
from tests.webapp.conftest import make_job
from tests.webapp.jobs.test_memory_terms import tell
from tests.webapp.jobs_pages.conftest import PREDICTION
from webapp.jobs.models import Attempt, Job
from webapp.jobs.services import job_submit

GIB = 2**30


@pytest.fixture
def make_run(team, alice, host):
    """Return a maker of ended trainings: name, speed, batch size."""

    def make(name: str, speed: float, batch: int, points: int = 5, **changes) -> Job:
        fields = {"spec": TrainSpec(micro_batch_size=batch), "name": name} | changes
        job = job_submit(
            job=make_job(team, alice, host, prediction=PREDICTION, **fields), by="alice"
        )
        attempt = Attempt.objects.get(pk=job.current_attempt_id)
        losses = [{"loss": 8.0 - at, "tokens_per_second": speed + at} for at in range(points)]
        tell(attempt, "job", *losses)
        tell(attempt, "host", *({"rss_bytes": (1 + at) * GIB} for at in range(points)))
        attempt.allocations.all().delete()
        measured = {"tokens_per_second": speed, "peak_memory_bytes": 5.0 * GIB}
        Job.objects.filter(pk=job.pk).update(state="succeeded", result={"measured": measured})
        return Job.objects.get(pk=job.pk)

    return make


@pytest.fixture
def slow(make_run) -> Job:
    return make_run("Small batch", 2000.0, 4)


@pytest.fixture
def fast(make_run) -> Job:
    return make_run("Large batch", 3000.0, 16)
