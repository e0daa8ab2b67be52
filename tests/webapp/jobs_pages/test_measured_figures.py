"""The one place of a job's figures: what is measured, what is judged, in which words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webapp.charts.catalog import BY_KIND, charts_for
from webapp.charts.figures import Prediction, Series
from webapp.core.clock import now
from webapp.core.units import NBSP
from webapp.figures.registry import REGISTRY, definition_of
from webapp.jobs.evaluating import before_after
from webapp.jobs.measured_figures import JobFigure, answer, cards_of, figures_of, predictions
from webapp.jobs.models import Job
from webapp.jobs.plots import caption, figure_words

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


@pytest.mark.parametrize("figure", REGISTRY.values(), ids=REGISTRY)
def test_every_figure_says_what_it_is_and_how_it_is_taken(figure):
    assert figure.label[0].isupper()
    assert figure.definition.endswith(".")
    assert all(taking.words for taking in (*figure.takings.values(), figure.default))


def test_no_two_figures_have_the_same_words():
    labels = [each.label for each in REGISTRY.values()]

    assert len(set(labels)) == len(labels)


def test_every_figure_of_a_chart_is_in_the_registry():
    names = {name for charts in BY_KIND.values() for each in charts for name in each.figures}

    assert {name.removeprefix("original_") for name in names} <= set(REGISTRY)


def test_an_unknown_metric_is_called_by_its_name():
    assert definition_of("tokens_seen").label == "Tokens seen"


def test_an_originals_figure_is_taken_of_the_original():
    found = definition_of("original_peak_memory_bytes")

    assert found.label == "Peak memory, original"
    assert found.taking("compress").phase == "Measuring the original"


# Values


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
    assert (SPEED in predictions(job_of(prediction={SPEED: entry}))) == is_known


def test_a_measured_figure_keeps_its_prediction_in_words():
    card = figure_of(SPEED, 3150.0, Prediction(3000.0, 2700.0, 3400.0)).card

    assert (card.provenance, str(card.shown)) == ("measured", f"3\u202f150{NBSP}tok/s")
    assert card.note == f"measured · predicted 3\u202f000{NBSP}tok/s"


def test_a_figure_that_was_only_predicted_says_so():
    job = job_of(prediction={"step_seconds": {"value": 0.5}})

    card = figures_of(job)["step_seconds"].card

    assert (card.provenance, card.measured) == ("modelled", None)
    assert card.note == "predicted, not measured yet"


def test_a_figure_that_was_only_measured_says_so():
    card = figure_of("perplexity", 61.5).card

    assert (card.provenance, card.note) == ("measured", "measured here")


def test_a_figure_of_nothing_is_absent():
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

    assert answer([figure_of(SPEED, value, said) for value in values]) == words


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


@pytest.mark.parametrize(
    ("value", "words"),
    [(99.6, "equal to"), (100.4, "equal to"), (100.6, "1 % above"), (99.4, "1 % below")],
)
def test_a_caption_rounds_to_whole_per_cent(value, words):
    assert words in caption_of(TOKENS, (1.0,), figure_of(SPEED, value, Prediction(100.0)))


@pytest.mark.parametrize("said", [None, Prediction(0.0)])
def test_a_caption_without_a_prediction_that_divides_says_the_value_alone(said):
    words = caption_of(TOKENS, (1.0, 2.0), figure_of(SPEED, 2.0, said))

    assert words == f"Tokens per second 2.00{NBSP}tok/s."


def test_points_for_which_no_figure_stands_are_said_as_a_span():
    chart = next(c for c in charts_for("serve") if c.metric == "kv_cache_used_ratio")

    said = " ".join(caption_of(chart, (0.0, 0.08)).split())

    assert said == "8.0 % at the last point, between 0.0 % and 8.0 %."


def test_gaps_do_not_count_in_a_caption():
    words = caption(LOSS, Series("loss", (1, 2, 3), (3.0, None, 2.0)), None)

    assert words.startswith("2.00")
    assert "nan" not in words


# Before and after


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

    assert before_after(figures_of(job))[0].words == words
