"""What a job's pages say of it: timeline, progress, figures beside their predictions."""

from datetime import timedelta

import pytest
from django.utils import timezone

from webapp.core.clock import now
from webapp.core.units import NBSP
from webapp.jobs import figures
from webapp.jobs.figures import Prediction
from webapp.jobs.models import Event, Job, JobState, Measurement

SAID = {"value": 3000.0, "low": 2700.0, "high": 3400.0, "unit": "tokens_per_second"}


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

    shown = figures.progress(job)

    assert (shown.share, shown.words) == (pytest.approx(share), words)


@pytest.mark.parametrize(("done", "total"), [(None, None), (None, 5.0), (5.0, None), (5.0, 0.0)])
def test_progress_that_is_not_known_is_no_share(done, total):
    shown = figures.progress(job_of(progress_done=done, progress_total=total))

    assert (shown.share, shown.percent, shown.words) == (None, "", "")


@pytest.mark.parametrize(
    ("share", "percent"), [(0.999, "99 %"), (1.0, "100 %"), (0.0, "0 %"), (0.005, "0 %")]
)
def test_progress_says_a_hundred_per_cent_only_at_the_end(share, percent):
    shown = figures.progress(job_of(progress_done=share * 1000, progress_total=1000.0))

    assert shown.percent == percent


@pytest.mark.parametrize(
    ("state", "has_rest"), [("running", True), ("stopping", False), ("succeeded", False)]
)
def test_only_a_running_job_says_what_is_left(state, has_rest):
    shown = figures.progress(job_of(state, eta_seconds=780.0))

    assert ("about 13 min left" in shown.words) == has_rest


def test_the_phase_stands_first_while_the_job_lives():
    fields = {"phase": "Evaluating", "progress_done": 1.0, "progress_total": 2.0}

    assert figures.progress(job_of(**fields)).words.startswith("Evaluating · 1 of 2")
    assert "Evaluating" not in figures.progress(job_of("succeeded", **fields)).words


# The timeline


def looks(job: Job, *states: str) -> list[str]:
    return [stop.look for stop in figures.timeline(job, [event(state) for state in states])]


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
    stops = figures.timeline(job_of("stopping"), [event("running"), event("stopping")])

    assert [stop.label for stop in stops][-2:] == ["Stopping", "Done"]


def test_the_present_state_says_since_when():
    stops = figures.timeline(job_of("running"), [event("running", 125)])

    assert stops[3].note == "2 min 5 s"


def test_a_job_that_came_back_to_the_queue_is_not_past_its_preflight():
    stops = figures.timeline(job_of("queued"), [event("preflight"), event("queued")])

    assert [stop.look for stop in stops][:2] == ["now", ""]


@pytest.mark.parametrize("days", [1.5, 40])
def test_an_end_that_is_not_today_names_its_day(days):
    end = now() + timedelta(days=days)

    last = figures.timeline(job_of(eta_seconds=days * 86_400), [])[-1]

    assert last.note.startswith("about ")
    assert f"{end:%b}" in last.note


def test_an_end_within_hours_names_the_time_alone():
    last = figures.timeline(job_of(eta_seconds=600.0), [])[-1]

    assert len(last.note.removeprefix("about ")) == 5


def test_the_expected_end_is_said_in_the_servers_time_zone():
    with timezone.override("Asia/Tokyo"):
        last = figures.timeline(job_of(eta_seconds=60.0), [])[-1]
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

    assert figures.elapsed_seconds(job_of(started_at=ago(started), ended_at=ago(ended))) == seconds


# Predicted beside measured


def test_a_measured_figure_keeps_its_prediction_in_words():
    figure = figures.figure_of("tokens_per_second", 3150.0, Prediction(3000.0, 2700.0, 3400.0))

    assert (figure.provenance, str(figure.shown)) == ("measured", f"3\u202f150{NBSP}tok/s")
    assert figure.note == f"measured · predicted 3\u202f000{NBSP}tok/s"


def test_a_figure_that_was_only_predicted_says_so():
    figure = figures.figure_of("step_seconds", None, Prediction(0.5))

    assert (figure.provenance, figure.note) == ("modelled", "predicted")


def test_a_figure_that_was_only_measured_says_so():
    figure = figures.figure_of("perplexity", 61.5, None)

    assert (figure.provenance, figure.note) == ("measured", "measured here")


def test_a_figure_of_nothing_is_none():
    assert figures.figure_of("perplexity", None, None) is None


def test_an_unknown_metric_is_called_by_its_name():
    assert figures.figure_of("tokens_seen", 5.0, None).label == "Tokens seen"


@pytest.mark.parametrize(
    ("entry", "is_known"),
    [
        (SAID, True),
        ({"value": 3}, True),
        ({"value": "3"}, False),
        ({"value": None}, False),
        ({}, False),
        (3.0, False),
    ],
)
def test_a_prediction_without_a_number_is_none(entry, is_known):
    job = job_of(prediction={"tokens_per_second": entry})

    assert ("tokens_per_second" in figures.predictions(job)) == is_known


@pytest.mark.parametrize(
    ("latest", "result", "final", "measured"),
    [
        (1.0, None, None, 1.0),
        (1.0, 2.0, None, 2.0),
        (1.0, 2.0, 3.0, 3.0),
        (None, None, None, None),
    ],
)
def test_the_final_figure_counts_before_the_result_and_that_before_the_points(
    latest, result, final, measured
):
    name = "tokens_per_second"
    job = job_of(prediction={name: SAID}, result={"measured": {name: result}} if result else {})
    rows = [row(name, 1.0, final)] if final else []

    (shown,) = figures.compared(job, rows, {name: latest} if latest else {})

    assert shown.measured == measured


def test_a_plans_messages_are_held_to_those_that_nothing_hides():
    planned = {"value": 0.1, "low": None, "high": None, "unit": "share"}
    said = figures.predictions(job_of(prediction={"exposed_communication_ratio": planned}))
    job = job_of(
        prediction={"exposed_communication_ratio": planned},
        result={
            "measured": {"communication_ratio": 0.5, "exposed_communication_ratio": 0.2},
            "notes": {"exposed_communication_ratio": "a thread waited, by torch's profiler"},
        },
    )

    total, exposed = figures.compared(job, [], {})

    assert said.keys() == {"exposed_communication_ratio"}
    assert (total.measured, total.predicted, total.ratio) == (0.5, None, None)
    assert (exposed.measured, exposed.predicted, exposed.ratio) == (0.2, 0.1, 2.0)
    assert exposed.how == "a thread waited, by torch's profiler"
    assert exposed.figure.note == f"measured · predicted 10.0{NBSP}%"


def test_figures_stand_in_a_fixed_order():
    job = job_of(
        prediction={"peak_memory_bytes": SAID, "tokens_per_second": SAID},
        result={"measured": {"perplexity": 40.0, "disk_bytes": 5.0}},
    )

    names = [shown.metric for shown in figures.compared(job, [], {})]

    assert names == ["tokens_per_second", "peak_memory_bytes", "disk_bytes", "perplexity"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([3000.0], "Every measured figure lies inside its 80 % interval."),
        ([3000.0, 9000.0], "1 of 2 measured figures lie inside their 80 % interval."),
        ([1.0, 9000.0], "0 of 2 measured figures lie inside their 80 % interval."),
        ([2700.0, 3400.0], "Every measured figure lies inside its 80 % interval."),
        ([None], ""),
        ([], ""),
    ],
)
def test_the_answer_counts_what_lies_inside_its_interval(values, words):
    said = Prediction(3000.0, 2700.0, 3400.0)
    rows = [
        figures.Compared("x", figures.figure_of("x", value, said), 1.0, value, None)
        for value in values
    ]

    assert figures.answer(rows) == words


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
    assert figures.main_ratio(row(name, value) for name, value in metrics.items()) == ratio


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (100.0, 50.0, "\u221250 %"),
        (100.0, 103.0, "+3.0 %"),
        (100.0, 97.0, "\u22123.0 %"),
        (100.0, 250.0, "+150 %"),
        (100.0, 109.94, "+9.9 %"),
    ],
)
def test_a_change_is_said_in_per_cent_with_a_real_minus(before, after, words):
    job = job_of(result={"measured": {"original_disk_bytes": before, "disk_bytes": after}})

    assert figures.before_after(job)[0].words == words


@pytest.mark.parametrize("state", JobState.values)
def test_every_state_has_a_timeline_with_an_end(state):
    stops = figures.timeline(job_of(state), [])

    assert stops[0].label == "Queued"
    assert stops[-1].label
