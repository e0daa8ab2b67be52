"""Memory over time before its prediction, as a figure and as its picture."""

import pytest

from webapp.charts.figures import ORIGIN_MS, Series, drawing
from webapp.charts.job_charts import GIB, Backdrop, Layer, memory_timeline

LAYERS = [Layer("weights", "Weights", 2 * GIB), Layer("activations", "Activations", 3 * GIB)]
SERIES = Series("rss_bytes", (1000, 2000, 3000), (GIB, None, 6 * GIB))


@pytest.fixture
def figure():
    return memory_timeline(SERIES, Backdrop(LAYERS, 8 * GIB, wanted=9 * GIB), 1000, 4000)


def trace(figure: dict, name: str) -> dict:
    return next(each for each in figure["data"] if each["name"] == name)


def test_the_predicted_terms_stand_on_each_other(figure):
    assert trace(figure, "Weights")["y"] == [0, 0, 2, 2]
    assert trace(figure, "Activations")["y"] == [2, 2, 5, 5]


def test_the_capacity_spans_the_whole_run(figure):
    capacity = trace(figure, "capacity")

    assert (capacity["x"], capacity["y"]) == ([ORIGIN_MS, ORIGIN_MS + 3000], [8, 8])


def test_what_was_asked_for_rises_from_the_last_point(figure):
    wanted = trace(figure, "asked for")

    assert (wanted["x"], wanted["y"]) == ([ORIGIN_MS + 2000] * 2, [6, 9])


def test_a_job_that_was_refused_nothing_has_no_such_step():
    plain = memory_timeline(SERIES, Backdrop(LAYERS, 8 * GIB), 1000, 4000)

    assert "asked for" not in {each["name"] for each in plain["data"]}


def test_a_gap_stays_a_gap(figure):
    assert trace(figure, "measured")["y"] == [1, None, 6]


def test_the_axis_ends_above_whatever_is_highest(figure):
    assert figure["layout"]["yaxis"]["range"] == [0, pytest.approx(9 * 1.08)]


def test_the_picture_draws_every_trace_with_its_own_class(figure):
    classes = [path["class"] for path in drawing(figure)["paths"]]

    assert classes == [
        "layer term-weights", "layer term-activations", "capacity", "wanted", "meas",
    ]  # fmt: skip
