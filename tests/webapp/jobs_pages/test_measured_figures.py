"""The one place of a job's figures: what is measured, what is judged, in which words."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.webapp.conftest import client_of, make_job
from webapp.charts.plots import BY_KIND, Prediction, Series, charts_for
from webapp.core.clock import now
from webapp.core.display import NBSP, TIMES
from webapp.core.figures import REGISTRY, definition_of
from webapp.jobs.compression_effect import before_after, significance_note, won_words
from webapp.jobs.job_charts import caption, figure_words
from webapp.jobs.measured_figures import (
    JobFigure,
    answer,
    cards_of,
    figures_of,
    metrics_of,
    outcome_words,
    predictions,
    task_rows,
    utilisation_of,
)
from webapp.jobs.models import Job, JobState, Measurement

SAID = {"value": 3000.0, "low": 2700.0, "high": 3400.0, "unit": "tokens_per_second"}
LOSS, TOKENS = BY_KIND["train"][:2]
SPEED = "tokens_per_second"


def job_of(state="running", **fields) -> Job:
    fields = {"kind": "train"} | fields
    return Job(name="one", state=state, spec={}, created_at=now(), **fields)


def figure_of(name, measured, said=None, state="measured", words="") -> JobFigure:
    return JobFigure(definition_of(name), said, measured, state, words)


def series(*values, metric=SPEED) -> Series:
    return Series(metric, tuple(range(len(values))), values)


# The registry


def test_every_figure_says_what_it_is_and_how_it_is_taken_in_words_of_its_own():
    wrong = [
        name
        for name, figure in REGISTRY.items()
        if not figure.label[0].isupper()
        or not figure.definition.endswith(".")
        or not all(taking.words for taking in (*figure.takings.values(), figure.default))
    ]
    assert not wrong, wrong
    labels = [each.label for each in REGISTRY.values()]
    assert len(set(labels)) == len(labels)
    names = {name for charts in BY_KIND.values() for each in charts for name in each.figures}
    assert {name.removeprefix("original_") for name in names} <= set(REGISTRY)


def test_an_unknown_metric_is_called_by_its_name_and_an_originals_is_taken_of_the_original():
    assert definition_of("tokens_seen").label == "Tokens seen"
    found = definition_of("original_peak_memory_bytes")
    assert found.label == "Peak memory, original"
    assert found.taking("compress").phase == "Measuring the original"


# Values


def test_a_prediction_without_a_number_is_none():
    for entry, is_known in [
        (SAID, True),
        ({"value": 3}, True),
        ({"value": "3"}, False),
        ({"value": None}, False),
        ({}, False),
        (3.0, False),
    ]:
        assert (SPEED in predictions(job_of(prediction={SPEED: entry}))) == is_known, (
            entry,
            is_known,
        )


def test_a_card_says_whether_its_figure_was_predicted_measured_or_both():
    card = figure_of(SPEED, 3150.0, Prediction(3000.0, 2700.0, 3400.0)).card

    assert (card.provenance, str(card.shown)) == ("measured", f"3\u202f150{NBSP}tok/s")
    assert card.note == f"measured · predicted 3\u202f000{NBSP}tok/s"

    job = job_of(prediction={"step_seconds": {"value": 0.5}})

    card = figures_of(job)["step_seconds"].card

    assert (card.provenance, card.measured) == ("modelled", None)
    assert card.note == "predicted, not measured yet"

    card = figure_of("perplexity", 61.5).card

    assert (card.provenance, card.note) == ("measured", "measured here")

    assert "perplexity" not in figures_of(job_of())


def test_a_plans_messages_are_held_to_those_that_nothing_hides():
    planned = {"value": 0.1, "low": None, "high": None, "unit": "share"}
    job = job_of(
        prediction={"exposed_communication_ratio": planned},
        result={
            "measured": {"communication_ratio": 0.5, "exposed_communication_ratio": 0.2},
            "notes": {"exposed_communication_ratio": "a thread waited, by torch's profiler"},
        },
    )

    total, exposed = figures_of(job).values()

    assert (total.measured, total.predicted, total.ratio) == (0.5, None, None)
    assert (exposed.measured, exposed.predicted.value, exposed.ratio) == (0.2, 0.1, 2.0)
    assert exposed.how == "a thread waited, by torch's profiler"
    assert exposed.card.note == f"measured · predicted 10.0{NBSP}%"


def test_figures_stand_in_a_fixed_order():
    job = job_of(
        prediction={"peak_memory_bytes": SAID, SPEED: SAID},
        result={"measured": {"perplexity": 40.0, "disk_bytes": 5.0}},
    )
    assert list(figures_of(job)) == [SPEED, "peak_memory_bytes", "disk_bytes", "perplexity"]


def test_predicted_figures_come_first_and_the_rest_is_folded_with_its_count():
    measured = {name: 1.0 for name in REGISTRY if name.startswith("data_")}
    found = figures_of(job_of(prediction={SPEED: SAID}, result={"measured": measured}))
    cards = cards_of(found)
    assert cards.shown[0].name == SPEED
    assert len(cards.rows) == len(found)
    assert cards.folded_words.startswith(f"{len(found) - len(cards.shown)} more: ")


# What is judged


def test_the_answer_counts_what_lies_inside_its_interval():
    for values, words in [
        ([3000.0], "Every measured figure lies inside its 80 % interval."),
        ([3000.0, 9000.0], "1 of 2 measured figures lie inside their 80 % interval."),
        ([1.0, 9000.0], "0 of 2 measured figures lie inside their 80 % interval."),
        ([2700.0, 3400.0], "Every measured figure lies inside its 80 % interval."),
        ([None], ""),
        ([], ""),
    ]:
        said = Prediction(3000.0, 2700.0, 3400.0)

        assert answer([figure_of(SPEED, value, said) for value in values]) == words, (
            values,
            words,
        )


def test_warm_up_is_shown_and_judged_by_nothing():
    said = Prediction(3000.0, 2700.0, 3400.0)
    words = "not compared yet: warm-up, 12 of 20 steps"
    figure = figure_of(SPEED, 9.0, said, "warm_up", words)
    assert (figure.ratio, figure.place, figure.card.dot) == (None, "", None)
    assert answer([figure]) == ""
    assert words in figure.card.note
    assert words in figure_words(figure)


# Captions


class Figures(dict):
    """Figures by name, as a caption asks for them."""


def caption_of(chart, values, figure=None) -> str:
    found = Figures({figure.name: figure}) if figure else Figures()
    return caption(chart, series(*values, metric=chart.metric), found)


@given(st.floats(0.001, 1e9), st.floats(0.001, 1e9))
def test_a_caption_names_the_figure_its_value_and_the_side(value, said):
    figure = figure_of(SPEED, value, Prediction(said, said * 0.9, said * 1.1))
    side = "below" if value < said * 0.9 else "above" if value > said * 1.1 else "inside"
    words = caption_of(TOKENS, (1.0, 2.0), figure)
    assert words.startswith(f"Tokens per second {figure.shown}")
    assert words.endswith(f"{side} the 80 % interval.")


def test_a_caption_rounds_and_says_a_value_alone_or_a_span_without_gaps():
    for value, words in [
        (99.6, "equal to"),
        (100.4, "equal to"),
        (100.6, "1 % above"),
        (99.4, "1 % below"),
    ]:
        assert words in caption_of(TOKENS, (1.0,), figure_of(SPEED, value, Prediction(100.0))), (
            value,
            words,
        )

    for said in [None, Prediction(0.0)]:
        words = caption_of(TOKENS, (1.0, 2.0), figure_of(SPEED, 2.0, said))

        assert words == f"Tokens per second 2.00{NBSP}tok/s.", said

    chart = next(c for c in charts_for("serve") if c.metric == "kv_cache_used_ratio")

    said = " ".join(caption_of(chart, (0.0, 0.08)).split())

    assert said == "8.0 % at the last point, between 0.0 % and 8.0 %."
    running = next(c for c in charts_for("serve") if c.metric == "running_requests")
    assert caption_of(running, (3.0, 3.0)) == "3 at every point."

    words = caption(LOSS, Series("loss", (1, 2, 3), (3.0, None, 2.0)), None)

    assert words.startswith("2.00")
    assert "nan" not in words


# Before and after


def test_a_change_is_said_in_per_cent_with_a_real_minus():
    for before, after, words in [
        (100.0, 50.0, "\u221250 %"),
        (100.0, 103.0, "+3.0 %"),
        (100.0, 97.0, "\u22123.0 %"),
        (100.0, 250.0, "+150 %"),
        (100.0, 109.94, "+9.9 %"),
    ]:
        job = job_of(result={"measured": {"original_disk_bytes": before, "disk_bytes": after}})

        assert before_after(figures_of(job))[0].words == words, (before, after, words)


# What a compression changed, as its page tells it.


COMPRESSED = {
    "original_disk_bytes": 12_000_000.0,
    "disk_bytes": 6_000_000.0,
    "original_perplexity": 60.0,
    "perplexity": 60.3,
    "original_decode_tokens_per_second": 100.0,
    "decode_tokens_per_second": 150.0,
    "peak_memory_bytes": 5.0,
    "original_parameter_bytes": 10.0,
    "parameter_bytes": 10.001,
}


def test_a_change_is_said_of_each_figure_that_was_taken_twice():
    rows = before_after(figures_of(Job(kind="compress", spec={}, result={"measured": COMPRESSED})))
    words = {row.label: row.words for row in rows}
    assert words["Size on disk"] == "\N{MINUS SIGN}50 %"
    assert words["Perplexity"] == "+0.5 %"
    assert words["Weights in memory"] == "unchanged"
    assert words["Decode speed"] == "+50 %"
    assert "Peak memory" not in words
    assert before_after(figures_of(Job(kind="train", spec={}))) == []


def told(low: float, high: float) -> str:
    names = ("perplexity_ratio", "perplexity_ratio_low", "perplexity_ratio_high")
    measured = dict(zip(names, ((low + high) / 2, low, high), strict=True))
    return significance_note(Job(kind="evaluate", spec={}, result={"measured": measured}))


def test_a_changed_perplexity_is_called_a_change_only_beyond_chance():
    for low, high, words in [
        (1.01, 1.03, "1.010 to 1.030, window by window: worse than the original beyond chance"),
        (0.96, 0.98, "better than the original beyond chance"),
        (0.99, 1.02, "no difference that this amount of text can show"),
    ]:
        assert words in told(low, high), (low, high, words)
    measured = {"perplexity": 60.0, "next_token_accuracy": 0.25}
    assert significance_note(Job(kind="evaluate", spec={}, result={"measured": measured})) == ""


def test_a_share_is_shown_as_per_cent():
    measured = {"original_next_token_accuracy": 0.25, "next_token_accuracy": 0.2}
    (row,) = before_after(figures_of(Job(kind="evaluate", spec={}, result={"measured": measured})))
    assert (str(row.before), str(row.after)) == (
        "25.0\N{NO-BREAK SPACE}%",
        "20.0\N{NO-BREAK SPACE}%",
    )


# The sentence that a compression opens with


def won(kind: str = "compress", **measured: float) -> str:
    base = {"original_disk_bytes": 100.0, "disk_bytes": 75.0}
    speeds = {"original_decode_tokens_per_second": 90.0, "decode_tokens_per_second": 30.0}
    interval = {
        "perplexity_ratio": 1.002,
        "perplexity_ratio_low": 0.99,
        "perplexity_ratio_high": 1.01,
    }
    job = Job(kind=kind, spec={}, result={"measured": base | speeds | interval | measured})
    return won_words(job, figures_of(job))


@pytest.mark.django_db(databases="__all__")
def test_a_speed_that_does_not_count_is_not_in_the_sentence(attempt):
    job = attempt.job
    speeds = {"original_decode_tokens_per_second": 90.0, "decode_tokens_per_second": 30.0}
    job.kind, job.result = (
        "compress",
        {"measured": {"original_disk_bytes": 100.0, "disk_bytes": 75.0, **speeds}},
    )
    Measurement.objects.create(
        job=job, attempt=attempt, host=attempt.host, team=job.team, predicted=60.0,
        metric="decode_tokens_per_second",
        measured=30.0, ratio=0.5, unit="tokens_per_second", measured_at=now(), is_excluded=True,
        invalid_reason="Other programs used 1.9 of the 2 cores",
    )  # fmt: skip
    assert won_words(job, figures_of(job)) == (
        "25 % smaller, quality not measured. The speeds are not compared: Other programs used 1.9 "
        "of the 2 cores."
    )


@pytest.mark.django_db
def test_a_compression_says_what_was_won_and_what_it_cost_as_it_was_measured():
    assert won() == "25 % smaller, same quality, 3.0\N{MULTIPLICATION SIGN} slower here."

    for measured, words in [
        ({"disk_bytes": 100.5}, "The same size,"),
        ({"disk_bytes": 130.0}, "30 % larger,"),
        ({"decode_tokens_per_second": 180.0}, "2.0\N{MULTIPLICATION SIGN} faster here."),
        ({"decode_tokens_per_second": 99.0}, "10 % faster here."),
        ({"decode_tokens_per_second": 89.5}, "as fast here."),
        (
            {"perplexity_ratio": 1.023, "perplexity_ratio_low": 1.01},
            "2.3 % higher perplexity",
        ),
        ({"perplexity_ratio_low": 0.0}, "quality not measured"),
    ]:
        high = {"perplexity_ratio_high": 1.04} if "perplexity_ratio" in measured else {}

        assert words in won(**measured, **high), (measured, words)

    assert won("train") == ""
    assert won(original_disk_bytes=0.0) == ""


# Metrics of tasks as a job's page shows them, beside the original's, and in a comparison.


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


# Model FLOP utilisation of a training: the plan says it, and its measured speed.


PLANNED_SPEED = Prediction(3000.0, 2700.0, 3400.0)
PLANNED = Prediction(0.4, 0.3, 0.5)


@pytest.fixture
def draft(draft) -> Job:
    said = {"value": 0.4, "low": 0.3, "high": 0.5, "unit": "share"}
    draft.prediction = draft.prediction | {"mfu": said}
    draft.save()
    return draft


def test_it_moves_as_the_speed_does_and_is_none_without_plan_or_speed():
    said = {"mfu": PLANNED, "tokens_per_second": PLANNED_SPEED}

    assert utilisation_of(said, {"tokens_per_second": 1500.0}) == {"mfu": pytest.approx(0.2)}
    assert utilisation_of(said, {"tokens_per_second": 3000.0}) == {"mfu": pytest.approx(0.4)}

    for said, measured in [
        ({"tokens_per_second": PLANNED_SPEED}, {"tokens_per_second": 1500.0}),
        ({"mfu": PLANNED}, {"tokens_per_second": 1500.0}),
        ({"mfu": PLANNED, "tokens_per_second": PLANNED_SPEED}, {}),
        ({"mfu": PLANNED, "tokens_per_second": Prediction(0.0, None, None)}, {"x": 1.0}),
    ]:
        assert utilisation_of(said, measured) == {}, (said, measured)


@pytest.mark.django_db(databases="__all__")
def test_the_jobs_page_has_it_beside_the_plans(running, report, client, alice):
    report(("result", {"measured": {"tokens_per_second": 3600.0}, "notes": {}}))
    client.force_login(alice)
    page = client.get(f"/jobs/{running.pk}/").content.decode()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page).replace("\N{NO-BREAK SPACE}", " "))
    assert "Model FLOP utilisation" in text
    assert "48.0 %" in text  # 0.4 x 3600 / 3000
    assert "predicted 40.0 %" in text


def test_the_outcome_says_speed_and_memory_with_the_reason_why_they_do_not_count():
    def figure(name, measured, low, high):
        return JobFigure(definition_of(name), Prediction(1.0, low, high), measured, "measured")

    figures = {
        "tokens_per_second": figure("tokens_per_second", 0.15, 0.8, 1.2),
        "peak_memory_bytes": figure("peak_memory_bytes", 1.08, 0.9, 1.1),
    }
    why = "Other programs used 1.8 of the 2 cores."
    said = outcome_words(figures, lambda _metric: why)
    assert said == (
        f"Tokens per second 6.7{TIMES} slower than predicted, below its interval; "
        f"Peak memory 8{NBSP}% more than predicted, inside its interval. "
        "Not counted: Other programs used 1.8 of the 2 cores."
    )
    reasons = {"peak_memory_bytes": why, "step_seconds": "of a figure that is not shown"}
    said = outcome_words(figures, lambda metric: reasons.get(metric, ""))
    assert said.endswith(f"inside its interval. Peak memory not counted: {why}")
    assert "ounted" not in outcome_words(figures)
    assert outcome_words({}) == ""
