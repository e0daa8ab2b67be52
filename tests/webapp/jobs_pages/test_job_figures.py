"""What a job's pages say of it: timeline, progress, figures beside their predictions."""

from datetime import timedelta

import pytest
from django.utils import timezone

from webapp.core.clock import now
from webapp.jobs import progress
from webapp.jobs.models import Event, Job, JobState, Measurement


def job_of(state="running", **fields) -> Job:
    return Job(name="one", kind="train", state=state, spec={}, created_at=now(), **fields)


def row(metric: str, ratio: float, measured: float = 1.0) -> Measurement:
    return Measurement(metric=metric, ratio=ratio, measured=measured, predicted=1.0)


def event(to_state: str, seconds_ago: float = 0.0) -> Event:
    return Event(kind="job.state", to_state=to_state, at=now() - timedelta(seconds=seconds_ago))


# Progress


@pytest.mark.parametrize(
    ("done", "total", "unit", "share", "words"),
    [
        (40.0, 120.0, "steps", 1 / 3, "40 of 120 steps"),
        (0.0, 120.0, "steps", 0.0, "0 of 120 steps"),
        (130.0, 120.0, "steps", 1.0, "130 of 120 steps"),
        (65.0, 120.0, "seconds", 65 / 120, "1 min 5 s of 2 min"),
        (1.0, 4.0, "", 0.25, "1 of 4 steps"),
        (3.0, 4.0, "layers", 0.75, "3 of 4 layers"),
    ],
)
def test_progress_is_a_share_and_its_words(done, total, unit, share, words):
    job = job_of(progress_done=done, progress_total=total, progress_unit=unit)

    shown = progress.progress(job)

    assert (shown.share, shown.words) == (pytest.approx(share), words)


@pytest.mark.parametrize(("done", "total"), [(None, None), (None, 5.0), (5.0, None), (5.0, 0.0)])
def test_progress_that_is_not_known_is_no_share(done, total):
    shown = progress.progress(job_of(progress_done=done, progress_total=total))

    assert (shown.share, shown.percent, shown.words) == (None, "", "")


@pytest.mark.parametrize(
    ("share", "percent"), [(0.999, "99 %"), (1.0, "100 %"), (0.0, "0 %"), (0.005, "0 %")]
)
def test_progress_says_a_hundred_per_cent_only_at_the_end(share, percent):
    shown = progress.progress(job_of(progress_done=share * 1000, progress_total=1000.0))

    assert shown.percent == percent


@pytest.mark.parametrize(
    ("state", "has_rest"), [("running", True), ("stopping", False), ("succeeded", False)]
)
def test_only_a_running_job_says_what_is_left(state, has_rest):
    shown = progress.progress(job_of(state, eta_seconds=780.0))

    assert ("about 13 min left" in shown.words) == has_rest


def test_the_phase_stands_first_while_the_job_lives():
    fields = {"phase": "Evaluating", "progress_done": 1.0, "progress_total": 2.0}

    assert progress.progress(job_of(**fields)).words.startswith("Evaluating · 1 of 2")
    assert "Evaluating" not in progress.progress(job_of("succeeded", **fields)).words


# The timeline


def looks(job: Job, *states: str) -> list[str]:
    return [stop.look for stop in progress.timeline(job, [event(state) for state in states])]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("queued", ["now", "", "", "", ""]),
        ("preflight", ["done", "now", "", "", ""]),
        ("starting", ["done", "done", "now", "", ""]),
        ("running", ["done", "done", "done", "now", ""]),
    ],
)
def test_what_is_past_is_done_and_what_is_now_is_marked(state, expected):
    way = ["queued", "preflight", "starting", "running"]

    assert looks(job_of(state), *way[: way.index(state) + 1]) == expected


@pytest.mark.parametrize(
    ("state", "look"),
    [("succeeded", "done"), ("stopped", "done"), ("failed", "bad"), ("error", "bad")],
)
def test_the_end_is_bad_only_where_something_went_wrong(state, look):
    assert looks(job_of(state), "queued", "running")[-1] == look


def test_a_job_that_ended_before_it_ran_leaves_its_stops_open():
    assert looks(job_of("stopped"), "queued") == ["done", "", "", "", "done"]


def test_a_stopping_job_has_a_stop_of_its_own():
    stops = progress.timeline(job_of("stopping"), [event("running"), event("stopping")])

    assert [stop.label for stop in stops][-2:] == ["Stopping", "Done"]


def test_the_present_state_says_since_when():
    stops = progress.timeline(job_of("running"), [event("running", 125)])

    assert stops[3].note == "2 min 5 s"


def test_a_job_that_came_back_to_the_queue_is_not_past_its_preflight():
    stops = progress.timeline(job_of("queued"), [event("preflight"), event("queued")])

    assert [stop.look for stop in stops][:2] == ["now", ""]


@pytest.mark.parametrize("days", [1.5, 40])
def test_an_end_that_is_not_today_names_its_day(days):
    end = now() + timedelta(days=days)

    last = progress.timeline(job_of(eta_seconds=days * 86_400), [])[-1]

    assert last.note.startswith("about ")
    assert f"{end:%b}" in last.note


def test_an_end_within_hours_names_the_time_alone():
    last = progress.timeline(job_of(eta_seconds=600.0), [])[-1]

    assert len(last.note.removeprefix("about ")) == 5


def test_the_expected_end_is_said_in_the_servers_time_zone():
    with timezone.override("Asia/Tokyo"):
        last = progress.timeline(job_of(eta_seconds=60.0), [])[-1]
        expected = timezone.localtime(now() + timedelta(seconds=60))

    assert last.note in {
        f"about {expected:%H:%M}",
        f"about {expected - timedelta(minutes=1):%H:%M}",
    }


@pytest.mark.parametrize(
    ("started", "ended", "seconds"), [(None, None, 0), (100, 40, 60), (100, 100, 0)]
)
def test_how_long_a_job_ran_is_between_its_start_and_its_end(started, ended, seconds):
    def ago(value):
        return None if value is None else at - timedelta(seconds=value)

    at = now()

    assert (
        progress.elapsed_seconds(job_of(started_at=ago(started), ended_at=ago(ended))) == seconds
    )


@pytest.mark.parametrize(
    ("metrics", "ratio"),
    [
        ({"peak_memory_bytes": 0.5, "tokens_per_second": 0.9}, 0.9),
        ({"step_seconds": 1.2, "peak_memory_bytes": 0.5}, 1.2),
        ({"peak_memory_bytes": 0.5}, 0.5),
        ({"ttft_seconds": 3.0}, None),
        ({}, None),
    ],
)
def test_one_ratio_stands_for_the_whole_job(metrics, ratio):
    assert progress.main_ratio(row(name, value) for name, value in metrics.items()) == ratio


@pytest.mark.parametrize("state", JobState.values)
def test_every_state_has_a_timeline_with_an_end(state):
    stops = progress.timeline(job_of(state), [])

    assert stops[0].label == "Queued"
    assert stops[-1].label
