"""The first minutes of a live job: its phases as steps, and no axes without a point."""

from collections.abc import Sequence
from datetime import timedelta

import pytest

from tests.webapp.conftest import STARTED, client_of, make_job, new_attempt
from webapp.core.clock import now, now_ms
from webapp.jobs.models import Attempt, AttemptEvent, Job, JobState
from webapp.jobs.progress import SERVING_PHASE
from webapp.jobs.startup import startup_of

pytestmark = pytest.mark.django_db(databases="__all__")
EARLIER = (("Loading libraries", 20), ("Preparing tokens", 30), ("Training", 120), ("Saving", 4))


def earlier_attempt(job: Job, phases: Sequence[tuple[str, int]] = EARLIER) -> Attempt:
    """Store a successful attempt of the job's kind on its host, with its phases."""
    ended = now() - timedelta(hours=1)
    twin = make_job(job.team, job.owner, job.host)
    Job.objects.filter(pk=twin.pk).update(state=JobState.SUCCEEDED, kind=job.kind)
    attempt = new_attempt(twin)
    Attempt.objects.filter(pk=attempt.pk).update(ended_at=ended)
    at = int(ended.timestamp() * 1000) - 1000 * sum(seconds for _, seconds in phases)
    for seq, (name, seconds) in enumerate(phases, 1):
        AttemptEvent.objects.create(
            attempt=attempt, seq=seq, t_ms=at, kind="phase", body={"name": name}
        )
        at += 1000 * seconds
    return attempt


def page_of(alice, job) -> str:
    return client_of(alice).get(f"/jobs/{job.pk}/").content.decode().replace("\xa0", " ")


def test_the_start_is_steps_with_what_is_usual_until_the_work_begins(alice, report, attempt):
    earlier_attempt(attempt.job)
    report(("started", STARTED), ("phase", {"name": "Loading libraries"}))
    AttemptEvent.objects.filter(attempt=attempt, kind="phase").update(t_ms=now_ms() - 69_000)
    report(("phase", {"name": "Preparing tokens"}))
    AttemptEvent.objects.filter(attempt=attempt, seq=3).update(t_ms=now_ms() - 5_000)
    job = Job.objects.get(pk=attempt.job_id)

    start = startup_of(job)

    assert [(each.name, each.status) for each in start.steps] == [
        ("Loading libraries", "done"), ("Preparing tokens", "now"),
    ]  # fmt: skip
    assert start.steps[1].usual_seconds == 30
    assert start.seconds_left == pytest.approx(25, abs=2)
    page = page_of(alice, job)
    assert "1 min 4 s" in page
    assert "usually 30 s here" in page
    assert "The first point comes after these, in about " in page

    report(("phase", {"name": "Training"}))
    assert startup_of(Job.objects.get(pk=job.pk)) is None


def test_without_an_earlier_job_the_steps_have_no_usual_time(alice, report, attempt):
    report(("started", STARTED), ("phase", {"name": "Loading libraries"}))
    start = startup_of(Job.objects.get(pk=attempt.job_id))
    assert [each.usual_seconds for each in start.steps] == [None]
    assert start.seconds_left is None
    report(("progress", {"done": 1.0, "total": 9.0, "unit": "steps", "eta_seconds": 9.0}))
    assert startup_of(Job.objects.get(pk=attempt.job_id)) is None


def test_an_endpoint_has_started_when_it_takes_requests_and_a_stopped_one_says_what_is_usual(
    report, attempt
):
    Job.objects.filter(pk=attempt.job_id).update(kind="serve")
    attempt.job.refresh_from_db()
    report(("started", STARTED), ("phase", {"name": "Loading weights"}))
    assert startup_of(Job.objects.get(pk=attempt.job_id)).seconds_left is None
    report(("phase", {"name": SERVING_PHASE}))
    assert startup_of(Job.objects.get(pk=attempt.job_id)) is None
    report(("phase", {"name": "Draining"}))
    assert startup_of(Job.objects.get(pk=attempt.job_id)) is None

    twin = earlier_attempt(attempt.job, (("Loading weights", 300), (SERVING_PHASE, 20)))
    Job.objects.filter(pk=twin.job_id).update(state=JobState.STOPPED)
    unserved = earlier_attempt(attempt.job, (("Loading weights", 900),))
    Job.objects.filter(pk=unserved.job_id).update(state=JobState.STOPPED)
    AttemptEvent.objects.filter(attempt=attempt, kind="phase").exclude(
        body__name="Loading weights"
    ).delete()
    AttemptEvent.objects.filter(attempt=attempt, kind="phase").update(t_ms=now_ms())
    Job.objects.filter(pk=attempt.job_id).update(phase="Loading weights")
    start = startup_of(Job.objects.get(pk=attempt.job_id))
    assert [each.usual_seconds for each in start.steps] == [300]
    assert start.seconds_left == pytest.approx(300, abs=5)


def test_a_chart_without_a_point_has_no_axes_but_its_prediction_without_a_time(
    alice, report, attempt
):
    report(("started", STARTED))
    page = page_of(alice, attempt.job)
    loss = page.split('data-chart="loss"')[1].split("<figcaption")[0]
    assert "The first point appears here" in loss
    assert "<svg" not in loss
    assert "No points." in page

    for value, is_line in ((8.0, False), (7.0, True)):  # a single value is a figure
        report(("metric", {"source": "job", "values": {"loss": value}, "step": 1}))
        loss = page_of(alice, attempt.job).split('data-chart="loss"')[1].split("<figcaption")[0]
        assert ("<svg" in loss) == is_line
        assert ("one value so far" in loss) != is_line
    speed = page_of(alice, attempt.job).split('data-chart="tokens_per_second"')[1]
    assert "0:00" not in speed.split("<figcaption")[0]
