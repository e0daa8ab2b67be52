"""What a job's pages say of it: timeline, progress, joules and money."""

import re
from datetime import timedelta

import pytest
from django.utils import timezone

from tests.webapp.conftest import client_of
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.display import NBSP, TIMES
from webapp.hosts.machines import price_of
from webapp.jobs.measured_figures import costs_of
from webapp.jobs.models import Job, JobState, Measurement
from webapp.jobs.progress import against_prediction, elapsed_seconds, progress, timeline


def job_of(state="running", **fields) -> Job:
    return Job(name="one", kind="train", state=state, spec={}, created_at=now(), **fields)


def row(metric: str, ratio: float, measured: float = 1.0) -> Measurement:
    return Measurement(metric=metric, ratio=ratio, measured=measured, predicted=1.0)


def event(to_state: str, seconds_ago: float = 0.0) -> Event:
    return Event(kind="job.state", to_state=to_state, at=now() - timedelta(seconds=seconds_ago))


# Progress


def test_progress_is_a_share_and_its_words_or_not_known():
    for done, total, unit, share, words in [
        (40.0, 120.0, "steps", 1 / 3, "40 of 120 steps"),
        (0.0, 120.0, "steps", 0.0, "0 of 120 steps"),
        (130.0, 120.0, "steps", 1.0, "130 of 120 steps"),
        (65.0, 120.0, "seconds", 65 / 120, "1 min 5 s of 2 min"),
        (1.0, 4.0, "", 0.25, "1 of 4 steps"),
        (3.0, 4.0, "layers", 0.75, "3 of 4 layers"),
        (36.0, 100.0, "percent", 0.36, ""),
    ]:
        job = job_of(progress_done=done, progress_total=total, progress_unit=unit)

        shown = progress(job)

        assert (shown.share, shown.words) == (pytest.approx(share), words), (
            done,
            total,
            unit,
            share,
            words,
        )

    for done, total in [(None, None), (None, 5.0), (5.0, None), (5.0, 0.0)]:
        shown = progress(job_of(progress_done=done, progress_total=total))

        assert (shown.share, shown.percent, shown.words) == (None, "", ""), (done, total)

    for share, percent in [(0.999, "99 %"), (1.0, "100 %"), (0.0, "0 %"), (0.005, "0 %")]:
        shown = progress(job_of(progress_done=share * 1000, progress_total=1000.0))

        assert shown.percent == percent, (share, percent)


def test_the_phase_and_what_is_left_are_said_while_the_job_lives():
    for state, has_rest in [("running", True), ("stopping", False), ("succeeded", False)]:
        shown = progress(job_of(state, eta_seconds=780.0))
        assert ("about 13 min left" in shown.words) == has_rest, (state, has_rest)
    fields = {"phase": "Evaluating", "progress_done": 1.0, "progress_total": 2.0}
    assert progress(job_of(**fields)).words.startswith("Evaluating · 1 of 2")
    assert "Evaluating" not in progress(job_of("succeeded", **fields)).words


@pytest.mark.django_db(databases="__all__")
def test_the_forecast_ages_from_its_report_on_and_never_slides(alice, attempt):
    made = {
        "phase": "Evaluating",
        "progress_done": 8.0,
        "progress_total": 9.0,
        "eta_seconds": 75.0,
    }
    for age, words, is_expected in [
        (0, "about 1 min 15 s left", True),
        (30, "about 45 s left", True),
        (70, "a few seconds left", True),
        (80, "a few seconds left", True),  # within what a forecast is wrong by
        (135, "1 min longer than expected", False),
    ]:
        at = now() - timedelta(seconds=age)
        job = job_of(progress_at=at, started_at=at - timedelta(hours=9), **made)
        reason = "" if is_expected else ": it has become slower since its last report"
        assert progress(job).words == f"Evaluating · 8 of 9 steps · {words}{reason}", age
        assert bool(timeline(job, [])[-1].note) == is_expected, age
    for eta, words in [  # all steps: what follows them may have no forecast
        (0.0, ""),
        (
            75.0,
            " · 1 min longer than expected: what follows its last step, evaluation and saving, takes longer",
        ),
    ]:
        done = made | {"progress_done": 9.0, "eta_seconds": eta}
        saving = job_of(progress_at=at, started_at=at - timedelta(hours=9), **done)
        assert progress(saving).words == f"Evaluating · 9 of 9 steps{words}"
    Job.objects.update(state="running", progress_at=at, started_at=at - timedelta(hours=9), **made)
    for address in ("/", "/jobs/", f"/jobs/{attempt.job_id}/"):
        page = client_of(alice).get(address).content.decode()
        assert re.search(r"[1-9] min[^<]* longer than expected", page), address


# The timeline


def looks(job: Job, *states: str) -> list[str]:
    return [stop.status for stop in timeline(job, [event(state) for state in states])]


def test_the_timeline_marks_what_is_past_what_is_now_and_a_bad_end():
    for state, expected in [
        ("queued", ["now", "", "", "", ""]),
        ("preflight", ["done", "now", "", "", ""]),
        ("starting", ["done", "done", "now", "", ""]),
        ("running", ["done", "done", "done", "now", ""]),
    ]:
        way = ["queued", "preflight", "starting", "running"]

        assert looks(job_of(state), *way[: way.index(state) + 1]) == expected, (state, expected)

    for state, look in [
        ("succeeded", "done"),
        ("stopped", "done"),
        ("failed", "bad"),
        ("error", "bad"),
    ]:
        assert looks(job_of(state), "queued", "running")[-1] == look, (state, look)

    assert looks(job_of("stopped"), "queued") == ["done", "", "", "", "done"]

    stops = timeline(job_of("stopping"), [event("running"), event("stopping")])

    assert [stop.label for stop in stops][-2:] == ["Stopping", "Done"]

    stops = timeline(job_of("running"), [event("running", 125)])

    assert stops[3].note == "2 min 5 s"

    stops = timeline(job_of("queued"), [event("preflight"), event("queued")])

    assert [stop.status for stop in stops][:2] == ["now", ""]

    for state in JobState.values:
        stops = timeline(job_of(state), [])

        assert stops[0].label == "Queued", state
        assert stops[-1].label, state


def test_an_end_within_hours_names_the_time_and_a_later_one_its_day():
    for days in [1.5, 40]:
        end = now() + timedelta(days=days)
        last = timeline(job_of(eta_seconds=days * 86_400), [])[-1]
        assert last.note.startswith("about "), days
        assert f"{end:%b}" in last.note, days
    last = timeline(job_of(eta_seconds=600.0), [])[-1]
    assert len(last.note.removeprefix("about ")) == 5


def test_the_expected_end_is_said_in_the_servers_time_zone():
    with timezone.override("Asia/Tokyo"):
        last = timeline(job_of(eta_seconds=60.0), [])[-1]
        expected = timezone.localtime(now() + timedelta(seconds=60))
    assert last.note in {
        f"about {expected:%H:%M}",
        f"about {expected - timedelta(minutes=1):%H:%M}",
    }


def test_how_long_a_job_ran_is_between_its_start_and_its_end():
    at = now()
    early, late = at - timedelta(seconds=100), at - timedelta(seconds=40)
    for started, ended, seconds in ((None, None, 0), (early, late, 60), (early, early, 0)):
        job = job_of(started_at=started, ended_at=ended)
        assert elapsed_seconds(job) == seconds, (started, ended)


def test_one_figure_stands_for_the_whole_job_in_words():
    for metrics, ratio, words in [
        ({"peak_memory_bytes": 0.5, "tokens_per_second": 0.9}, 0.9, "10~% slower"),
        ({"step_seconds": 1.2, "peak_memory_bytes": 0.5}, 1.2, "20~% slower"),
        ({"step_seconds": 0.5}, 0.5, "2* faster"),
        ({"tokens_per_second": 0.0173}, 0.0173, "58* slower"),
        ({"tokens_per_second": 1.0004}, 1.0004, "as predicted"),
        ({"peak_memory_bytes": 0.4}, 0.4, "2.5* less"),
    ]:
        found = against_prediction(row(name, value) for name, value in metrics.items())
        said = words.replace("~", NBSP).replace("*", TIMES)
        assert (found.ratio, found.words) == (ratio, said), metrics
    for metrics in ({"ttft_seconds": 3.0}, {}):
        assert against_prediction(row(name, value) for name, value in metrics.items()) is None


# Joules and money on a job's page: measured beside predicted, with the prices of its host.


DRAWN = {
    "gpu0_energy_joules": 5000.0,
    "package_0_energy_joules": 2200.0,
    "energy_joules": 7200.0,
    "energy_joules_per_token": 0.5,
    "tokens_per_second": 1000.0,
}
HOW = {"energy_joules_per_token": "10000 tokens in Training: gpu0 by NVML"}
SAID = {"value": 0.4, "low": 0.3, "high": 0.6, "unit": "joules_per_token"}


@pytest.fixture
def draft(draft) -> Job:
    draft.prediction = draft.prediction | {"energy_joules_per_token": SAID}
    draft.save()
    return draft


@pytest.fixture
def priced(running, report) -> Job:
    """A job that ended on a host whose labels state two prices, and said what it drew."""
    running.host.labels = {"usd_per_kwh": "0.36", "usd_per_hour": "1.80"}
    running.host.save()
    report(("result", {"measured": DRAWN, "notes": HOW}))
    at = now()
    Job.objects.filter(pk=running.pk).update(
        state="succeeded", started_at=at - timedelta(seconds=60), ended_at=at
    )
    return Job.objects.get(pk=running.pk)


def words(client, job: Job) -> str:
    text = re.sub(r"<[^>]+>", " ", client.get(f"/jobs/{job.pk}/").content.decode())
    return re.sub(r"\s+", " ", text.replace("\N{NO-BREAK SPACE}", " "))


@pytest.mark.django_db(databases="__all__")
def test_joules_stand_beside_the_planners_with_sensor_and_each_device(as_alice, priced):
    text = words(as_alice, priced)
    assert "Energy per token 0.500 J/token" in text
    assert "measured · predicted 0.400 J/token" in text
    assert "Energy of gpu0" in text
    assert "Energy of package_0" in text
    assert HOW["energy_joules_per_token"] in text


@pytest.mark.django_db(databases="__all__")
def test_money_is_what_was_measured_at_the_prices_that_the_hosts_labels_state(priced):
    costs = costs_of(priced)
    assert costs["run_electricity_usd"].usd == pytest.approx(7200 / 3.6e6 * 0.36)
    assert costs["electricity_usd_per_million_tokens"].usd == pytest.approx(0.5e6 / 3.6e6 * 0.36)
    assert costs["run_cost_usd"].usd == pytest.approx(1.80 / 60)
    assert costs["cost_usd_per_million_tokens"].usd == pytest.approx(1.80 / 3600 / 1000 * 1e6)
    assert costs["run_cost_usd"].how == "from start to end at $1.8 an hour, label of Box"
    priced.num_hosts = 2
    assert costs_of(priced) == {}


@pytest.mark.django_db(databases="__all__")
def test_a_job_on_a_host_without_a_price_shows_joules_and_no_money(as_alice, priced):
    priced.host.labels = {"usd_per_kwh": "cheap", "usd_per_hour": "-1"}
    priced.host.save()
    text = words(as_alice, priced)
    assert price_of(priced.host.labels, "usd_per_kwh") is None
    assert "Energy of the run 7.20 kJ" in text
    assert "$" not in text.partition("Predicted against measured")[2].partition("Log")[0]


@pytest.mark.django_db(databases="__all__")
def test_a_job_that_no_sensor_saw_says_why(as_alice, running, report):
    why = "not measured: this host has no power sensor: no RAPL counter"
    report(("result", {"measured": {"perplexity": 9.0}, "notes": {"energy_joules": why}}))
    text = words(as_alice, running)
    assert f"Energy: {why}." in text
    assert "Energy of the run" not in text
