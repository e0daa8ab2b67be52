"""The curves of a job that was tried again run on from what its first attempt measured."""

from itertools import pairwise

import pytest

from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, claim, new_attempt
from webapp.compare.charts import overlays
from webapp.compare.comparison import sides_of
from webapp.jobs.ingest import events_accept
from webapp.jobs.measured_figures import figures_of
from webapp.jobs.models import Job
from webapp.jobs.plots import Drawn, draw
from webapp.jobs.points import BREAK_MS

pytestmark = pytest.mark.django_db(databases="__all__")
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
    assert loss.words == "No points yet. In front of it attempt 1, without the wait in between."
    assert figures_of(interrupted).get("final_loss") is None


def test_the_curve_runs_on_after_a_retry_with_a_gap_and_without_the_hour_between(continued):
    loss = loss_of(continued)
    x = loss.figure["data"][-1]["x"]

    assert line_of(loss) == [8.0, 7.0, 6.0, None, 5.0, 4.0]
    assert [b - a for a, b in pairwise(x)] == [
        1000, 1000, BREAK_MS // 2, BREAK_MS // 2, 1000
    ]  # fmt: skip
    assert loss.words.endswith("In front of it attempt 1, without the wait in between.")
    assert loss.words.startswith("Loss at the last step 4.00\u00a0nats per token")
    assert next(value for _, value in loss.rows).startswith("8")


def test_the_first_attempt_alone_says_nothing_of_others(attempt):
    points(attempt, [8.0, 7.0])

    loss = loss_of(Job.objects.get(pk=attempt.job_id))

    assert line_of(loss) == [8.0, 7.0]
    assert "attempt" not in loss.words


def test_what_is_measured_so_far_is_the_current_attempts_own(continued):
    loss = loss_of(continued)

    assert loss.series.known == (5.0, 4.0)
    assert loss.line.known == (8.0, 7.0, 6.0, 5.0, 4.0)


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


def test_the_page_draws_both_attempts(as_alice, continued):
    page = as_alice.get(f"/jobs/{continued.pk}/").content.decode()

    assert "In front of it attempt 1" in page
    assert '"y": [8.0, 7.0, 6.0, null, 5.0, 4.0]' in page


def test_compared_jobs_are_drawn_with_their_earlier_attempts(continued):
    (loss,) = overlays(sides_of([continued, continued]), [draw(continued)] * 2)[:1]

    assert loss.chart.key == "loss"
    assert [trace["y"] for trace in loss.figure["data"]] == [[8.0, 7.0, 6.0, None, 5.0, 4.0]] * 2
    assert "loss at the last step 4.00\u00a0nats per token" in loss.words
