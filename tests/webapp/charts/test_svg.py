"""The picture of a chart without JavaScript."""

import re

import pytest

from webapp.charts.catalog import charts_for
from webapp.charts.figures import HEIGHT, WIDTH, Prediction, Series, clock, drawing, figure

LOSS, TOKENS = charts_for("train")[:2]


def picture(values, prediction=None, chart=TOKENS):
    series = Series(chart.metric, tuple(1000 * i for i in range(len(values))), values)
    drawn = figure(chart, series, start_ms=0, end_ms=1000 * len(values), prediction=prediction)
    return drawing(drawn)


def numbers(path):
    return [float(text) for text in re.findall(r"-?\d+\.\d", path["d"])]


def test_every_point_lies_inside_the_picture():
    for path in picture((5.0, 80.0, 20.0), Prediction(50.0, 30.0, 90.0))["paths"]:
        found = numbers(path)
        assert all(0 <= x <= WIDTH for x in found[::2])
        assert all(0 <= y <= HEIGHT for y in found[1::2])


def test_predicted_and_measured_have_their_own_classes():
    classes = [path["class"] for path in picture((1.0,), Prediction(2.0, 1.0, 3.0))["paths"]]
    assert classes == ["band", "pred", "meas"]


def test_a_gap_lifts_the_pen():
    (path,) = picture((1.0, None, 2.0))["paths"]
    assert path["d"].count("M") == 2


def test_a_lone_point_is_a_dot():
    (path,) = picture((None, 3.0, None))["paths"]
    assert path["d"].endswith(" h0")


def test_without_points_there_is_no_measured_path():
    assert picture(())["paths"] == []


def test_a_flat_line_still_has_an_axis():
    assert len({level["y"] for level in picture((2.0, 2.0), chart=LOSS)["levels"]}) == 4


@pytest.mark.parametrize(
    ("ms", "text"), [(0, "0:00"), (65_000, "1:05"), (3_600_000, "1:00 h"), (7_384_000, "2:03 h")]
)
def test_time_reads_as_a_clock(ms, text):
    assert clock(ms) == text
